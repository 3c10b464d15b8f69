"""What chapter 03 asks first: a peak by hand, and a validation loop that keeps too much. Then: `ch03_three_trials`."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet, ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from course_lib.leaks.graphs import graph_roots
from workbook.exercises import Exercise, PropertyExercise


def _peak_bytes(num_parameters: int, saved_numbers_per_sample: int, batch_size: int, optimizer_copies: int) -> int:
    always = num_parameters * (1 + optimizer_copies)
    end_of_forward = always + saved_numbers_per_sample * batch_size
    return 4 * max(end_of_forward, always + num_parameters)


def _wrong_peaks(
    num_parameters: int, saved_numbers_per_sample: int, batch_size: int, optimizer_copies: int
) -> dict[str, float]:
    always = num_parameters * (1 + optimizer_copies)
    activations = saved_numbers_per_sample * batch_size
    worst = max(activations, num_parameters)
    return {
        "{got} counts numbers: each takes 4 bytes in single precision.": always + worst,
        "{got} adds all that the step ever holds, but these bytes are never there at the same time: the backward "
        "pass frees activations while it makes gradients.": 4 * (always + num_parameters + activations),
        "{got} adds all gradients and half of the activations. In the middle of the backward pass only half of the "
        "gradients exist; with equal layers the worst moment is at one of its two ends.": 4
        * (always + num_parameters + activations / 2),
        "{got} has only half of the activations. At the end of the forward pass all of them are there.": 4
        * (always + max(activations / 2, num_parameters)),
        "{got} multiplies the parameters by the batch size. All samples share them.": 4
        * (always * batch_size + activations),
        "{got} always counts three copies of the parameters. That is AdamW; `optimizer_copies` says how many there "
        "are.": 4 * (3 * num_parameters + worst),
        "{got} always counts two optimizer copies beside a gradient. `optimizer_copies` says how many there are, and "
        "the gradients are not there together with all activations.": 4 * (4 * num_parameters + activations),
        "{got} leaves out the parameters themselves. They are there at every moment, and "
        "`optimizer_copies` does not count them.": 4 * (num_parameters * optimizer_copies + worst),
        "{got} leaves out the optimizer's state. It is there at every moment.": 4 * (num_parameters + worst),
        "{got} is the end of the forward pass. With few samples another moment holds more: which one?": 4
        * (always + activations),
        "{got} is the optimizer's step, which holds no activations. The forward pass has them.": 4
        * (always + num_parameters),
        "{got} has the activations of one sample. The network saves them of each sample in the batch.": 4
        * (always + max(saved_numbers_per_sample, num_parameters)),
        "{got} has no gradients where the optimizer keeps nothing: SGD's step holds them, too.": 4
        * (always + max(activations, num_parameters if optimizer_copies else 0)),
        "{got} has gradients half as large as the optimizer's copies. They are as large as the parameters.": 4
        * (always + max(activations, optimizer_copies * num_parameters // 2)),
        "{got} has no activations where the batch is a single sample.": 4
        * (always + (activations if batch_size > 1 else num_parameters)),
    }


def _draw_peak(draw: random.Random) -> dict[str, int]:
    num_parameters = draw.choice([0, 1, draw.randrange(2000), draw.randrange(2**29, 2**31)])
    saved_numbers = draw.choice([0, 1, num_parameters, draw.randrange(300)])
    batch_size = draw.choice([1, 2, draw.randint(1, 40)])
    copies = draw.choice([0, 1, 2, 3])
    return dict(
        num_parameters=num_parameters,
        saved_numbers_per_sample=saved_numbers,
        batch_size=batch_size,
        optimizer_copies=copies,
    )


peak_bytes = Exercise(
    "peak_bytes",
    solution=_peak_bytes,
    # Each case tells some misconceptions from all that are still alive.
    cases=[
        dict(num_parameters=100, saved_numbers_per_sample=170, batch_size=8, optimizer_copies=0),
        dict(num_parameters=100, saved_numbers_per_sample=50, batch_size=8, optimizer_copies=2),
        dict(num_parameters=1000, saved_numbers_per_sample=50, batch_size=1, optimizer_copies=2),
        dict(num_parameters=1000, saved_numbers_per_sample=50, batch_size=20, optimizer_copies=1),
    ],
    misconceptions=_wrong_peaks,
    search=_draw_peak,
)


class SavedTensor:
    """What autograd saves, in a box that a WeakSet can hold."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


