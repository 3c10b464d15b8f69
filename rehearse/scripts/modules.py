"""Forwards: the first of each kind is run, and the others return what it returned.

A kind is a module, its modes, and the shapes of its arguments. What comes out hangs in a graph of one node, whose
gradients are next to zero, so that the script's own arithmetic on it and its backward pass go on as usual.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

from rehearse.scripts.events import Forward
from rehearse.scripts.lapse import Lapse, Numbered, instead_of
from rehearse.scripts.structures import copied_tensor, put_together, signature, taken_apart, without_numbers

MOST_VARIANTS = 16
"""Of a call's numbers and strings: one with more of them has a counter or a text among its arguments."""

Key = tuple[Any, ...]


SMALL = 2.0**-100
"""The gradient of an input: small enough to change nothing, and no zero, since what is trained may be the input."""
SEEN_BY_HOOKS = 1e-3
"""The gradients that backward hooks are given: of the size of real ones, so that a norm of them is one."""
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes of torch's own: parameters, buffers, children, hooks."""


class Replayed(torch.autograd.Function):
    """The one node in place of a module's graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, module: nn.Module, recording: Recording, *inputs: Tensor) -> Any:
        ctx.module, ctx.recording, outputs = module, recording, recording.outputs
        ctx.kinds = [(tensor.shape, tensor.dtype) if tensor.requires_grad else None for tensor in inputs]
        ctx.save_for_backward(anchor)
        copies = tuple(recording.copies())
        pairs = zip(copies, outputs, strict=True)
        ctx.mark_non_differentiable(*(copy for copy, output in pairs if not output.has_graph))
        return copies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (anchor,) = ctx.saved_tensors
        on_replayed_backward(ctx.module)
        ctx.recording.call_backward_hooks()
        zero = ReplayedGradient.apply(anchor, ctx.module)
        passed = (None if kind is None else (zero + SMALL).to(kind[1]).expand(kind[0]) for kind in ctx.kinds)
        return (zero, None, None, *passed)


class ReplayedGradient(torch.autograd.Function):
    """Zeros, for the anchor of a :class:`Replayed`; a pass that differentiates them reaches the module again."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        return torch.zeros_like(anchor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        on_replayed_backward(ctx.module)
        return torch.zeros_like(gradients[0]), None


def _nothing(module: nn.Module) -> None:
    """Nobody has asked to be told."""


on_replayed_backward: Callable[[nn.Module], None] = _nothing
"""Is called with each module that a real backward pass reaches by its node."""


