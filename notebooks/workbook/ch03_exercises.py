"""What chapter 03 asks: a peak by hand, a validation loop that keeps too much, and a search with three trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

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
    }


peak_bytes = Exercise(
    "peak_bytes",
    solution=_peak_bytes,
    # Each case tells some misconceptions from all that are still alive.
    cases=[
        dict(num_parameters=100, saved_numbers_per_sample=70, batch_size=8, optimizer_copies=0),
        dict(num_parameters=100, saved_numbers_per_sample=50, batch_size=8, optimizer_copies=2),
        dict(num_parameters=1000, saved_numbers_per_sample=50, batch_size=1, optimizer_copies=2),
        dict(num_parameters=1000, saved_numbers_per_sample=50, batch_size=20, optimizer_copies=1),
    ],
    misconceptions=_wrong_peaks,
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


def watched(validate: Callable[[nn.Module, list[Tensor]], Any], num_batches: int) -> Validated:
    """Run ``validate(model, batches)`` on a small model, and count what autograd keeps meanwhile."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, batches = _small_model(), list(torch.randn(num_batches, 8, 4))
    with torch.no_grad():
        losses = [model(batch).square().mean().item() for batch in batches]
    saved: WeakSet[SavedTensor] = WeakSet()
    before_forward: list[int] = []
    model.register_forward_pre_hook(lambda *_: before_forward.append(len(saved)))

    def pack(tensor: Tensor) -> SavedTensor:
        box = SavedTensor(tensor)
        saved.add(box)
        return box

    with saved_tensors_hooks(pack, lambda box: box.tensor):
        returned = validate(model, batches)
    return Validated(batches, losses, returned, before_forward)


def _small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def fault_of_validation(validate: Callable[[nn.Module, list[Tensor]], Any]) -> str | None:
    """What is wrong with a ``validate(model, batches)``, first with one batch, then with five; or None."""
    for num_batches in (1, 5):
        seen = watched(validate, num_batches)
        fault = _fault_of_value(seen) or _fault_while_running(seen)
        if fault:
            return f"with {num_batches} batch{'es' if num_batches > 1 else ''}, {fault}"
    return None


def _fault_of_value(seen: Validated) -> str | None:
    returned = seen.returned
    if returned is None:
        return "it returned nothing. Does it end with `return`?"
    if not isinstance(returned, dict) or set(returned) != {"losses", "worst"}:
        return f'it must return a dict of "losses" and "worst", got {type(returned).__name__}.'
    nodes = len(graph_nodes(_tensors_in(returned)))
    if nodes:
        return _fault_of_graphs(returned, nodes)
    losses, worst = returned["losses"], returned["worst"]
    if _tensors_in(losses):
        return (
            "no graph is kept any more, but `losses` holds tensors. Numbers were asked for: `.item()` makes one, and "
            "no GPU memory has to be kept for each loss."
        )
    expected = [round(loss, 4) for loss in seen.losses]
    if not isinstance(losses, Sequence) or [round(float(loss), 4) for loss in losses] != expected:
        return f"`losses` should be {expected}, got {losses}."
    return _fault_of_worst(worst, seen)


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
    if worst == right + 1:
        return f"`worst` should be {right}, got {worst}: the first batch has the number 0."
    if worst != right:
        return f"`worst` should be {right}, the number of the batch with the largest loss; got {worst!r}."
    return None


def _fault_while_running(seen: Validated) -> str | None:
    before = seen.saved_before_forward
    if max(before, default=0) == 0:
        return None
    if before[-1] > before[1]:
        return (
            f"{before} saved tensors were alive when the forward passes began. Numbers at the end come too late: until "
            "then a list holds each batch's graph."
        )
    return (
        f"{before} saved tensors were alive when the forward passes began: one graph outlives its batch. What you "
        "return is right. But a name (is it `loss`?) still holds the previous loss while the next forward pass runs, "
        "so two batches' activations are there at once. Here `del loss` helps, or a loop under `torch.no_grad()`."
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
    return {node for _, nodes in graph_roots(tensors, {}) for node in nodes}


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
        "the first batch has the number 0": partial(validate_with, first=1),
    },
)


