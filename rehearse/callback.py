"""A rehearsal at the start of a fit.

Trainer(callbacks=[Rehearsal()], ...).fit(model)  # raises where the run will not do what its settings promise
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from course_lib.callbacks._trainer import refuse_another_lightning
from rehearse._lightning import DATA_SOURCE, VALIDATION_SOURCE
from rehearse.judge import rehearse
from rehearse.report import NotReady, RehearsalReport


class Rehearsal(Callback):
    """Judge the run when a fit begins, before its first batch; see :func:`rehearse.rehearse`.

    Rank 0 judges, on copies, and the others wait for its report. Where a check failed to be judged, by an error or for
    time, it warns: a right fit goes on.

    Args:
        strict: Raise :class:`rehearse.NotReady` where something is found, on all ranks, instead of warning.
        deep, expect, skip, allow_unjudged, seconds: See :func:`rehearse.rehearse`.

    Attributes:
        report: That of the last fit.
    """

    def __init__(
        self,
        *,
        strict: bool = True,
        deep: bool = False,
        expect: Mapping[str, Any] | None = None,
        skip: Collection[str] = (),
        allow_unjudged: Collection[str] = (),
        seconds: float = 20.0,
    ) -> None:
        self.strict = strict
        self.report: RehearsalReport | None = None
        self._options: dict[str, Any] = {
            "deep": deep,
            "expect": expect,
            "skip": skip,
            "allow_unjudged": allow_unjudged,
            "seconds": seconds,
        }

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        refuse_another_lightning("Rehearsal", trainer)
        report = None
        if trainer.is_global_zero:
            report = rehearse(trainer, pl_module, *_data_of(trainer), **self._options)
        self.report = trainer.strategy.broadcast(report)
        assert self.report is not None, "rank 0 has judged"
        if self.report.ok:
            rank_zero_info(f"Rehearsal: {self.report}")
        elif self.strict and self.report.findings:
            raise NotReady(self.report)
        else:
            rank_zero_warn(f"Rehearsal: {self.report}")


def _data_of(trainer: Trainer) -> tuple[Any, Any]:
    """What the fit was given as data, and as the validation's; None where the module has its own."""
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
    if datamodule is not None:
        return datamodule, None
    sources = DATA_SOURCE.of(trainer.fit_loop), VALIDATION_SOURCE.of(trainer.fit_loop.epoch_loop.val_loop)
    training, validation = (None if source.is_module() else source.instance for source in sources)
    return training, validation
