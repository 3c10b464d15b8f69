"""Optimizer steps: made in the real micro-batches, recorded afterwards; and what belongs to them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from rehearse.scripts.events import Averaged, Clipped, StateLoaded, Step, Unscaled, ZeroGrad
from rehearse.scripts.gradients import Gradients
from rehearse.scripts.journal import OptimizerPlayed
from rehearse.scripts.lapse import Lapse, instead_of

Closure = Callable[[], Any]


class RecordedOptimizers:
    """Takes the place of the ``step`` of every optimizer's class, under torch's own hooks of it."""

    def __init__(self, lapse: Lapse, gradients: Gradients) -> None:
        self.lapse, self.gradients = lapse, gradients
        self.stepping: list[int] = []
        self.callers: set[int] = set()
        """Optimizers whose step calls that of another, or is their own code around a closure: they are run."""
        self.norm: Any = None

    def install(self) -> None:
        @instead_of(Optimizer)
        def __init__(make: Any, optimizer: Optimizer, *arguments: Any, **options: Any) -> None:
            self._record_steps_of(type(optimizer))
            make(optimizer, *arguments, **options)
            self._number_of(optimizer)

        @instead_of(Optimizer)
        def add_param_group(extend: Any, optimizer: Optimizer, group: dict[str, Any]) -> None:
            extend(optimizer, group)
            self.gradients.forget_holders()

        def zero_grad(clear: Any, *arguments: Any, **options: Any) -> None:
            self.lapse.write(ZeroGrad())
            clear(*arguments, **options)

        instead_of(Optimizer)(zero_grad)
        instead_of(nn.Module)(zero_grad)

        @instead_of(Optimizer)
        def load_state_dict(load: Any, optimizer: Optimizer, state: Any) -> None:
            load(optimizer, state)
            self.lapse.write(StateLoaded(self._number_of(optimizer), _rates_of(optimizer)))

        @instead_of(AveragedModel)
        def update_parameters(update: Any, averaged: Any, *arguments: Any) -> None:
            update(averaged, *arguments)
            self.lapse.write(Averaged())

        self._hold_norms_still()
        self._see_scaling()

    def take(self, optimizer: Optimizer) -> None:
        """Record one that was made before."""
        self._record_steps_of(type(optimizer))
        vars(optimizer).pop("step", None)  # a schedule that was made then has bound the one that is not recorded
        self._number_of(optimizer)

    # --------------------------------------------------------------------------------------------------- the steps

    def _record_steps_of(self, kind: type[Optimizer]) -> None:
        hooked = kind.step
        if getattr(hooked, "is_recorded", False):
            return
        real = getattr(hooked, "__wrapped__", hooked) if getattr(hooked, "hooked", None) else hooked

        @functools.wraps(real)
        def step(optimizer: Optimizer, closure: Closure | None = None, *arguments: Any, **options: Any) -> Any:
            given = (closure, *arguments) if closure is not None or arguments else ()
            return self._step(optimizer, real, given, options)

        vars(step).pop("hooked", None)
        recorded: Any = Optimizer.profile_hook_step(step)
        recorded.hooked = recorded.is_recorded = True
        kind.step = recorded  # type: ignore[method-assign]

    def _number_of(self, optimizer: Optimizer) -> int:
        """Its number; a copy of an optimizer is met first when it steps."""
        if optimizer not in self.lapse.optimizers:
            self.lapse.journal.optimizers.append(OptimizerPlayed(type(optimizer).__name__))
            self.gradients.forget_holders()
        return self.lapse.optimizers.number(optimizer)

    def _step(self, optimizer: Optimizer, real: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        lapse, number = self.lapse, self._number_of(optimizer)
        if number in self.stepping:  # a subclass that calls its parent's
            return real(optimizer, *given, **options)
        self.callers.update(self.stepping)
        if given and not type(optimizer).__module__.startswith("torch."):
            self.callers.add(number)
        closure = given[0] if given else None
        factor, assigned = self.gradients.factor(number), self.gradients.is_assigned(number)
        within, backwards = bool(self.stepping), lapse.backwards
        self.stepping.append(number)
        try:
            with lapse.going_on("step"):
                if number in self.callers:
                    result = real(optimizer, *given, **options)
                elif lapse.fast:
                    result = self._closure_as_often_as_it_was(number, closure)
                else:
                    result = self._counting_closure(number, optimizer, real, given, options)
        finally:
            self.stepping.pop()
        if lapse.backwards != backwards:  # its closure has made the gradients
            factor, assigned = 1.0, False
        lapse.steps += 1
        lapse.steps_made.add(number)
        made = Step(number, _rates_of(optimizer), factor == 0, factor or 1.0, within, assigned)
        if lapse.inside["backward"]:  # a hook of the pass steps, which is written down when it has ended
            self.gradients.steps_within.append(made)
        else:
            lapse.write(made)
        lapse.begin_if_due()
        return result

    def _counting_closure(
        self, number: int, optimizer: Optimizer, real: Any, given: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        if not given:
            return real(optimizer, **options)
        closure, *rest = given
        calls = 0

        def counted() -> Any:
            nonlocal calls
            calls += 1
            return closure()

        try:
            return real(optimizer, counted, *rest, **options)
        finally:
            self.lapse.journal.closure_calls.setdefault(number, []).append(calls)

    def _closure_as_often_as_it_was(self, number: int, closure: Closure | None) -> Any:
        result = None
        if closure is not None:
            calls = self.lapse.journal.closure_calls.setdefault(number, [])
            with torch.enable_grad():
                for _ in range(calls[-1] if calls else 1):
                    result = closure()
        return result

    # ----------------------------------------------------------------------------------- what goes by gradients

    def _hold_norms_still(self) -> None:
        @instead_of(clip_grad, nn.utils)
        def clip_grad_norm_(clip: Any, parameters: Any, *arguments: Any, **options: Any) -> Tensor:
            held = self._clipped(parameters)
            if not self.lapse.fast or self.norm is None:
                self.norm = clip(held, *arguments, **options)
            return self.norm.clone()

        @instead_of(clip_grad, nn.utils)
        def clip_grad_value_(clip: Any, parameters: Any, *arguments: Any, **options: Any) -> None:
            held = self._clipped(parameters)
            if not self.lapse.fast:
                clip(held, *arguments, **options)

    def _clipped(self, parameters: Any) -> list[Tensor]:
        held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self.lapse.write(Clipped(self.gradients.holders_of(held)))
        return held

    def _see_scaling(self) -> None:
        @instead_of(GradScaler)
        def _unscale_grads_(unscale: Any, scaler: Any, optimizer: Any, by: Any, found_inf: Any, fp16: bool) -> Any:
            self.lapse.write(Unscaled(self._number_of(optimizer)))
            if self.lapse.fast:
                return {found_inf.device: found_inf}
            found = unscale(scaler, optimizer, by, found_inf, fp16)
            if any(float(value) for value in found.values()):
                self.lapse.journal.skipped_by_scaler += 1
                self.lapse.note("A GradScaler left a step out in the real micro-batches; none is left out after them.")
            return found

        @instead_of(GradScaler)
        def scale(multiply: Any, scaler: Any, outputs: Any) -> Any:
            result = multiply(scaler, outputs)
            if scaler.is_enabled():
                self.gradients.scale = float(scaler.get_scale())
                self.lapse.note(
                    "A GradScaler adapts to overflows, which a rehearsal cannot foresee: each leaves a step out."
                )
            return result


def _rates_of(optimizer: Optimizer) -> tuple[float, ...]:
    return tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)