@dataclass
class Validated:
    """What a validation loop returned, and what it kept while it ran."""

    batches: list[Tensor]
    losses: list[float]
    returned: Any
    saved_before_forward: list[int]
    """When each forward pass began: the tensors that autograd had saved in earlier ones and still kept."""
    outputs_before_forward: list[int]
    """When each forward pass began: the outputs of earlier ones that still lived, with or without a graph."""
    most_samples: int
    """In one forward pass."""


def watched(
    validate: Callable[[nn.Module, list[Tensor]], Any], num_batches: int, seed: int = 0, equal: bool = False
) -> Validated:
    """Run ``validate(model, batches)`` on a small model, and count what autograd keeps meanwhile."""
    saved: WeakSet[SavedTensor] = WeakSet()
    before_forward: list[int] = []
    outputs: list[ref[Tensor]] = []
    outputs_before_forward: list[int] = []
    most_samples = 0

    class First(nn.Linear):
        """Notes when a forward pass begins, also where it is called by `forward`, or of a copy of the model."""

        def forward(self, x: Tensor) -> Tensor:
            nonlocal most_samples
            before_forward.append(len(saved))
            outputs_before_forward.append(sum(output() is not None for output in outputs))
            most_samples = max(most_samples, x.numel() // self.in_features)
            return super().forward(x)

    class Last(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            outputs.append(ref(output))
            return output

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, batches = _small_model(seed, First(4, 4), Last(4, 2)), list(torch.randn(num_batches, SAMPLES, 4))
    if equal:
        batches = [batches[0].clone() for _ in batches]
    if seed % 3 == 1:
        batches[-1] = batches[-1][: SAMPLES // 2]  # as the last one of an epoch may be
    with torch.no_grad():
        losses = [model(batch).square().mean().item() for batch in batches]
    before_forward.clear()
    outputs.clear()
    outputs_before_forward.clear()

    def pack(tensor: Tensor) -> SavedTensor:
        box = SavedTensor(tensor)
        saved.add(box)
        return box

    with saved_tensors_hooks(pack, lambda box: box.tensor):
        returned = validate(model, list(batches))
    return Validated(batches, losses, returned, before_forward, outputs_before_forward, most_samples)


SAMPLES = 8
"""In each batch, but for a short last one."""


def _small_model(seed: int, first: nn.Module, last: nn.Module) -> nn.Module:
    """As an answer may find it: as it was made, a layer in evaluation mode, frozen, with gradients, or all zeros."""
    model = nn.Sequential(first, nn.Tanh(), last)
    model[0].train(seed % 4 != 1).requires_grad_(seed % 4 != 2)
    if seed % 4 == 3:
        model[2].bias.grad = torch.ones(2)
    if seed % 5 == 4:
        for parameter in model[2].parameters():
            nn.init.zeros_(parameter)  # every loss is 0
    return model


def fault_of_validation(validate: Callable[[nn.Module, list[Tensor]], Any]) -> str | None:
    """What is wrong with a ``validate(model, batches)``: with one batch, with five, then with any number; or None."""
    draw = random.Random(0)
    cases = [(1, 0, False), (5, 0, False), (4, 0, True)]
    cases += [(draw.choice([1, 2, draw.randint(3, 7)]), seed, False) for seed in range(1, 60)]
    for num_batches, seed, equal in cases:
        seen = watched(validate, num_batches, seed, equal)
        fault = _fault_of_value(seen) or _fault_while_running(seen)
        if fault:
            return f"with {num_batches} {'equal ' if equal else ''}batch{'es' if num_batches > 1 else ''}, {fault}"
    with torch.no_grad(), contextlib.suppress(RuntimeError):  # what needs gradients has been told already
        watched(validate, num_batches=1)
    return None


def _fault_of_value(seen: Validated) -> str | None:
    returned = seen.returned
    if returned is None:
        return "it returned nothing. Does it end with `return`?"
    if not isinstance(returned, dict) or set(returned) != {"losses", "worst"}:
        keys = f" with the keys {sorted(map(str, returned))}" if isinstance(returned, dict) else ""
        return f'it must return a dict of "losses" and "worst" alone, got {type(returned).__name__}{keys}.'
    nodes = len(graph_nodes(_tensors_in(returned)))
    if nodes:
        return _fault_of_graphs(returned, nodes)
    losses, worst = returned["losses"], returned["worst"]
    if isinstance(losses, np.ndarray):
        losses = losses.tolist()
    if _tensors_in(losses):
        return (
            "no graph is kept any more, but `losses` holds tensors. Numbers were asked for: `.item()` makes one, and "
            "no GPU memory has to be kept for each loss."
        )
    if not isinstance(losses, Sequence) or not _close(losses, seen.losses):
        told = f"`losses` should be {[round(loss, 6) for loss in seen.losses]}, got {losses}."
        ordered = isinstance(losses, Sequence) and _close(sorted(losses), sorted(seen.losses))
        return f"{told} {IN_ORDER}" if ordered else told
    return _fault_of_worst(worst, seen)


IN_ORDER = "They are in another order: keep that of the batches, or no plot shows when a loss was large."


OUTPUTS = "Without a graph they take memory still, one for each batch: make the loss of each when it is there."


def _close(losses: Sequence[Any], expected: Sequence[float]) -> bool:
    if isinstance(losses, str) or any(isinstance(loss, str) for loss in losses):
        return False  # float() reads texts, too
    pairs = itertools.zip_longest(map(float, losses), expected, fillvalue=math.nan)
    return all(math.isclose(loss, wanted, rel_tol=1e-5) for loss, wanted in pairs)


def _fault_of_graphs(returned: Mapping[str, Any], nodes: int) -> str:
    kept = f"what it returns keeps {nodes} nodes of autograd's graphs alive."
    losses = _tensors_in(returned["losses"])
    if any("Clone" in type(loss.grad_fn).__name__ for loss in losses):
        return f"{kept} A clone is one more node of the same graph."
    if isinstance(returned["worst"], Tensor):
        return (
            f"{kept} Each loss holds its graph, and the graph its batch's activations. (`del` drops a name; the list "
            "still holds the loss.)"
        )
    return f"{kept} No batch is returned any more, but the list still holds each loss, and each loss its graph."


def _fault_of_worst(worst: Any, seen: Validated) -> str | None:
    right = max(range(len(seen.losses)), key=seen.losses.__getitem__)
    batch = seen.batches[right]
    if isinstance(worst, Tensor) and worst.shape == batch.shape:
        if worst.data_ptr() == batch.data_ptr():
            return "no graph is kept any more, but a whole batch is. Its number tells as much."
        return "`worst` is a copy of a batch, which takes as much memory as the batch. Its number tells as much."
    if isinstance(worst, Tensor):
        return f"`worst` should be a number, got a tensor: {worst}. `.item()` makes it one."
    if isinstance(worst, float | np.floating) and worst.is_integer():
        return f"`worst` should be {right}, got {worst!r}: a number with a point is no index. `batches[worst]` raises."
    if any(worst == number and loss == seen.losses[right] for number, loss in enumerate(seen.losses)):
        return None  # of equal losses, any
    if worst == right + 1:
        return f"`worst` should be {right}, got {worst}: the first batch has the number 0."
    return f"`worst` should be {right}, the number of the batch with the largest loss; got {worst!r}."


def _fault_while_running(seen: Validated) -> str | None:
    before = seen.saved_before_forward
    if seen.most_samples > SAMPLES:
        return (
            f"one forward pass had {seen.most_samples} samples, and a batch has {SAMPLES}: several batches' "
            "activations are there at once. Take one batch after the other."
        )
    if max(before, default=0) == 0:
        alive = seen.outputs_before_forward
        told = f"{alive} outputs of earlier batches were alive when the forward passes began. {OUTPUTS}"
        return told if max(alive, default=0) > 2 else None  # the last one, and that of the worst batch
    if before[-1] > before[1]:
        return (
            f"{before} saved tensors were alive when the forward passes began. Numbers at the end come too late: until "
            "then a list holds each batch's graph."
        )
    return (
        f"{before} saved tensors were alive when the forward passes began: one graph outlives its batch. What you "
        "return is right. But a name (the loss, or the model's output?) still holds the last batch's graph while the "
        "next forward pass runs, so two batches' activations are there at once. `del` of each such name helps, or a "
        "loop under `torch.no_grad()`."
    )


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    tensors: list[Tensor] = []
    if isinstance(value, list | tuple | set):
        for item in value:
            tensors += _tensors_in(item)
    return tensors


def graph_nodes(tensors: Sequence[Tensor]) -> set[Any]:
    """All nodes of autograd's graphs that these tensors keep alive."""
    return {node for _, nodes in graph_roots(tensors) for node in nodes}


def validate_with(
    model: nn.Module,
    batches: list[Tensor],
    *,
    keep: Callable[[Tensor], Any] = Tensor.item,
    keep_batch: Callable[[Tensor], Any] | None = None,
    first: int = 0,
) -> dict[str, Any]:
    """A validation loop: what it keeps of each loss, what of the worst batch (else its number, from `first` on)."""
    losses = [keep(model(batch).square().mean()) for batch in batches]
    worst = max(range(len(losses)), key=losses.__getitem__)
    return {"losses": losses, "worst": worst + first if keep_batch is None else keep_batch(batches[worst])}


def _numbers_at_the_end(model: nn.Module, batches: list[Tensor]) -> dict[str, Any]:
    returned = validate_with(model, batches, keep=lambda loss: loss)
    return returned | {"losses": [loss.item() for loss in returned["losses"]]}


def _one_name_too_many(model: nn.Module, batches: list[Tensor]) -> dict[str, Any]:
    losses, worst = [], 0
    for number, batch in enumerate(batches):
        loss = model(batch).square().mean()
        losses.append(loss.item())
        if losses[-1] >= max(losses):
            worst = number
    return {"losses": losses, "worst": worst}


def _all_at_once(model: nn.Module, batches: list[Tensor]) -> dict[str, Any]:
    with torch.no_grad():
        losses = model(torch.stack(batches)).square().mean((1, 2)).tolist()
    return {"losses": losses, "worst": losses.index(max(losses))}


def _outputs_first(model: nn.Module, batches: list[Tensor]) -> dict[str, Any]:
    with torch.no_grad():
        outputs = [model(batch) for batch in batches]
        losses = [output.square().mean().item() for output in outputs]
    return {"losses": losses, "worst": losses.index(max(losses))}


def _sorted_losses(model: nn.Module, batches: list[Tensor]) -> dict[str, Any]:
    returned = validate_with(model, batches)
    return returned | {"losses": sorted(returned["losses"])}


def _itself(value: Tensor) -> Tensor:
    return value


kept = PropertyExercise(
    "validate",
    find_fault=fault_of_validation,
    misconceptions={
        "(`del` drops a name; the list still holds the loss.)": partial(
            validate_with, keep=_itself, keep_batch=_itself
        ),
        "No batch is returned any more, but the list still holds each loss": partial(validate_with, keep=_itself),
        "A clone is one more node of the same graph.": partial(validate_with, keep=Tensor.clone),
        "but `losses` holds tensors. Numbers were asked for": partial(validate_with, keep=Tensor.detach),
        "Numbers at the end come too late": _numbers_at_the_end,
        "one graph outlives its batch": _one_name_too_many,
        "but a whole batch is. Its number tells as much.": partial(validate_with, keep_batch=_itself),
        "`worst` is a copy of a batch": partial(validate_with, keep_batch=Tensor.clone),
        "`worst` should be a number, got a tensor": partial(validate_with, keep_batch=lambda _: torch.tensor(0)),
        "Take one batch after the other.": _all_at_once,
        OUTPUTS: _outputs_first,
        IN_ORDER: _sorted_losses,
        "the first batch has the number 0": partial(validate_with, first=1),
    },
)
