"""The peak of a training step, predicted: no kernel runs, and no GPU is needed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from course_lib._generators import generators_put_back, held_by
from course_lib._tensors import parameters_of
from course_lib._words import int_of_at_least, readable_bytes
from course_lib.memory.allocator import CachingAllocator
from course_lib.memory.fakes import OnTheCpu, without_data
from course_lib.memory.ledger import Entry, Peak, Storage, StorageLedger, tensors_in

PRECISIONS = ("fp32", "bf16", "bf16-true")
Precision = Literal["fp32", "bf16", "bf16-true"]
WORKSPACES = "kernels' workspaces are not predicted"


@dataclass(frozen=True)
class PeakPrediction(Peak):
    """What a training step will need at its worst moment.

    The timeline is that of the steady step, with the phases ``"batch"``, ``"forward"``, ``"backward"``, ``"step"`` and
    ``"zero_grad"``.
    """

    reserved_bytes: int
    """On CUDA an estimate of what the allocator takes from the device for both steps, cached blocks included
    (``torch.cuda.max_memory_reserved``); on a CPU the peak. The CUDA context comes on top: hundreds of MiB."""
    device: str
    precision: str
    batch_size: int | None

    def fits(self, total_bytes: int, fraction: float = 0.9) -> bool:
        """Whether the peak, and on CUDA what is reserved for it, stays within a fraction of the memory there is."""
        return max(self.peak_bytes, self.reserved_bytes) <= total_bytes * fraction

    def table(self) -> str:
        """The peak by category, the peak of each phase, and what is not in it."""
        at = "" if self.batch_size is None else f" at batch size {self.batch_size}"
        lines = [f"predicted peak: {readable_bytes(self.peak_bytes)}{at} ({self.precision} on {self.device})"]
        lines += self.in_categories()
        if self.device == "cuda":
            reserved = readable_bytes(self.reserved_bytes)
            lines.append(f"  about {reserved} reserved by the allocator, without the CUDA context")
        phases = [f"{name} {readable_bytes(most)}" for name, most in self.peak_by_phase().items()]
        lines.append(f"by phase: {', '.join(phases)}")
        return "\n".join([*lines, WORKSPACES])

    __str__ = table


def predict_peak(
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[..., Any],
    optimizer_fn: Callable[[list[nn.Parameter]], Optimizer],
    *,
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    batch_size: int | None = None,
    precision: Precision = "fp32",
    accumulate_grad_batches: int = 1,
    ddp: bool = False,
    device: str = "cuda",
) -> PeakPrediction:
    """Predict the peak of a training step by taking two of them with fake tensors, which have a shape and no data.

    A step makes a batch and runs forward and backward, ``accumulate_grad_batches`` times; then come
    ``optimizer.step()`` and ``zero_grad(set_to_none=True)``. In the second step the optimizer has its state, so that is
    the one whose peak is returned. A micro-batch's graph and outputs are gone when the next one begins, but its loss is
    not. Afterwards the random generators, the default dtype and the grad mode are as before.

    Args:
        model_fn: Makes the module. It takes no real memory, so it may be larger than this machine; ``.to("cuda")`` in
            it is fine. A constructor that reads values (``.item()``) is called again for real, and takes the memory of
            its parameters for that moment. A module that exists is copied without its data: ``lambda: model``.
        batch_fn: Makes a batch: a tensor, or tensors in tuples, lists and dicts. Called as ``batch_fn(batch_size)``
            where a ``batch_size`` is given. One that reads values, as a loader does, is called again for real.
        optimizer_fn: Makes the optimizer from the list of parameters. If it doesn't choose an implementation, it gets
            the device's default: on CUDA ``foreach``, of which AdamW's temporaries are as large as the parameters.
        loss_fn: ``loss_fn(model, batch)`` -> a 0-dim loss; it must not read values (``.item()``, ``if loss > 3``).
            Default: for a pair ``(x, y)`` the cross entropy or, where y is floating, the mean squared error; for a dict
            what ``model(**batch)`` returns as ``loss``; for a tensor the mean of the output.
        batch_size: Handed to ``batch_fn``.
        precision: ``"fp32"``; ``"bf16"``: autocast around the forward and the loss, with the copies of the weights
            that it keeps until then; ``"bf16-true"``: the model, floating inputs and all that follows. An
            ``autocast("cuda")`` of the model's own is not seen.
        accumulate_grad_batches: Micro-batches of a window. The loss is divided by it.
        ddp: Adds the buckets of ``DistributedDataParallel``, which take as many bytes as the gradients.
        device: ``"cuda"``: rounded as the allocator does (512 bytes, unsplit blocks whole); ``"cpu"``: not rounded. On
            both the operators are those of a CPU: on a GPU dropout's masks are smaller, and attention with dropout
            keeps no matrix.

    Bounds: kernels' workspaces are not predicted; convolutions on the CPU may hold up to 1.3 times as much. Losses that
    reduce in place (``mse_loss``, ``smooth_l1_loss``, ``binary_cross_entropy``) hold as much as the output more. Not
    seen is what extensions allocate, or a custom ``autograd.Function`` keeps outside of tensors.

    Raises:
        TypeError: A module, an optimizer or a batch is given where a function that makes one is asked for.
        ValueError: An argument out of range, functions that return something else than asked for, a loss that isn't
            0-dim or has no graph.
        RuntimeError: The model has a recurrent layer; the step needs values that no kernel has computed, an operator
            that has no fake kernel, or tensors that are on another device.
    """
    loss_fn = default_loss if loss_fn is None else loss_fn
    _check_functions(model_fn=model_fn, batch_fn=batch_fn, optimizer_fn=optimizer_fn, loss_fn=loss_fn)
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if device not in ("cuda", "cpu"):
        raise ValueError(f'device must be "cuda" or "cpu", got {device!r}')
    window_size = int_of_at_least(1, "accumulate_grad_batches", accumulate_grad_batches)
    if batch_size is not None:
        batch_size = int_of_at_least(1, "batch_size", batch_size)
        batch_fn = functools.partial(batch_fn, batch_size)
    ledger = StorageLedger()
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.enter_context(generators_put_back())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        # Module.to swaps its tensors, which needs them without weak references: the memo's.
        fake.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]
        stack.enter_context(fake)
        stack.enter_context(OnTheCpu(names=device == "cuda"))
        stack.enter_context(_explained())
        model = _model(model_fn, precision)
        stack.enter_context(ledger)
        ledger.begin("setup")
        ledger.name_model(model)
        optimizer = _optimizer(optimizer_fn, model, device)
        ledger.name_optimizer(optimizer)
        if ddp:
            buckets = [torch.empty_like(p) for p in model.parameters() if p.requires_grad]
            ledger.name("gradients", buckets)
        for micro_batches in (1, window_size):  # the first step is for the optimizer's state
            mark = ledger.mark()
            for _ in range(micro_batches):
                ledger.begin("batch")
                ledger.watching = False  # a loader makes it in memory that is not the device's
                batch = _batch(batch_fn, precision)
                ledger.watching = True
                ledger.arrive("inputs", tensors_in(batch))
                ledger.begin("forward")
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    loss = loss_fn(model, batch)
                _check_loss(loss)
                loss = loss / window_size if window_size > 1 else loss
                ledger.begin("backward")
                torch.autograd.backward(loss)
            ledger.begin("step")
            optimizer.step()
            ledger.begin("zero_grad")
            optimizer.zero_grad(set_to_none=True)
            model.zero_grad(set_to_none=True)
    blocks = _Blocks() if device == "cuda" else None
    timeline = ledger.history(mark, blocks)
    reserved_bytes = blocks.allocator.reserved if blocks else max(moment.total for moment in timeline)
    return PeakPrediction(timeline, reserved_bytes, device, precision, batch_size)


_NO_DATA = ("numpy() is not supported", "Cannot access data pointer")


@contextmanager
def _explained() -> Iterator[None]:
    """Explain what fake tensors refuse to somebody who doesn't know of them."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, UnsupportedOperatorException):
            raise RuntimeError(
                f"no fake kernel is registered for {error.func}, so its outputs are unknown: register one with "
                "torch.library.register_fake, or use measure_peak"
            ) from error
        without_values = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
        if without_values or any(text in str(error) for text in _NO_DATA):
            raise RuntimeError(
                f"the step reads a value, or has a shape that depends on one ({error}), and a prediction has no "
                "values: take .item(), .numpy(), print, boolean indexing and packed sequences out of loss_fn and the "
                "model, or use measure_peak"
            ) from error
        raise


