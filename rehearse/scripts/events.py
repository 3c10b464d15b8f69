"""What a script does, event by event, as it stands in a journal: plain values, and no tensor and no module."""

from __future__ import annotations

from typing import NamedTuple


class Delivered(NamedTuple):
    """A loader gave a batch, or ``itertools.cycle`` gave one of a loader again."""

    loader: int
    indices: tuple[int, ...] | None
    """Of its samples; None where a sampler gives no whole numbers, or a stream has none."""
    size: int
    """Samples."""
    loop: int = 0
    """Which loop over the loader it was: one may begin within another."""
    content: int | None = None
    """Of a stream's first batches, a number for what is in them."""


class PassBegun(NamedTuple):
    """A loop over a loader began."""

    loader: int
    promised: int | None
    """``len(loader)``, in batches."""
    loop: int = 0


class PassEnded(NamedTuple):
    """A loop over a loader reached the loader's end."""

    loader: int
    loop: int = 0


class Forward(NamedTuple):
    """A module with parameters was called, by no other such module."""

    module: int
    training: bool
    """Whether the module is in training mode and a graph is recorded."""
    has_graph: bool
    modes: int
    """How many of its modules are in training mode that behave otherwise in evaluation."""
    samples: int = 0
    """The length of its first tensor."""


class Backward(NamedTuple):
    """A backward pass."""

    line: str
    """Of the script: ``"train.py:37"``."""
    reached: tuple[int, ...]
    """The optimizers whose parameters it gave gradients to."""
    cleared: tuple[bool, ...]
    """Of each, whether its gradients were none or zero before."""
    averages: bool
    """Whether the ranks average these gradients: not under ``no_sync``, nor behind a forward beside the wrapper."""
    moved: bool
    """Whether the script has changed parameters by its own code since the pass before."""
    in_a_step: bool = False
    """Whether an optimizer's step made it, by its closure."""


class Step(NamedTuple):
    """An optimizer stepped."""

    optimizer: int
    rates: tuple[float, ...]
    """Of each parameter group, in this step."""
    cleared: bool
    """Whether its gradients were none or zero."""
    factor: float
    """By which the script has multiplied its gradients since the last backward pass."""
    within: bool
    """Whether the step of another optimizer made this one."""
    assigned: bool = False
    """Whether the script has put gradients of its own in the place of those that a pass had left."""


class ScheduleStep(NamedTuple):
    """A learning-rate schedule stepped."""

    schedule: int


class Clipped(NamedTuple):
    """Gradients were clipped by their norm or value."""

    optimizers: tuple[int, ...]
    """Those that hold them."""


class Unscaled(NamedTuple):
    """A GradScaler has divided an optimizer's gradients by its scale."""

    optimizer: int


class Averaged(NamedTuple):
    """An ``AveragedModel`` has taken up the weights."""

    model: int
    """Which one, by a number."""


class StateLoaded(NamedTuple):
    """``load_state_dict`` of an optimizer."""

    optimizer: int
    rates: tuple[float, ...]
    """That it has behind it."""


class ZeroGrad(NamedTuple):
    """``zero_grad`` of an optimizer or a module."""


class EpochSet(NamedTuple):
    """``set_epoch`` of a sampler."""

    epoch: int


class Saved(NamedTuple):
    """A file was written with ``torch.save`` or safetensors."""

    line: str = ""


class Loaded(NamedTuple):
    """A file was read with ``torch.load`` or safetensors."""

    name: str
    """Of the file, without its folder; empty where it is not known."""


Event = (
    Delivered
    | PassBegun
    | PassEnded
    | Forward
    | Backward
    | Step
    | ScheduleStep
    | Clipped
    | Unscaled
    | Averaged
    | StateLoaded
    | ZeroGrad
    | EpochSet
    | Saved
    | Loaded
)


def loop_of(event: Delivered | PassBegun | PassEnded) -> tuple[int, int]:
    """What tells a loop over a loader from every other."""
    return event.loader, event.loop