@dataclass
class Device:
    """Holds the higher of two lines, the optimizer's step and the backward pass, and has a limit."""

    step: tuple[int, int]
    """Bytes without samples, and bytes for each sample."""
    backward: tuple[int, int]
    limit: int
    usual: int
    tried: list[int] = field(default_factory=list)

    def held(self, batch_size: int) -> int:
        return max(const + per_sample * batch_size for const, per_sample in (self.step, self.backward))

    def run(self, batch_size: int) -> int:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise _NoBatchSize(batch_size)
        self.tried.append(batch_size)
        if len(self.tried) > 1000:
            raise RuntimeError("run was called 1,000 times: does the search come to an end?")
        if self.held(batch_size) > self.limit:
            raise MemoryError(f"a batch of {batch_size} holds {self.held(batch_size)} bytes, the limit is {self.limit}")
        return self.held(batch_size)

    def errors(self) -> list[int]:
        return [size for size in self.tried if self.held(size) > self.limit]

    def largest(self) -> int:
        return (self.limit - self.backward[0]) // self.backward[1]


class _NoBatchSize(ValueError):
    pass


DEVICES = (
    dict(step=(0, 0), backward=(0, 10), limit=1000, usual=20),
    dict(step=(0, 0), backward=(300, 10), limit=1000, usual=20),
    dict(step=(0, 0), backward=(300, 7), limit=1009, usual=20),
    dict(step=(0, 0), backward=(100, 10), limit=1600, usual=100),
    dict(step=(33_152, 392), backward=(24_704, 904), limit=5_448_704, usual=256),
    dict(step=(50_000, 0), backward=(20_000, 900), limit=5_420_000, usual=256),
)


def fault_of_search(find: Callable[[Callable[[int], int], int, int], Any]) -> str | None:
    """What is wrong with a ``find(run, limit, usual)``, on the simplest device on which it fails; or None."""
    for settings in DEVICES:
        device = Device(**settings)  # type: ignore[arg-type]
        answer: Any = None
        raised: Exception | None = None
        try:
            answer = find(device.run, device.limit, device.usual)
        except (_NoBatchSize, MemoryError, ZeroDivisionError) as error:
            raised = error
        fault = _fault_of_trials(device, answer, raised) or _fault_of_answer(device, answer)
        if fault:
            return f"on a device of {device.limit:,} bytes, where {device.usual} is the usual size: {fault}"
    return None


