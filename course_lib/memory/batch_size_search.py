"""One rank's search for a batch size: what it expects of a size, and what it has tried.

Every moment of a step holds ``const + c · b`` bytes, and which moment is the peak changes with ``b``: it is in the
optimizer's step for small batches, at the end of the forward for large ones. So two peaks give no line. But two whole
timelines give a line for each moment, and the peak is the highest of these.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from course_lib._tensors import bytes_by_storage, needs_closure, parameters_of
from course_lib._words import int_of_at_least, readable_bytes
from course_lib.memory.ledger import tensors_in
from course_lib.memory.measuring import device_of_parameters, measure_peak
from course_lib.memory.predicting import PeakPrediction, default_loss, predict_peak
from course_lib.memory.restoring import restored

MAX_PREDICTIONS = 16
"""Beyond the two at small sizes; as a rule one is enough."""
CLOSE = 1.02
"""A size is worth another trial if it is larger than what has run by at least this factor."""

MultipleOf = int | Literal["power of two"]
OUT_OF_MEMORY, ABOVE, WITHIN = 0, 1, 2
"""How a trial ended; over several ranks the smallest counts."""


class BatchSizeTrial(NamedTuple):
    """Two real steps at one size, on this rank."""

    batch_size: int
    nbytes: int | None
    """The peak; None where any rank met an out-of-memory error."""

    @property
    def ran(self) -> bool:
        return self.nbytes is not None

    def __str__(self) -> str:
        return f"{self.batch_size}: {'out of memory' if self.nbytes is None else readable_bytes(self.nbytes)}"


class Search:
    """What one rank knows. What ranks must agree upon, `find_batch_size` asks them: a size to try, and how it ended.

    Attributes:
        elsewhere: Bytes that the device holds beside model and optimizer.
        limit: Bytes that may be held in all.
        beyond: The smallest size that is known not to fit, or is not considered.
        points: Bytes that each moment of a step is predicted to hold, by size.
        off: Bytes measured minus bytes predicted, by size.
        best: The largest size that has run, and stayed within the limit on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_fn: Callable[[int], Any],
        optimizer: Optimizer,
        *,
        loss_fn: Callable[[nn.Module, Any], Tensor] | None,
        limit_bytes: int | None,
        fraction: float,
        max_batch_size: int,
        multiple_of: MultipleOf,
    ) -> None:
        if not hasattr(optimizer, "param_groups"):
            raise ValueError(f"optimizer must be one torch.optim.Optimizer, got {type(optimizer).__name__}")
        if needs_closure(optimizer):
            raise ValueError(
                f"optimizer must step without a closure, got {type(optimizer).__name__}, which evaluates the loss "
                "several times in a step: measure two sizes with measure_peak, and draw the line by hand"
            )
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, got {fraction!r}")
        if multiple_of != "power of two":
            multiple_of = int_of_at_least(1, "multiple_of", multiple_of)
        self.multiple_of: MultipleOf = multiple_of
        self.model, self.optimizer = model, optimizer
        self.loss_fn = loss_fn or default_loss
        self.batches = _Batches(batch_fn)
        self.beyond = int_of_at_least(1, "max_batch_size", max_batch_size) + 1
        self.device = device_of_parameters(model.parameters())
        self.elsewhere, self.limit = _memory(model, optimizer, self.device, limit_bytes, fraction)
        self.points: dict[int, list[int]] = {}
        self.off: dict[int, int] = {}
        self.trials: list[BatchSizeTrial] = []
        self.best = 0

    # ---------------------------------------------------------------------------------------------------- predictions

    def largest_predicted(self) -> int:
        """The largest allowed size of which a prediction says that it fits. Other ranks are not asked."""
        # CUDA's allocator rounds to 512 bytes. Of very small batches, that rounding would be taken for the slope.
        most = self.beyond - 1
        small = max(1, min(64 if self.device.type == "cuda" else 2, most // 2))
        for size in (small, min(2 * small, most)):
            self.predict(size)
        fits = 0
        for _ in range(MAX_PREDICTIONS):
            size = self.rounded(self.largest_expected(above=fits))
            if size <= fits:
                break
            if self.predict(size) <= self.limit:
                fits = size
            else:
                self.beyond = size
        if not fits:
            limit, largest = readable_bytes(self.limit), self.largest_expected()
            if not largest:
                raise MemoryError(f"not even a batch of 1 fits into {limit}; {self._prediction(1)}")
            raise MemoryError(f"the largest batch that fits is {largest}, and multiple_of={self.multiple_of!r}")
        return fits

    def predict(self, size: int) -> int:
        """The most that a step will hold, of which each moment is noted."""
        if size not in self.points:
            prediction = self._prediction(size)
            moments = [prediction.reserved_bytes, *(moment.total for moment in prediction.timeline)]
            self.points[size] = [self.elsewhere + held for held in moments]
        return max(self.points[size])

    def _prediction(self, size: int) -> PeakPrediction:
        return predict_peak(
            lambda: self.model,
            self.batches,
            lambda parameters: _twin(self.optimizer, self.model, parameters),
            loss_fn=self.loss_fn,
            batch_size=size,
            device=self.device.type,
        )

    # ----------------------------------------------------------------------------------------------- what is expected

    def on_lines(self, size: int) -> int:
        """The highest of the lines through the two known sizes that are nearest."""
        near = sorted(sorted(self.points, key=lambda known: abs(known - size))[:2])
        if size in near:
            return max(self.points[size])
        first, second = (self.points[known] for known in near)
        if len(first) != len(second):  # other operators at another size
            first, second = [max(first)], [max(second)]
        distance, ahead = near[1] - near[0], size - near[0]
        return max(a + (b - a) * ahead // distance for a, b in zip(first, second, strict=True))

    def expected(self, size: int) -> int:
        """The lines, corrected by what was measured."""
        if not self.off:
            return self.on_lines(size)
        (a, off), *further = sorted(self.off.items(), key=lambda known: abs(known[0] - size))
        if further:
            b, other = further[0]
            return self.on_lines(size) + off + (other - off) * (size - a) // (b - a)
        # One point doesn't tell a constant from a slope, so this takes whichever asks for more.
        return self.on_lines(size) + max(off, off * size // a)

    def largest_expected(self, above: int = 0) -> int:
        return above + bisect_right(range(above + 1, self.beyond), self.limit, key=self.expected)

    def rounded(self, size: int) -> int:
        """The largest allowed size up to this one; 0 where there is none."""
        if self.multiple_of != "power of two":
            return size - size % self.multiple_of
        return 1 << (size.bit_length() - 1) if size else 0

    # --------------------------------------------------------------------------------------------------------- trials

    def next_trial(self, last: bool) -> int:
        """The size to try next; 0 where what has run is good enough, or nothing is left to try."""
        largest = careful = self.largest_expected()
        if self.device.type == "cuda" and not self.trials:
            careful = (largest + 1) // 2  # the workspaces of kernels are not predicted
        if last and not self.best:
            careful = largest * 9 // 10
        size = self.rounded(careful) or self.rounded(largest)
        return size if size > self.best * CLOSE else 0

    def run(self, size: int) -> int:
        """Take two steps, and return how that ended."""
        predicted = self.predict(size)
        cuda = self.device.type == "cuda"
        if cuda:
            _clean()
        peak = None
        try:
            with restored(self.model, self.optimizer):
                peak = measure_peak(
                    lambda: self._steps(size), model=self.model, optimizer=self.optimizer, device=self.device
                )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        if peak is None:  # only here is the error gone, whose frames hold the batch
            _clean()
            self.trials.append(BatchSizeTrial(size, None))
            return OUT_OF_MEMORY
        held = max(peak.peak_bytes, torch.cuda.max_memory_reserved(self.device)) if cuda else peak.peak_bytes
        self.trials.append(BatchSizeTrial(size, held))
        self.off[size] = held - predicted
        return WITHIN if held <= self.limit else ABOVE

    def _steps(self, size: int) -> None:
        # The first makes the optimizer's state, beside which the second has to fit.
        self._step(size)
        self._step(size)

    def _step(self, size: int) -> None:
        batch = tree_map(lambda x: x.to(self.device) if isinstance(x, Tensor) else x, self.batches(size))
        torch.autograd.backward(self.loss_fn(self.model, batch))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)

    def narrow(self, size: int, outcome: int) -> None:
        """Note how the trial of a size ended on all ranks together."""
        if outcome == WITHIN:
            self.best = max(self.best, size)
        elif outcome == ABOVE:
            self.beyond = size
        else:
            self.beyond = size // 2 + 1
            self.trials[-1] = BatchSizeTrial(size, None)

    def answer(self) -> int:
        if not self.best:
            raise MemoryError(
                f"no batch size with multiple_of={self.multiple_of!r} was seen to stay within "
                f"{readable_bytes(self.limit)}. Tried {'; '.join(map(str, self.trials))}. "
                "Set max_batch_size below these"
            )
        return self.best


def is_out_of_memory(error: BaseException) -> bool:
    """Of a device, of the CPU's allocator, or of a library that could not get its workspace."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = ("out of memory", "can't allocate memory", "STATUS_ALLOC_FAILED")
    return any(word in str(error) for word in words)


def _clean() -> None:
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


# ----------------------------------------------------------------------------------------------- what the caller gives


class _Batches:
    """Makes batches, and checks that they grow with the size, and with nothing else."""

    def __init__(self, batch_fn: Callable[[int], Any]) -> None:
        if not callable(batch_fn):
            raise ValueError(
                f"batch_fn must be a function of the size, got {type(batch_fn).__name__}: of a loader, write "
                "lambda size: loader.collate_fn([longest_sample] * size)"
            )
        self.make = batch_fn
        self._shapes: dict[int, list[tuple[int, ...]]] = {}

    def __call__(self, size: int) -> Any:
        batch = self.make(size)
        shapes = [tuple(tensor.shape) for tensor in tensors_in(batch)]
        known = self._shapes.setdefault(size, shapes)
        if shapes != known:
            raise ValueError(
                f"batch_fn made batches of size {size} that differ in shape ({known[:1]} and {shapes[:1]}, …): it must "
                "make them alike, of the longest samples that can come"
            )
        for other, known in self._shapes.items():
            if shapes and other != size and shapes == known:
                raise ValueError(
                    f"batch_fn made the same shapes for sizes {other} and {size} ({shapes[0]}, …): it must make as "
                    "many samples as asked for. If its data ran out, set max_batch_size"
                )
        return batch


def _twin(optimizer: Optimizer, model: nn.Module, parameters: list[nn.Parameter]) -> Optimizer:
    """The same optimizer for other parameters, without its state and without the caller's hooks."""
    instead = dict(zip(map(id, model.parameters()), parameters, strict=True))
    unknown = [parameter for parameter in parameters_of(optimizer) if id(parameter) not in instead]
    if unknown:
        raise ValueError(
            f"optimizer has {len(unknown)} parameters that model doesn't hold: give one module that holds them all"
        )
    twin: Optimizer = object.__new__(type(optimizer))
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}  # which a scheduler wraps
    hooks = {name: OrderedDict() for name in own if name.endswith("_hooks")}  # type: ignore[var-annotated]
    twin.__dict__.update(own | hooks)
    twin.state = defaultdict(dict)
    twin.param_groups = [
        group | {"params": [instead[id(p)] for p in group["params"]]} for group in optimizer.param_groups
    ]
    return twin


def _memory(
    model: nn.Module, optimizer: Optimizer, device: torch.device, limit_bytes: int | None, fraction: float
) -> tuple[int, int]:
    """What the device holds beside model and optimizer, and what may be held in all."""
    tensors = [*model.parameters(), *model.buffers(), *tensors_in(list(optimizer.state.values()))]
    held = sum(bytes_by_storage(tensor for tensor in tensors if tensor.device == device).values())
    if device.type == "cuda":
        _clean()
        elsewhere = max(0, torch.cuda.memory_reserved(device) - held)
        free = torch.cuda.mem_get_info(device)[0]
    else:
        elsewhere, free = 0, psutil.virtual_memory().available
    if limit_bytes is not None:
        return elsewhere, int_of_at_least(1, "limit_bytes", limit_bytes)
    return elsewhere, held + elsewhere + int(free * fraction)
