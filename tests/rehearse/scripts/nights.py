"""Training scripts drawn at random: a night is a choice of each kind of piece, and whether these fit together."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from tests.rehearse.scripts.night_pieces import (
    ASIDES,
    AVERAGES,
    BATCHES,
    CLIPS,
    COMPILED_LOSSES,
    ENDS,
    FAULTS,
    HOOKS,
    LAYOUTS,
    LOADERS,
    LOSSES,
    MODELS,
    OPTIMIZERS,
    PRECISIONS,
    SAVES,
    SCHEDULES,
    SCORES,
    TOOLS,
    VALIDATIONS,
    WALKS,
    ZEROS,
)


@dataclass(frozen=True)
class Night:
    """The pieces of one script; the default of each is the simplest."""

    model: str = "linear"
    loss: str = "cross entropy"
    loader: str = "shuffled"
    walk: str = "epochs"
    optimizer: str = "SGD"
    zero: str = "before the forward"
    schedule: str = ""
    precision: str = ""
    clip: str = ""
    validation: str = ""
    save: str = ""
    average: str = ""
    hook: str = ""
    layout: str = "flat"
    batches: str = "pairs"
    aside: str = ""
    to_zeros: bool = False
    """``set_to_none=False``."""
    batch_size: int = 4
    accumulate: int = 1
    windows: int = 4
    """In an epoch."""
    epochs: int = 4
    ranks: int = 1
    score: str = "loss"
    over: str = "validating"
    """What the validation goes over."""
    end: str = ""
    fresh: bool = False
    """The loader is made anew in each epoch."""
    tool: str = "torch"
    resumed: bool = False
    """The run goes on behind its first epoch, from a checkpoint."""
    fault: str = ""

    @property
    def steps(self) -> int:
        return self.windows * self.epochs

    @property
    def samples(self) -> int:
        """Of the training: one that is dropped beyond whole batches, or one fewer, so that the last batch is short."""
        beyond = {"uneven": -1, "weights": 0, "stream": 0, "ordered": 0}.get(self.loader, 1)
        return self.ranks * (self.batch_size * self.accumulate * self.windows + beyond)

    @property
    def by_epochs(self) -> bool:
        """Whether each epoch is a loop of its own."""
        return self.walk in ("epochs", "counted", "by length", "from one")

    def is_possible(self) -> bool:
        """Whether its pieces fit together, and its fault is one in it."""
        by_closure = self.optimizer == "LBFGS"
        scheduled_by = SCHEDULES[self.schedule][1]
        facts = [
            self.loader != "uneven" or (self.accumulate == 1 and self.by_epochs),
            self.loader != "batch sampler" or self.walk != "indices",
            self.by_epochs or (scheduled_by in ("", "step") and self.validation in ("", "within an epoch")),
            self.by_epochs or not self.save,
            not by_closure or (self.accumulate == 1 and not self.precision and not self.clip and self.loss != "mixed"),
            not by_closure or (self.zero in ("before the forward", "before the backward") and self.model != "dropout"),
            scheduled_by != "validation" or self.validation in ("no_grad", "inference_mode", "decorated"),
            self.loss != "penalty" or self.model not in ("checkpointed, reentrant", "recurrent", "wrapped", "compiled"),
            self.loss != "twice" or self.model != "wrapped",
            self.model != "checkpointed, reentrant" or self.hook != "backward",
            self.model != "wrapped" or self.average != "a copy",
            self.precision != "scaler" or self.optimizer != "fused",
            self.hook != "backward" or self.model not in ("called apart", "loss inside"),
            self.walk != "indices" or (self.loader == "shuffled" and self.batches == "pairs"),
            self.ranks == 1 or (self.model == "wrapped" and self.loader == "distributed" and self.walk != "indices"),
            self.walk != "by length" or self.loader != "stream",
            self.batches == "pairs" or self.loader in ("shuffled", "ordered", "uneven", "generator", "workers"),
            not by_closure or self.aside not in ("best", "nan", "means"),
            self.aside != "scaled" or self.model != "weight norm",
            self.loss not in COMPILED_LOSSES or self.fault != "loss not divided",
            self.hook != "forward" or self.model != "called apart",
            self.end != "patience" or (self.by_epochs and self.validation not in ("", "within an epoch")),
            self.end != "patience" or self.layout == "flat",
            not self.end or self.by_epochs,
            not self.fresh or (self.by_epochs and not self.resumed and self.loader not in ("generator", "distributed")),
            not self.resumed or (self.save == "each epoch" and self.epochs > 1 and self.ranks == 1),
            self.model != "unfrozen later" or (self.by_epochs and self.hook != "backward" and self.epochs > 2),
            self.end not in ("new optimizer", "more parameters", "lower rate") or self._may_change_its_optimizer(),
            self.loss != "learned weight" or (self.model != "wrapped" and self.save != "each epoch"),
            self.loss != "penalty" or self.model not in ("attention", "output object"),
            self.hook not in ("forward", "backward") or self.model != "output object",
            self.model != "with a queue" or (self.batch_size != 5 and self.loss not in ("views", "twice")),
            self.model != "half of the layers at random" or (self.optimizer != "LBFGS" and self.hook != "parameter"),
            self.loader != "uneven"
            or self.batch_size > 2
            or self.model not in ("batch norm", "two parts", "called apart"),
            self.tool == "torch" or self._may_be_set_up(),
            self.loss != "learned weight" or self.zero not in ("model", "by hand"),
            self.over != "loader" or (bool(self.validation) and self.batches == "pairs" and self.by_epochs),
            self.over != "loader" or self.layout == "flat" or not self.fresh,
            self.aside != "critic" or not by_closure,
            self.aside not in ("critic", "embedding", "adversary", "critics") or self.ranks == 1,
            self.aside != "embedding" or self.loader != "stream",
        ]
        return all(facts) and self._fault_fits()

    def _may_change_its_optimizer(self) -> bool:
        is_left_alone = not self.save and not self.schedule and not self.precision and self.hook != "step"
        return is_left_alone and self.layout == "flat" and self.epochs > 2 and self.optimizer in ("SGD", "AdamW")

    def _may_be_set_up(self) -> bool:
        """Whether Fabric takes it as it stands."""
        is_plain = self.model not in ("wrapped", "called apart", "compiled") and self.optimizer != "LBFGS"
        return is_plain and not (self.fresh or self.average or self.save or self.precision or self.hook)

    def _fault_fits(self) -> bool:
        by_step = SCHEDULES[self.schedule][1] == "step"
        plans = bool(SCHEDULES[self.schedule][2])
        by_index = self.loader not in ("stream", "stream with a length", "batched already") and self.walk != "indices"
        split = by_index and self.batches == "pairs"
        keeps_its_order = ("ordered", "generator", "distributed")
        validates = self.validation not in ("", "within an epoch")
        has_modes = self.model in ("batch norm", "dropout", "two parts", "called apart", "attention")
        if self.optimizer == "LBFGS" and self.fault:
            return False
        return {
            "": True,
            "no zero_grad": self.steps > 1,
            "zeroed in each micro-batch": self.accumulate > 1,
            "loss not divided": self.accumulate > 1,
            "tail lost": self.accumulate > 1 and self.windows > 1 and self.walk == "epochs",
            "eval left on": has_modes and validates and self.epochs > 1 + self.resumed and self.walk == "epochs",
            "head replaced": self.model == "two parts" and not self.hook and not self.average,
            "schedule of micro-batches": self.accumulate > 1 and plans and by_step and self.steps > 3,
            "stepped twice": plans and SCHEDULES[self.schedule][1] != "validation" and self.schedule != "one cycle",
            "stepped by epoch": plans
            and by_step
            and not self.resumed
            and self.walk == "epochs"
            and self.windows > 1
            and self.steps > 3,
            "stepped by step": plans and not by_step and self.walk == "epochs" and self.windows > 1 and self.epochs > 1,
            "set_epoch never called": self.loader == "distributed" and self.by_epochs and self.epochs > 1,
            "validated on training": validates and self.over == "validating" and split and self.loader != "listed",
            "seeded in each epoch": split
            and self.samples > 8
            and self.by_epochs
            and self.epochs > 1
            and self.loader not in keeps_its_order,
            "dealt to each rank": self.ranks > 1 and not self.schedule and self.accumulate == 1,
        }[self.fault]


KINDS = {
    "model": tuple(MODELS),
    "loss": tuple(LOSSES),
    "loader": tuple(LOADERS),
    "walk": WALKS,
    "optimizer": tuple(OPTIMIZERS),
    "zero": ZEROS,
    "schedule": tuple(SCHEDULES),
    "precision": PRECISIONS,
    "clip": tuple(CLIPS),
    "validation": VALIDATIONS,
    "save": SAVES,
    "average": tuple(AVERAGES),
    "hook": tuple(HOOKS),
    "layout": LAYOUTS,
    "batches": BATCHES,
    "aside": tuple(ASIDES),
    "to_zeros": (False, True),
    "batch_size": (2, 4, 5),
    "accumulate": (1, 1, 2, 3),
    "windows": (1, 2, 4, 7),
    "epochs": (1, 2, 4, 6),
    "ranks": (1, 2),
    "score": tuple(SCORES),
    "over": ("validating", "loader"),
    "end": tuple(ENDS),
    "fresh": (False, True),
    "resumed": (False, True),
    "tool": TOOLS,
    "fault": FAULTS,
}


def drawn(draws: random.Random, *, with_fault: bool) -> Night:
    """A night whose pieces fit together; of each kind, the simplest piece is drawn most often."""
    fault = draws.choice(FAULTS[1:]) if with_fault else ""
    while True:
        choices = {kind: draws.choice(of) for kind, of in KINDS.items() if draws.random() < 0.5}
        night = Night(**{**choices, "fault": fault})
        if night.is_possible():
            return night


def simpler(night: Night) -> list[Night]:
    """The nights with one piece more that is the simplest, in which the fault is still one."""
    plain = Night()
    changes = [
        dataclasses.replace(night, **{kind: getattr(plain, kind)})
        for kind in KINDS
        if kind != "fault" and getattr(night, kind) != getattr(plain, kind)
    ]
    return [one for one in changes if one.is_possible()]