# --------------------------------------------------------------------------------------------- what the caller gives


def _check_functions(**functions: Any) -> None:
    """A ready object in a function's place is told how to be given; a module would even be callable."""
    of_what = {
        "model_fn": ("that makes the module", "lambda: model, of which a copy without data is taken"),
        "batch_fn": ("that makes a batch", "lambda: batch"),
        "optimizer_fn": ("of the list of parameters", "lambda parameters: torch.optim.AdamW(parameters, lr=0.001)"),
        "loss_fn": ("of the model and the batch", "lambda model, batch: criterion(model(batch[0]), batch[1])"),
    }
    for name, given in functions.items():
        if isinstance(given, nn.Module) or not callable(given):
            does, instead = of_what[name]
            raise TypeError(f"{name} must be a function {does}, got {_kind(given)}: write {instead}")


def _model(model_fn: Callable[[], nn.Module], precision: str) -> nn.Module:
    model = _made(model_fn)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model_fn must return a torch.nn.Module, got {_kind(model)}")
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        raise RuntimeError(
            "the model has a recurrent layer (LSTM, GRU, RNN), and what it keeps for backward is its kernel's choice: "
            "use measure_peak"
        )
    tensors = [*model.parameters(), *model.buffers()]
    given = [t for t in tensors if not isinstance(t, FakeTensor) or t.device.type == "meta"]
    if given:
        # The caller's own module must not change: a copy whose tensors have no data.
        # A generator is shared, as fake tensors draw no numbers from it.
        generators = [one for one in held_by(*model.modules()) if isinstance(one, torch.Generator)]
        model = copy.deepcopy(model, {id(t): without_data(t) for t in given} | {id(one): one for one in generators})
    elsewhere = {t.device.type for t in [*model.parameters(), *model.buffers()]} - {"cpu"}
    if elsewhere:
        raise ValueError(f'device="cpu" needs a model on the CPU, got one on {", ".join(elsewhere)}')
    if precision == "bf16-true":
        model.to(torch.bfloat16)
    return model


