"""A run as it was when its last window ended: what a checkpoint that is taken within a window is set back to."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from lightning.pytorch import Trainer

from course_lib.callbacks._trainer import skippers_of

BATCH_PROGRESS = "epoch_loop.batch_progress"


class WindowEnd(NamedTuple):
    """What changes within a window, as it was when the last one ended."""

    loops: dict[str, Any]
    """The state of the fit loop: its counters, and the training loader's state."""
    datamodule: dict[str, Any] | None
    skippers: dict[str, dict[str, Any]]
    """The states of SkipBadSteps: it counts an attempt, and a norm, before the optimizer steps."""
    gathered: dict[str, Any] | None
    """Of the epoch's training metrics."""
    logged: dict[str, Any]
    """What was logged last, as ``trainer.callback_metrics`` has it."""
    stop_waits: bool
    """Whether the run had been told to stop, and ``min_epochs`` or ``min_steps`` had put it off."""

    @property
    def micro_batches(self) -> int:
        return int(self.loops[BATCH_PROGRESS]["total"]["ready"])

    @classmethod
    def now(cls, trainer: Trainer, *, gathered: dict[str, Any], stop_waits: bool) -> WindowEnd:
        loops = trainer.fit_loop.state_dict()  # new counters; the states of loaders may be what the loader goes on with
        return cls(
            loops=loops | {"state_dict": copy.deepcopy(loops["state_dict"])},
            datamodule=copy.deepcopy(datamodule_state(trainer)),
            skippers={skipper.state_key: copy.deepcopy(skipper.state_dict()) for skipper in skippers_of(trainer)},
            gathered=gathered,
            logged=dict(trainer.callback_metrics),
            stop_waits=stop_waits,
        )

    @classmethod
    def of_checkpoint(cls, checkpoint: dict[str, Any], trainer: Trainer) -> WindowEnd:
        return cls(
            loops=checkpoint["loops"]["fit_loop"],
            datamodule=checkpoint.get(datamodule_key(trainer)),
            skippers={
                skipper.state_key: checkpoint["callbacks"][skipper.state_key]
                for skipper in skippers_of(trainer)
                if skipper.state_key in checkpoint.get("callbacks", {})
            },
            gathered=None,
            logged={},
            stop_waits=False,
        )

    def put_into(self, checkpoint: dict[str, Any], trainer: Trainer) -> None:
        checkpoint["loops"]["fit_loop"] = self.loops
        self.put_loader_state_into(checkpoint, trainer)
        checkpoint["callbacks"].update(self.skippers)

    def put_loader_state_into(self, checkpoint: dict[str, Any], trainer: Trainer) -> None:
        checkpoint["loops"]["fit_loop"]["state_dict"] = self.loops["state_dict"]
        if self.datamodule:
            checkpoint[datamodule_key(trainer)] = self.datamodule


def datamodule_state(trainer: Any) -> dict[str, Any] | None:
    return None if trainer.datamodule is None else trainer.datamodule.state_dict()


def datamodule_key(trainer: Any) -> str:
    return type(trainer.datamodule).__qualname__
