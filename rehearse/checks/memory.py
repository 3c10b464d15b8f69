"""memory: the predicted peak of a step with an epoch's largest batch, against the memory that there is."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import nn

from course_lib._tensors import parameters_of
from course_lib._words import counted, readable_bytes
from course_lib.launch import RankError, run_ranks
from course_lib.memory import predict_peak
from course_lib.memory.ledger import tensors_in
from course_lib.memory.predicting import WORKSPACES, Unpredictable
from rehearse.report import Judgement, not_applicable, not_judged
from rehearse.runs.run import Settings, TrainingRun


@dataclass(frozen=True)
class Largest:
    """The batch of an epoch whose tensors take the most bytes."""

    batch: Any
    read: int
    """Batches that were looked at."""
    all_read: bool

    @property
    def shapes(self) -> str:
        shown = [" × ".join(map(str, tensor.shape)) for tensor in tensors_in(self.batch) if tensor.ndim]
        return ", ".join(shown[:2])


def peak_of_largest_batch(run: TrainingRun, given: int | None, seconds: float) -> Callable[[Path], Judgement]:
    """A trial: read an epoch for at most half of ``seconds``, and predict a step with its largest batch.

    ``given`` is the memory there is, in bytes; by default it is the device's, or this machine's for a run on the CPU.
    """
    gpu, settings = run.gpu(), run.settings
    try:
        there_is = given if given is not None else _memory_there_is(gpu)
    except RankError as error:
        why = f"the GPU could not be asked for its memory: {str(error).splitlines()[0]}"
        return lambda folder: not_judged("memory", why)
    device: Literal["cuda", "cpu"] = "cpu" if gpu is None else "cuda"

    def look() -> Judgement:
        loaders = run.loaders()
        if len(loaders) != 1:
            return not_applicable("memory", f"the run has {len(loaders)} training loaders")
        return _predicted(run, settings, _largest(loaders[0], seconds / 2), there_is, device)

    def trial(folder: Path) -> Judgement:
        if not settings.automatic:
            return not_applicable("memory", "with manual optimization, a step is the module's own code")
        return run.at_start(folder, look) or not_applicable("memory", "the run has no batch")

    return trial


def _predictable(precision: str) -> Literal["fp32", "bf16", "bf16-true"]:
    """A Trainer's precision as a prediction knows it; halves take the same bytes in fp16 as in bf16."""
    if "16" not in precision:
        return "fp32"
    return "bf16" if "mixed" in precision else "bf16-true"


def _memory_there_is(gpu: torch.device | None) -> int:
    if gpu is None:
        return int(psutil.virtual_memory().total)
    if torch.cuda.is_initialized():
        return _memory_of(gpu)
    # Asking puts CUDA in use: this process could not be forked any more.
    return int(run_ranks(lambda rank: _memory_of(gpu), 1, backend="gloo")[0].value)


def _memory_of(gpu: torch.device) -> int:
    return int(torch.cuda.get_device_properties(gpu).total_memory)


def _largest(loader: Any, seconds: float) -> Largest:
    ends = time.process_time() + seconds
    most, largest, read, all_read = -1, None, 0, True
    for batch in loader:
        size = sum(tensor.nbytes for tensor in tensors_in(batch))
        if size > most:
            most, largest = size, batch
        read += 1
        if time.process_time() > ends:
            all_read = False
            break
    if read == 0:
        raise RuntimeError("the run has no batch")
    return Largest(largest, read, all_read)


def _predicted(
    run: TrainingRun, settings: Settings, largest: Largest, there_is: int, device: Literal["cuda", "cpu"]
) -> Judgement:
    model, optimizer = run.bare_model(), run.optimizers[0]
    held = set(map(id, parameters_of(optimizer)))
    places = [number for number, parameter in enumerate(model.parameters()) if id(parameter) in held]

    def again(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        kind: Any = type(optimizer)
        taken = inspect.signature(kind).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in taken}
        made: torch.optim.Optimizer = kind([parameters[number] for number in places], **options)
        return made

    try:
        predicted = predict_peak(
            lambda: model,
            lambda: largest.batch,
            again,
            loss_fn=run.loss_of,
            precision=_predictable(settings.precision),
            accumulate_grad_batches=min(run.window, 2),
            ddp=settings.world_size > 1,
            device=device,
        )
    except Unpredictable as error:
        return not_applicable("memory", str(error))
    needs = max(predicted.peak_bytes, predicted.reserved_bytes)
    judgement = Judgement(facts={"predicted peak of the largest batch": readable_bytes(needs)})
    judgement.notes.append(f"memory: {WORKSPACES}")
    if not largest.all_read:
        judgement.notes.append(
            f"memory: the largest of the first {counted(largest.read, 'batch', 'batches')} was tried"
        )
    if not predicted.fits(there_is):
        most = max(predicted.by_category, key=lambda category: predicted.by_category[category])
        judgement.find(
            "memory",
            f"A step with the largest of an epoch's {counted(largest.read, 'batch', 'batches')} "
            f"({largest.shapes}) needs {readable_bytes(needs)}, most of it for {most}, and there are "
            f"{readable_bytes(there_is)}.",
            "The run ends there, out of memory, at whatever hour that batch comes.",
            "Bound what a batch may hold (samples × length), or make it smaller: memory.find_batch_size.",
        )
    return judgement