def _made(model_fn: Callable[[], nn.Module]) -> nn.Module:
    with suppress(Exception):
        return model_fn()
    with unset_fake_temporarily():  # it reads values
        return model_fn()


def _optimizer(optimizer_fn: Callable[[list[nn.Parameter]], Optimizer], model: nn.Module, device: str) -> Optimizer:
    optimizer = optimizer_fn(list(model.parameters()))
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer_fn must return a torch.optim.Optimizer, got {_kind(optimizer)}")
    own = set(model.parameters())
    if not any(parameter in own for parameter in parameters_of(optimizer)):
        raise ValueError(
            "optimizer_fn must use the list of parameters that it is called with, got an optimizer of others: the "
            "model that is predicted is a copy"
        )
    for group in optimizer.param_groups:
        if device == "cuda" and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True  # the default for parameters on CUDA
    return optimizer


def _batch(batch_fn: Callable[[], Any], precision: str) -> Any:
    def fake(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
            leaf = without_data(leaf)
        low = precision == "bf16-true" and isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.detach().to(torch.bfloat16).requires_grad_(leaf.requires_grad) if low else leaf

    try:
        batch = batch_fn()
    except (DataDependentOutputException, DynamicOutputShapeException):  # as a loader does, which draws a seed
        with unset_fake_temporarily():
            batch = batch_fn()
    if not any(True for _ in tensors_in(batch)):
        raise ValueError(
            f"batch_fn must return tensors, be they in tuples, lists and dicts, got {_kind(batch)}: "
            "what a batch is to the model, as collated by the loader"
        )
    return tree_map(fake, batch)


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        output = model(**batch)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    elif isinstance(batch, Tensor):
        output = model(batch)
        output = output[0] if isinstance(output, Sequence) else output
        loss = output.mean() if isinstance(output, Tensor) else output
    elif isinstance(batch, Sequence) and len(batch) == 2:
        output = model(batch[0])
        output = output[0] if isinstance(output, Sequence) else output
        loss = F.mse_loss(output, batch[1]) if batch[1].is_floating_point() else F.cross_entropy(output, batch[1])
    else:
        loss = None
    if not isinstance(loss, Tensor):
        raise ValueError(
            "loss_fn must be given: there is a default for a tensor, a pair (x, y), and a dict with which the model "
            f"returns a loss; got a batch that is {_kind(batch)}"
        )
    return loss


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.dim():
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else _kind(loss)
        raise ValueError(f"loss_fn must return a 0-dim tensor, got {got}")
    if not loss.requires_grad:
        raise ValueError("loss_fn must return a loss with a graph, got one that requires no gradient: is all frozen?")


def _kind(value: Any) -> str:
    kinds = {"Tensor" if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in tree_leaves(value)}
    inside = f" of {', '.join(sorted(kinds))}" if isinstance(value, Mapping | list | tuple) and kinds else ""
    return f"{type(value).__name__}{inside}" if not isinstance(value, str | int | float | None) else repr(value)


# ------------------------------------------------------------------------------------------------- what CUDA does


class _Blocks:
    """Turns exact bytes into those of the blocks that CUDA's allocator would hand out."""

    def __init__(self) -> None:
        self.allocator = CachingAllocator()

    def __call__(self, entries: Sequence[Entry]) -> list[int]:
        exact: dict[Storage, int] = {}
        added = []
        for entry in entries:
            if entry.storage.category == "optimizer" and entry.storage.nbytes <= 8:
                added.append(0)  # a counter of steps, which stays on the host
                continue
            exact[entry.storage] = exact.get(entry.storage, 0) + entry.delta
            freed = self.allocator.free(entry.storage)
            added.append(self.allocator.allocate(entry.storage, exact[entry.storage]) - freed)
        return added
