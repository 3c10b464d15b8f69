"""Backward passes: run as ever, and recorded; in the lapse, no graph reaches into a replayed module.

A replayed module's parameters get gradients of zero. One small parameter of each optimizer gets the smallest number
instead, so that it is seen when the script clears the gradients, in whatever way it does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib._tensors import parameters_of
from rehearse.scripts import modules
from rehearse.scripts.events import Backward, Delivered, Step
from rehearse.scripts.journal import LossWeight
from rehearse.scripts.lapse import Lapse, instead_of
from rehearse.scripts.leaves import Leaves
from rehearse.scripts.modules import ReplayedModules

MOST_NODES = 500
"""Of a graph, in which a mean is looked for."""
MEAN, SUM = 1, 2
"""``at::Reduction``, as autograd's nodes store it."""
IS_A_MEAN = "course_lib: a mean over a micro-batch"
"""In the metadata of a node that is a mean as a whole, though it is computed of several terms."""
MEANS_OF_SEVERAL_TERMS = {"cross_entropy": "mean", "kl_div": "batchmean"}
"""Functions of ``torch.nn.functional``, and how they reduce by a mean: the one with ``label_smoothing``."""


class Gradients:
    """Takes the place of ``torch.autograd.backward`` and ``torch.autograd.grad``."""

    def __init__(self, lapse: Lapse, replayed: ReplayedModules) -> None:
        self.lapse, self.replayed = lapse, replayed
        self.never: set[int] = set()
        """Parameters of a trained module that a real backward pass has left without a gradient, by their ids."""
        self.not_yet: set[int] = set()
        """Those of modules that no pass has reached yet, as the generator's while its critic is trained ahead of it."""
        self.trained: dict[int, nn.Parameter] = {}
        """Parameters that got one in a real pass."""
        self.leaves = Leaves()
        self.steps_within: list[Step] = []
        """Steps that hooks of the pass that is run have made."""
        self.scale = 1.0
        """By which a GradScaler has multiplied the loss."""
        self._zeros: dict[int, Tensor] = {}
        self._holders: dict[int, list[int]] = {}
        """The optimizers of each parameter, by id."""
        self._probes: dict[int, nn.Parameter] = {}
        """Of each optimizer, the parameter that shows whether its gradients were cleared."""
        self._reached: set[int] = set()
        """The optimizers whose parameters the pass that is run gave gradients to."""
        self._marked: set[int] = set()
        """Those whose probe it gave one to."""
        self._computed: set[int] = set()
        """Those whose gradients are results of computations, and no zeros of replayed modules."""
        self._accumulated: set[int] = set()
        """Those for whose parameters autograd itself has added up gradients in the pass that is run."""
        self.zero: set[int] = set()
        """The optimizers all of whose gradients were 0 behind the last pass: of a loss that teaches nothing."""
        self.not_zero: set[int] = set()
        """Those of which it was otherwise behind some pass."""
        self._got: set[int] = set()
        """The parameters that got a gradient in a real pass, by their ids; a hook may have cleared it since."""
        self._watched: dict[int, Tensor] = {}
        """The parameters that tell of it, by id."""
        self._not_watched: dict[int, Tensor] = {}
        """Those that do not, because they want no gradient."""
        self._hook = self._see_accumulated
        self._given: dict[int, Tensor] = {}
        """The gradient that a pass left to each parameter of a replayed module last, by its id."""
        self._versions: dict[tuple[int, int], int] = {}
        """Of each optimizer's probe: how often it had been written to at the last backward pass."""
        self._steps = 0
        self.changes_by_hand = False
        """Whether parameters changed between two real passes, and no optimizer is there."""
        self._before: tuple[Tensor, Tensor] | None = None
        """A parameter, and a copy of it from behind the last real pass."""

    def install(self) -> None:
        modules.on_replayed_backward = self.give

        @instead_of(torch.autograd)
        def backward(run: Any, tensors: Any, *arguments: Any, **options: Any) -> None:
            if self.lapse.inside["backward"]:
                return run(tensors, *arguments, **options)
            with self.lapse.going_on("backward"):
                self._recorded(run, tensors, arguments, options)
            self.lapse.after_backward()

        for name, reduction in MEANS_OF_SEVERAL_TERMS.items():
            _mark_means(name, reduction)

        @instead_of(torch.autograd)
        def grad(run: Any, outputs: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            if not self.lapse.fast:
                return run(outputs, inputs, *arguments, **options)
            wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
            found = run(outputs, wanted, *arguments, **{**options, "allow_unused": True})
            # A replayed module's own parameters are not in the graph, nor what functional_call puts in their place.
            may_be_none = options.get("allow_unused", False)
            return tuple(
                torch.zeros_like(tensor)
                if gradient is None and (isinstance(tensor, nn.Parameter) or not may_be_none)
                else gradient
                for tensor, gradient in zip(wanted, found, strict=True)
            )

    # ------------------------------------------------------------------------------------------- a backward pass

    def _recorded(self, backward: Any, tensors: Any, arguments: Any, options: Any) -> None:
        lapse = self.lapse
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        cleared = {number: self.is_cleared(number) for number in range(len(lapse.optimizers.things))}
        line = lapse.line()
        self._reached, self._marked = set(), set()
        self._see_changes_by_hand()
        if not lapse.fast:
            lapse.see_a_trainer()
            self.leaves.look(roots, self.replayed.parameters())
        was_fast, weights = lapse.fast, self._weights_seen(roots, line)
        self._run(backward, tensors, arguments, options)
        del weights
        if not was_fast:
            self._after_real_pass()
        numbers = tuple(sorted(self._reached))
        moved = self._were_moved()
        were_cleared = tuple(cleared.get(number, True) for number in numbers)
        lapse.write(Backward(line, numbers, were_cleared, lapse.averages, moved, lapse.inside["step"] > 0))
        if lapse.wrapped:
            lapse.averages = False  # until a wrapper is called again
        for step in self.steps_within:
            lapse.write(step)
        self.steps_within.clear()

    def _run(self, backward: Any, tensors: Any, arguments: Any, options: Any) -> None:
        """Run a pass, and see which optimizers' parameters it computes gradients for."""
        self._holders_now()
        for number in [number for number, parameter in self._not_watched.items() if parameter.requires_grad]:
            self._watch(self._not_watched.pop(number))
        self._accumulated.clear()
        backward(tensors, *arguments, **options)
        self._computed |= self._accumulated - self._reached  # behind a replayed module nothing is computed
        self._reached |= self._accumulated
        for number in self._accumulated:
            held = self._held_by(number)
            if any(map(_is_anything, held)) or not held or self.steps_within:  # a hook has used and cleared them
                self.zero.discard(number)
                self.not_zero.add(number)
            else:
                self.zero.add(number)
        for number in self._accumulated & self._marked:  # autograd has added to the mark, as for a penalty on weights
            probe = self._probe(number)
            gradient = None if probe is None else probe.grad
            if probe is not None and gradient is not None and not gradient.is_sparse and _is_anything(gradient):
                gradient.fill_(_mark_of(probe))

    def _see_accumulated(self, parameter: Tensor) -> None:
        self._accumulated.update(self._holders.get(id(parameter), ()))
        self.not_yet.discard(id(parameter))
        if not self.lapse.fast:
            self._got.add(id(parameter))

    def _watch(self, parameter: Tensor) -> None:
        if not parameter.requires_grad:  # as yet
            self._not_watched[id(parameter)] = parameter
        elif id(parameter) not in self._watched:
            self._watched[id(parameter)] = parameter
            if parameter.is_leaf:
                parameter.register_post_accumulate_grad_hook(self._hook)
            else:  # as a differentiable optimizer has
                parameter.register_hook(lambda _: self._see_accumulated(parameter))

    def _after_real_pass(self) -> None:
        for module in self.replayed.numbers.things:
            for parameter in self.replayed.parts_of(module).parameters:
                if parameter.grad is not None or id(parameter) in self._got:
                    self.trained[id(parameter)] = parameter
        for module in self.replayed.numbers.things:
            parameters = self.replayed.parts_of(module).parameters
            is_trained = any(id(parameter) in self.trained for parameter in parameters)
            without = self.never if is_trained else self.not_yet
            without.update(id(parameter) for parameter in parameters if parameter.requires_grad)
        self.never -= self.trained.keys()
        self.not_yet -= self.trained.keys() | self.never
        if self.trained:
            parameter = next(iter(self.trained.values()))
            self._before = (parameter, parameter.detach().clone())

    def give(self, module: nn.Module) -> None:
        """The gradients of a replayed module's parameters, as a backward pass would leave them."""
        if not self.lapse.inside["backward"]:  # ``torch.autograd.grad`` leaves none
            return
        holders, given = self._holders_now(), set()
        hooked = []
        for parameter in self.replayed.parts_of(module).parameters:
            number = id(parameter)
            if not parameter.requires_grad or number in self.never:
                continue
            given.add(number)
            self.not_yet.discard(number)
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse:  # of the real passes, which cannot be filled
                gradient = self._give_zero(parameter)
            self._given[number] = gradient
            hooks: Any = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            if hooks and (len(hooks) > 1 or number not in self._watched):
                hooked.append((parameter, list(hooks.values())))
        reached = {optimizer for number in given for optimizer in holders.get(number, ())}
        for optimizer in reached:
            probe = self._probe(optimizer)
            if probe is None or (id(probe) not in given and optimizer not in self._marked):
                probe = self._probe_among(optimizer, given)  # of another part of what it holds, as a second task's
            if probe is not None and probe.grad is not None and id(probe) in given:
                probe.grad.fill_(_mark_of(probe))
                self._marked.add(optimizer)
        self._reached |= reached
        self._computed -= reached
        for parameter, calls in hooked:
            for call in calls:
                if call is not self._hook:
                    call(parameter)

    def _give_zero(self, parameter: nn.Parameter) -> Tensor:
        try:
            parameter.grad = zeros = self._zeros[id(parameter)]
        except (KeyError, RuntimeError, TypeError):  # there is none yet, or the parameter has another form now
            parameter.grad = zeros = self._zeros[id(parameter)] = torch.zeros_like(parameter)
        return zeros

    # ---------------------------------------------------------------------------- whether gradients were cleared

    def forget_holders(self) -> None:
        """An optimizer was made, or took up more parameters."""
        self._holders.clear()
        self._probes.clear()

    def is_cleared(self, number: int) -> bool:
        """Whether an optimizer's gradients are none or zero."""
        return self.factor(number) == 0

    def factor(self, number: int) -> float:
        """By which an optimizer's gradients were multiplied since the last backward pass; 0 where they are none."""
        if not self.lapse.fast or number in self._computed:
            held = self._held_by(number)
            return float(bool(held) if number in self.zero else any(map(_is_anything, held)))
        probe = self._probe(number)
        if probe is None or probe.grad is None:
            return 0.0
        if probe.grad.is_sparse:
            return float(_is_anything(probe.grad))
        found: Any = probe.grad.flatten()[0].tolist()
        return float(found) / _mark_of(probe)

    def _held_by(self, number: int) -> list[Tensor]:
        held = parameters_of(self.lapse.optimizers.things[number])
        return [parameter.grad for parameter in held if parameter.grad is not None]

    def is_assigned(self, number: int) -> bool:
        """Whether the script has put gradients of its own in the place of those that a pass has left."""
        if not self.lapse.fast or number in self._computed:
            return False
        probe = self._probe(number)
        held: Any = [probe] if probe is not None and probe.grad is not None else None
        for parameter in held or parameters_of(self.lapse.optimizers.things[number]):  # a part of them maybe
            given = self._given.get(id(parameter))
            if given is not None and parameter.grad is not None and parameter.grad is not given:
                return True
        return False

    def _probe(self, number: int) -> nn.Parameter | None:
        probe = self._probes.get(number)
        if probe is None or not probe.requires_grad:
            probe = self._probe_among(number, None)
        return probe

    def _probe_among(self, number: int, given: set[int] | None) -> nn.Parameter | None:
        """A small parameter of an optimizer to mark from now on, of those that a pass gives gradients to."""
        held: Any = parameters_of(self.lapse.optimizers.things[number])
        able = [
            parameter
            for parameter in held
            if parameter.requires_grad and id(parameter) not in self.never and parameter.is_floating_point()
            if given is None or id(parameter) in given
        ]
        if not able:
            return None
        # One that had a gradient in a real pass is sure to get one again.
        probe = min(able, key=lambda parameter: (id(parameter) not in self.trained, parameter.numel()))
        self._probes[number] = probe
        return probe

    def _holders_now(self) -> dict[int, list[int]]:
        if not self._holders:
            for number, optimizer in enumerate(self.lapse.optimizers.things):
                for parameter in parameters_of(optimizer):
                    self._holders.setdefault(id(parameter), []).append(number)
                    self._watch(parameter)
        return self._holders

    def holders_of(self, parameters: Iterable[Tensor]) -> tuple[int, ...]:
        """The optimizers that hold some of them."""
        holders = self._holders_now()
        return tuple(sorted({number for one in parameters for number in holders.get(id(one), ())}))

    def _were_moved(self) -> bool:
        """Whether a probe was written to since the last pass, and by no step; in the lapse, steps write nothing."""
        probes = {number: self._probe(number) for number in range(len(self.lapse.optimizers.things))}
        versions = {(number, id(probe)): probe._version for number, probe in probes.items() if probe is not None}
        stepped = self.lapse.steps != self._steps and not self.lapse.fast
        before, self._versions, self._steps = self._versions, versions, self.lapse.steps
        return not stepped and any(before.get(number, version) != version for number, version in versions.items())

    def _see_changes_by_hand(self) -> None:
        if self._before is not None and not self.lapse.optimizers.things:
            parameter, before = self._before
            self.changes_by_hand |= not torch.equal(parameter.detach(), before)
            self._before = None

    # ------------------------------------------------------------------------------------------ what a loss weighs

    def _weights_seen(self, roots: Iterable[Tensor], line: str) -> list[Any]:
        """Watch what a backward pass gives to each loss in it that is a mean."""
        means, sums = means_behind(roots)
        events = reversed(self.lapse.journal.events)
        samples = next((event.size for event in events if isinstance(event, Delivered)), 0)

        def watched(node: Any, of: int) -> Any:
            def seen(gradients: Sequence[Tensor | None]) -> None:
                gradient = gradients[0]
                if gradient is None or gradient.numel() != 1:
                    return
                weight = of * abs(float(gradient.flatten().tolist()[0])) / self.scale  # below 0 in -scores.mean()
                if of == 1 or round(weight, 6) == 1:  # what is divided by something else may be a sum over tokens
                    journal, number = self.lapse.journal, self.lapse.backwards
                    (journal.later_weights if self.lapse.fast else journal.loss_weights).append(
                        LossWeight(number, line, weight)
                    )

            return node.register_prehook(seen)

        # A sum that is divided by its samples is a mean.
        return [watched(node, 1) for node in means] or [watched(node, samples) for node in sums if samples > 1]


def _is_anything(gradient: Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.any().tolist())


def _mark_of(parameter: nn.Parameter) -> float:
    """The gradient that a probe is given: small enough to change nothing, and no zero when it is divided."""
    return torch.finfo(parameter.dtype).tiny * 2.0**20


def _mark_means(name: str, by: str) -> None:
    compute = getattr(nn.functional, name)
    bound = inspect.signature(compute).bind

    @functools.wraps(compute)
    def computed(*arguments: Any, **options: Any) -> Any:
        loss = compute(*arguments, **options)
        if torch.compiler.is_compiling() or getattr(loss, "grad_fn", None) is None:
            return loss
        if bound(*arguments, **options).arguments.get("reduction", "mean") == by:
            loss.grad_fn.metadata[IS_A_MEAN] = True
        return loss

    computed.__prepare_scriptable__ = lambda: compute  # type: ignore[attr-defined]  # torch.jit.script asks for it
    setattr(nn.functional, name, computed)


def means_behind(roots: Iterable[Tensor]) -> tuple[list[Any], list[Any]]:
    """The nodes of a loss that take the mean over a micro-batch, and behind which nothing is one number any more; and
    those that take the sum."""
    ahead: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None and root.numel() == 1]
    seen: set[Any] = set()
    means, sums = [], []
    while ahead:
        node = ahead.pop()
        if node in seen or len(seen) > MOST_NODES:
            continue
        seen.add(node)
        name, reduction = type(node).__name__, getattr(node, "_saved_reduction", None)
        if name.startswith("MeanBackward0") or reduction == MEAN or IS_A_MEAN in node.metadata:
            means.append(node)
        elif name.startswith("SumBackward0") or reduction == SUM:
            sums.append(node)
        elif name.startswith(("Mul", "Div", "Add", "Sub", "Neg", "ToCopy", "Clone", "Alias")):
            ahead += [parent for parent, _ in node.next_functions if parent is not None]
    return means, sums


def held_by_none(gradients: Gradients, module: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[list[str], bool]:
    """The names of a module's parameters that got a gradient and that no optimizer holds; whether it holds others."""
    held = {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}
    trained = [(name, id(parameter)) for name, parameter in module.named_parameters() if parameter.requires_grad]
    loose = [name for name, number in trained if number in gradients.trained and number not in held]
    return loose, any(id(parameter) in held for parameter in module.parameters())
