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
from torch import Tensor, nn

from course_lib._words import counted, readable_bytes
from course_lib.launch import RankError, run_ranks
from course_lib.memory import predict_peak
from course_lib.memory.ledger import tensors_in
from course_lib.preflight.checks.setup import held_by
from course_lib.preflight.checks.window import loss_of
from course_lib.preflight.report import Finding, Judgement
from course_lib.preflight.runs.lightning_run import Enough, LightningRun
from course_lib.preflight.runs.loaders import stop_workers
from course_lib.preflight.runs.plain_loop import AnyRun, PlainLoop

MOST_DOUBTS = 2


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


def gpu_of(run: AnyRun) -> torch.device | None:
    """The GPU that the run is on, or None."""
    if isinstance(run, PlainLoop):
        devices = [parameter.device for parameter in run.model.parameters()]
    else:
        devices = [run.trainer.strategy.root_device]
    return next((device for device in devices if device.type == "cuda"), None)


def peak_of_largest_batch(run: AnyRun, given: int | None, seconds: float) -> Callable[[Path], Judgement]:
    """A trial: read an epoch for at most half of ``seconds``, and predict a step with its largest batch.

    ``given`` is the memory there is, in bytes; by default it is the device's, or this machine's for a run on the CPU.
    """
    gpu = gpu_of(run)
    try:
        there_is = given if given is not None else _memory_there_is(gpu)
    except RankError as error:
        why = f"the GPU could not be asked for its memory: {str(error).splitlines()[0]}"
        return lambda folder: _not_judged(why)
    device: Literal["cuda", "cpu"] = "cpu" if gpu is None else "cuda"

    def trial(folder: Path) -> Judgement:
        if isinstance(run, PlainLoop):
            stop_workers(run.loader)
            largest = _largest(run.loader, seconds / 2)
            return _predicted(
                run.model,
                run.loss_fn,
                run.optimizer,
                largest,
                there_is,
                device=device,
                windows=run.accumulate_grad_batches,
            )
        return _of_trainer(run, folder, there_is, device, seconds / 2)

    return trial


def _memory_there_is(gpu: torch.device | None) -> int:
    if gpu is None:
        return int(psutil.virtual_memory().total)
    if torch.cuda.is_initialized():
        return _memory_of(gpu)
    # Asking puts CUDA in use: this process could not be forked any more.
    return int(run_ranks(lambda rank: _memory_of(gpu), 1, backend="gloo")[0].value)


def _memory_of(gpu: torch.device) -> int:
    return int(torch.cuda.get_device_properties(gpu).total_memory)


def _of_trainer(
    run: LightningRun, folder: Path, there_is: int, device: Literal["cuda", "cpu"], seconds: float
) -> Judgement:
    if not run.model.automatic_optimization:
        return _not_judged("with manual optimization, a step is the module's own code")
    precision = str(run.trainer.precision)
    judgements: list[Judgement] = []

    def look(trainer: Any, model: Any) -> None:
        if len(run.loaders()) != 1:
            judgements.append(_not_judged(f"the run has {len(run.loaders())} training loaders"))
            raise Enough
        [loader] = run.loaders()
        largest = _largest(loader, seconds)

        def loss(module: nn.Module, batch: Any) -> Tensor:
            vars(module)["_trainer"] = trainer
            return loss_of(module, batch, run.accumulates_exactly)

        vars(model)["_trainer"] = None  # the module is copied, and the Trainer need not be
        judgements.append(
            _predicted(
                model,
                loss,
                trainer.optimizers[0],
                largest,
                there_is,
                device=device,
                windows=int(trainer.accumulate_grad_batches),
                precision=precision,
                ddp=run.world_size > 1,
            )
        )
        raise Enough

    run.start(folder, world_size=run.world_size, prepare_loader=stop_workers, on_train_start=look)
    return judgements[0] if judgements else _not_judged("the run has no batch")


def _largest(loader: Any, seconds: float) -> Largest:
    ends = time.monotonic() + seconds
    most, largest, read, all_read = -1, None, 0, True
    for batch in loader:
        size = sum(tensor.nbytes for tensor in tensors_in(batch))
        if size > most:
            most, largest = size, batch
        read += 1
        if time.monotonic() > ends:
            all_read = False
            break
    if read == 0:
        raise RuntimeError("the run has no batch")
    return Largest(largest, read, all_read)


def _predicted(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    optimizer: torch.optim.Optimizer,
    largest: Largest,
    there_is: int,
    *,
    device: Literal["cuda", "cpu"],
    windows: int,
    precision: str = "32-true",
    ddp: bool = False,
) -> Judgement:
    held = held_by([optimizer])
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
            loss_fn=loss_fn,
            precision="bf16" if "mixed" in precision else "bf16-true" if "16" in precision else "fp32",
            accumulate=min(windows, 2),
            ddp=ddp,
            device=device,
        )
    except RuntimeError as error:
        if "reads a value" not in str(error):
            raise
        return _not_judged("the step reads values of tensors, and a prediction has none (see memory.measure_peak)")
    needs = max(predicted.peak_bytes, predicted.reserved_bytes)
    judgement = Judgement(facts={"predicted peak of the largest batch": readable_bytes(needs)})
    judgement.notes += [f"memory: {doubt}" for doubt in predicted.doubts[:MOST_DOUBTS]]
    if not largest.all_read:
        judgement.notes.append(
            f"memory: the largest of the first {counted(largest.read, 'batch', 'batches')} was tried"
        )
    if not predicted.fits(there_is):
        most = max(predicted.by_category, key=lambda category: predicted.by_category[category])
        judgement.findings.append(
            Finding(
                "memory",
                f"A step with the largest of an epoch's {counted(largest.read, 'batch', 'batches')} "
                f"({largest.shapes}) needs {readable_bytes(needs)}, most of it for {most}, and there are "
                f"{readable_bytes(there_is)}.",
                "The run ends there, out of memory, at whatever hour that batch comes.",
                "Bound what a batch may hold (samples × length), or make it smaller: memory.find_batch_size.",
                "03_memory",
            )
        )
    return judgement


def _not_judged(why: str) -> Judgement:
    return Judgement(not_judged={"memory": why})