class Moved:
    """What comes out of networks, moved by a random factor for each number: here one way, and elsewhere the other.

    Of two losses that a script compares, one rehearsal then has the first as the smaller one, and the other the second.
    """

    def __init__(self, direction: int) -> None:
        self.direction = direction
        self._generator = torch.Generator().manual_seed(0)

    def all(self, tensors: list[Tensor]) -> list[Tensor]:
        return [self._one(tensor) if tensor.is_floating_point() else tensor for tensor in tensors]

    def _one(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or not tensor.numel() or tensor.device.type != "cpu":
            return tensor
        by = torch.rand(tensor.shape, generator=self._generator, dtype=torch.float32).sub_(0.5).mul_(self.direction)
        moved = torch.addcmul(tensor, tensor, by.to(tensor.dtype))
        # Probabilities stay such; a loss, which is one number, has no others to stay between.
        return moved if tensor.numel() == 1 else moved.clamp_(*torch.aminmax(tensor))


@dataclass(frozen=True)
class Output:
    tensor: Tensor
    has_graph: bool


@dataclass(frozen=True)
class HookCall:
    """What the forward hooks of a module within were called with; its backward hooks get gradients of these shapes."""

    module: nn.Module
    arguments: Any
    output: Any


@dataclass
class Recording:
    """What a forward did."""

    outputs: list[Output]
    returned: Any
    """Taken apart; its tensors are the first of the outputs."""
    attributes: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    """Attributes that held a graph afterwards."""
    hook_calls: list[HookCall] = field(default_factory=list)
    added: list[tuple[nn.Module, str, float]] = field(default_factory=list)
    """Numbers that it changed, as a count of calls, and by how much."""
    moved: Moved | None = None

    def copies(self) -> list[Tensor]:
        """The tensors that came out, as they are given once more."""
        copies = [copied_tensor(output.tensor) for output in self.outputs]
        return copies if self.moved is None else self.moved.all(copies)

    def call_backward_hooks(self) -> None:
        """Those of the modules within, from the last one on, as a backward pass does."""
        hooked = [one for one in self.hook_calls if one.module._backward_hooks or one.module._backward_pre_hooks]
        if not hooked:
            return
        gradients = [torch.full_like(one.tensor, SEEN_BY_HOOKS) if one.has_graph else None for one in self.outputs]
        for call in reversed(hooked):
            given, came = (_tensors_of(put_together(part, gradients)) for part in (call.arguments, call.output))
            for ahead in list(call.module._backward_pre_hooks.values()):
                ahead(call.module, came)
            for hook in list(call.module._backward_hooks.values()):
                hook(call.module, given, came)


@dataclass(frozen=True)
class Parts:
    """The modules and the parameters of a module."""

    modules: tuple[nn.Module, ...]
    moody: tuple[nn.Module, ...]
    """Those that behave otherwise in evaluation."""
    parameters: tuple[nn.Parameter, ...]


def _is_moody(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd | _NormBase):
        return True
    return any("drop" in name for name in (*vars(module), *dict(module.named_children())))


class ReplayedModules:
    """Takes the place of ``Module.__call__``."""

    def __init__(self, lapse: Lapse, values: int = 0) -> None:
        self.lapse = lapse
        self.moved = Moved(values) if values else None
        self.numbers, self.first_parameters = Numbered(), Numbered()
        self.recordings: dict[Key, Recording] = {}
        self.variants: dict[Key, set[Any]] = defaultdict(set)
        self.anchor = torch.zeros((), requires_grad=True)
        self.training_themselves: set[nn.Module] = set()
        """Those whose forward makes backward passes: it is run each time, and what it calls is replayed."""
        self.open = 0
        self._through_wrapper = -1
        """How many backward passes there were when a DistributedDataParallel was called last."""
        self._parts: dict[int, Parts] = {}
        self._call = nn.Module.__call__

    def install(self) -> None:
        called = self.called

        @instead_of(nn.Module)
        def __call__(call: Any, module: nn.Module, *arguments: Any, **options: Any) -> Any:
            if self.open:
                return call(module, *arguments, **options)
            return called(module, arguments, options)

        for register in (
            torch_modules.register_module_module_registration_hook,
            torch_modules.register_module_parameter_registration_hook,
        ):
            register(lambda *_: self._parts.clear())

    def called(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """A call by the script, or by a library's code that is in no such module."""
        parts = self.parts_of(module)
        lapse = self.lapse
        if module in self.training_themselves:
            return self._call(module, *arguments, **options)
        again = lapse.inside["backward"] > 0  # a checkpoint computes it again
        if not parts.parameters or (again and not lapse.fast) or _is_transformed(parts):
            if parts.parameters and not again:
                self._write(module, parts, arguments, options)
            return self._run(module, arguments, options)
        if not again:
            self._write(module, parts, arguments, options)
        key, tensors = self._key(module, parts, arguments, options)
        evaluates = not module.training and not torch.is_grad_enabled()
        known = self.recordings.get(key)
        if known is not None and (lapse.fast or evaluates):
            return self._replay(known, module, tensors)
        backwards = lapse.backwards
        if lapse.fast:
            # Nothing that is around a replayed forward, as a checkpoint, may hear of the tensors that this one saves.
            with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
                recording, result = self._record(module, parts, arguments, options)
        else:
            recording, result = self._record(module, parts, arguments, options)
        if lapse.backwards > backwards:
            self.training_themselves.add(module)
            return result
        self.recordings[key] = recording
        return self._replay(recording, module, tensors, first=True) if lapse.fast else result

    def parts_of(self, module: nn.Module) -> Parts:
        parts = self._parts.get(id(module))
        if parts is None or parts.modules[0] is not module:
            modules = tuple(module.modules())
            moody = tuple(part for part in modules if _is_moody(part))
            parts = self._parts[id(module)] = Parts(modules, moody, tuple(module.parameters()))
        return parts

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of all modules that were called."""
        for module in self.numbers.things:
            yield from self.parts_of(module).parameters

    def _write(self, module: nn.Module, parts: Parts, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        training = module.training and (torch.is_grad_enabled() or self.lapse.inside["checkpoint"] > 0)
        if module not in self.numbers:
            self.lapse.journal.modules.append(type(module).__name__)
            self.lapse.journal.weights.append(self.first_parameters.number(parts.parameters[0]))
            self.lapse.journal.parts_with_modes.append(len(parts.moody))
        number = self.numbers.number(module)
        modes = sum(part.training for part in parts.moody)
        if torch.is_grad_enabled() and self.lapse.wrapped:
            self._see_whether_ranks_average(parts)
        given = (*arguments, *options.values())
        samples = next((len(one) for one in given if isinstance(one, Tensor) and one.ndim), 0)
        self.lapse.write(Forward(number, training, torch.is_grad_enabled(), modes, samples))

    def _see_whether_ranks_average(self, parts: Parts) -> None:
        """DDP averages a backward pass where a forward since the last one went through it, and not under no_sync."""
        lapse = self.lapse
        wrapper = next((part for part in parts.modules if isinstance(part, DistributedDataParallel)), None)
        if wrapper is not None:
            lapse.averages, self._through_wrapper = bool(vars(wrapper).get("averages_asked", True)), lapse.backwards
        elif (
            self._through_wrapper != lapse.backwards
            and parts.modules[0].training
            and any(id(parameter) in lapse.wrapped for parameter in parts.parameters)
        ):
            lapse.journal.bypassed = lapse.journal.bypassed or lapse.line()

    def _run(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if not self.parts_of(module).parameters:  # what it calls may have some: a module of functions
            return self._call(module, *arguments, **options)
        self.open += 1
        try:
            return self._call(module, *arguments, **options)
        finally:
            self.open -= 1

    def _key(
        self, module: nn.Module, parts: Parts, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Key, list[Tensor]]:
        tensors: list[Tensor] = []
        sign = signature((arguments, options), tensors)
        modes = tuple([part.training for part in parts.moody])
        trained = sum([parameter.requires_grad for parameter in parts.parameters])
        autocast = (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
        hooks = sum([len(part._forward_hooks) + len(part._backward_hooks) for part in parts.modules])
        base = (id(module), module.training, modes, trained, torch.is_grad_enabled(), autocast, hooks)
        loose = without_numbers(sign)
        variants = self.variants[(*base, loose)]
        if len(variants) < MOST_VARIANTS:
            variants.add(sign)
        elif sign not in variants:
            sign = loose
        return (*base, sign), tensors

    # ------------------------------------------------------------------------------------------------- recording

    def _record(
        self, module: nn.Module, parts: Parts, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Recording, Any]:
        before = _numbers_of(parts.modules)
        seen: list[tuple[nn.Module, Any, Any]] = []
        watched = [
            part for part in parts.modules if part._forward_hooks or part._backward_hooks or part._backward_pre_hooks
        ]
        handles = [part.register_forward_hook(lambda *call: seen.append(call)) for part in watched]
        try:
            result = self._run(module, arguments, options)
        finally:
            for handle in handles:
                handle.remove()
        tensors: list[Tensor] = []
        returned = taken_apart(result, tensors)
        attributes = [
            (part, name, taken_apart(value, tensors))
            for part in parts.modules
            for name, value in list(vars(part).items())
            if name not in OF_EVERY_MODULE and _holds_graph(value)
        ]
        hook_calls = [
            HookCall(part, taken_apart(given, tensors), taken_apart(came, tensors)) for part, given, came in seen
        ]
        after = _numbers_of(parts.modules)
        added = [
            (part, name, after[id(part), name] - before[id(part), name])
            for part in parts.modules
            for name in vars(part)
            if (id(part), name) in before
            and after.get((id(part), name), before[id(part), name]) != before[id(part), name]
        ]
        outputs = [Output(tensor.detach(), tensor.requires_grad) for tensor in tensors]
        return Recording(outputs, returned, attributes, hook_calls, added, self.moved), result

    # ------------------------------------------------------------------------------------------------- replaying

    def _replay(self, recording: Recording, module: nn.Module, inputs: Sequence[Tensor], first: bool = False) -> Any:
        outputs = recording.outputs
        tensors: Sequence[Tensor]
        if torch.is_grad_enabled() and any(output.has_graph for output in outputs):
            wanted = [tensor for tensor in inputs if tensor.requires_grad]
            tensors = Replayed.apply(self.anchor, module, recording, *wanted)
        else:
            tensors = recording.copies()
        for part, name, value in recording.attributes:
            setattr(part, name, put_together(value, tensors))
        numbers = [] if first else [(part, name, getattr(part, name) + by) for part, name, by in recording.added]
        for call in recording.hook_calls:
            given, came = put_together(call.arguments, tensors), put_together(call.output, tensors)
            for number, hook in list(call.module._forward_hooks.items()):
                if number in call.module._forward_hooks_with_kwargs:
                    hook(call.module, given, {}, came)
                else:
                    hook(call.module, given, came)
        for part, name, value in numbers:
            setattr(part, name, value)
        return put_together(recording.returned, tensors)


def _tensors_of(value: Any) -> tuple[Tensor | None, ...]:
    """As hooks are given gradients: one for each value, and none for what is no tensor."""
    values = value if isinstance(value, tuple) else (value,)
    return tuple(one if isinstance(one, Tensor) else None for one in values)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _is_transformed(parts: Parts) -> bool:
    """Whether a transform of ``torch.func`` is at work, or the parameters are results of computations themselves."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return not all(parameter.is_leaf for parameter in parts.parameters)


def _numbers_of(modules: Sequence[nn.Module]) -> dict[tuple[int, str], float]:
    return {
        (id(part), name): value for part in modules for name, value in vars(part).items() if type(value) in (int, float)
    }


def _holds_graph(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.grad_fn is not None
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return False
    return any(isinstance(part, Tensor) and part.grad_fn is not None for part in value[:64])