def _fault_of_trials(device: Device, answer: Any, raised: Exception | None) -> str | None:
    tried, errors = device.tried, device.errors()
    small = sorted({size for size in tried if size < device.usual // 2})
    if isinstance(raised, _NoBatchSize):
        return f"run({raised.args[0]!r}): a batch size is a whole number of at least 1. `//` rounds down."
    if isinstance(raised, ZeroDivisionError):
        return (
            f"division by zero: the sizes {tried} all held {device.held(tried[0]):,} bytes. There the optimizer's step "
            "is the worst moment, and it says nothing about a sample. Measure at larger sizes."
        )
    if len(tried) > 3 and errors:
        return (
            f"{len(tried)} trials, {len(errors)} of which ran out of memory. Doubling, halving and binary search find "
            "the limit by errors. Two trials tell the line: compute where it meets the limit."
        )
    if len(tried) > 3:
        return f"{len(tried)} trials. Right, perhaps, but slow: two trials tell the line, so jump to the limit."
    if errors and errors[0] == device.largest() + 1:
        return f"a batch of {errors[0]} ran out of memory: it is one too many. Round down."
    if errors and errors[0] == 2 * device.usual:
        return (
            f"a batch of {errors[0]} ran out of memory: nothing says that twice the usual size fits. Half of it does."
        )
    if errors and small and len(tried) > 2:
        return (
            f"the line through {tried[0]} and {tried[1]} promised {errors[0]}, which ran out of memory. At a batch of "
            f"{small[0]} another moment is the worst, so that point lies on another line."
        )
    if errors:
        return f"a batch of {errors[0]} ran out of memory: nothing that was measured said that it would fit."
    return None


def _fault_of_answer(device: Device, answer: Any) -> str | None:
    largest = device.largest()
    if answer is None:
        return "it returned nothing. Does it end with `return`?"
    if not isinstance(answer, int):
        return f"the answer is {answer!r}, and a batch size is a whole number. `//` rounds down."
    if answer not in device.tried and answer == largest:
        return f"the answer {answer} was never run. So far it is a prediction."
    if answer not in device.tried:
        return f"the answer {answer} was never run, and {largest} is the largest that fits."
    if answer == largest:
        return None
    others = [size for size in device.tried if size != answer]
    if any(answer == device.limit * size // device.held(size) for size in others):
        return (
            f"the answer {answer} comes from a proportion, and a step holds const + slope · b: that counts const once "
            "for each sample. A larger batch fits."
        )
    if answer == largest - 1:
        return f"the answer {answer} is one too few: {largest} holds no more than the limit."
    if answer > 0.8 * largest:
        return (
            f"the answer {answer} leaves {device.limit - device.held(answer):,} bytes free. A margin is wise on a real "
            f"device, but here `limit` is what may be used: {largest} fits."
        )
    return f"the answer {answer} holds {device.held(answer):,} bytes, and a larger batch fits."


Run = Callable[[int], int]


def _by_line(
    run: Run, limit: int, usual: int, *, points: Callable[[int], tuple[int, int]] = lambda usual: (usual // 2, usual)
) -> int:
    largest = _untried(run, limit, usual, points=points)
    run(largest)
    return largest


def _untried(
    run: Run, limit: int, usual: int, *, points: Callable[[int], tuple[int, int]] = lambda usual: (usual // 2, usual)
) -> int:
    low, high = points(usual)
    at_low, at_high = run(low), run(high)
    return high + (limit - at_high) * (high - low) // (at_high - at_low)


def _shifted(run: Run, limit: int, usual: int, *, change: Callable[[int], Any]) -> Any:
    largest = change(_untried(run, limit, usual))
    run(largest)
    return largest


def _by_doubling(run: Run, limit: int, usual: int) -> int:
    size = usual
    while True:
        try:
            run(size)
        except MemoryError:
            return size // 2
        size *= 2


def _in_proportion(run: Run, limit: int, usual: int) -> int:
    size = limit * usual // run(usual)
    run(size)
    return size


def _one_by_one(run: Run, limit: int, usual: int) -> int:
    size, step = usual, run(usual) - run(usual - 1)
    while run(size) + step <= limit:
        size += 1
    return size


three_trials = PropertyExercise(
    "find",
    find_fault=fault_of_search,
    misconceptions={
        "was never run. So far it is a prediction.": _untried,
        "find the limit by errors": _by_doubling,
        "comes from a proportion": _in_proportion,
        "slow: two trials tell the line": _one_by_one,
        "so that point lies on another line": partial(_by_line, points=lambda usual: (1, 2)),
        "nothing says that twice the usual size fits": partial(_by_line, points=lambda usual: (usual, 2 * usual)),
        "nothing that was measured said that it would fit": partial(_by_line, points=lambda usual: (1, 200)),
        "it is one too many": partial(_shifted, change=lambda size: size + 1),
        "is one too few": partial(_shifted, change=lambda size: size - 1),
        "a whole number of at least 1": partial(_shifted, change=float),
        "A margin is wise on a real device": partial(_shifted, change=lambda size: int(0.9 * size)),
    },
)

EXERCISES = (peak_bytes, kept, three_trials)
