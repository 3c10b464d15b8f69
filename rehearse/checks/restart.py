"""resume, deeper: a run is saved at a window's end and inside a window, resumed, and held against itself.

Both runs are given the same batches and the same seeds, so that what is left to differ is what the checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from course_lib._words import counted
from course_lib.memory.ledger import tensors_in
from rehearse._checkpoints import is_any_of
from rehearse._lightning import SHOULD_ACCUMULATE
from rehearse.report import Judgement, Kind, Unjudged, in_a_line, not_applicable, not_judged
from rehearse.runs.copies import temporary_folder, try_on_copies
from rehearse.runs.hooks import nothing
from rehearse.runs.lightning_run import LightningRun
from rehearse.runs.run import Enough, seed_as_another_process

WINDOWS = 2
"""Windows before the checkpoint, and after it."""
MOST_BATCHES = 64
MOST_BYTES = 200 * 2**20
"""Of the batches that both runs are given."""
TOLERANCE = 1e-5
"""Of the largest weight: a gradient that is missing changes far more."""
LEFT_WITHIN = "this checkpoint was saved within an epoch"
"""By which ExactResume refuses a loader that does not know its position."""
PLACES = {"end": "at a window's end", "inside": "inside a window"}


@dataclass
class Snapshot:
    """A run at one moment."""

    batch: int = 0
    """Micro-batches that the whole run has trained."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers, those that are in no checkpoint included."""
    optimizers: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Snapshots:
    """A run when it is saved, and after the last batch that is looked at."""

    saved: dict[str, Snapshot] = field(default_factory=dict)
    """By the place of the checkpoint."""
    ends: Snapshot = field(default_factory=Snapshot)


@dataclass(frozen=True)
class Resumed:
    """A resumed run beside the run that was not stopped."""

    place: str
    batch: int
    refused: str = ""
    """What was raised while the checkpoint was loaded."""
    not_restored: tuple[str, ...] = ()
    """Weights and optimizer states that came back with other values."""
    difference: float = 0.0
    """Of a weight at the end, as a share of the largest."""


def judge_restarts(run: LightningRun, *, within_epoch: bool, inside_window: bool, seconds: float) -> Judgement:
    """Save and resume the run on copies, at a window's end and, if its checkpoints may fall there, inside one.

    A run that saves ``within_epoch`` does so ahead of the module's own ``on_train_batch_end``; another one behind it.
    """
    with temporary_folder() as name:
        folder = Path(name)
        wholes = [_whole(run, name, within_epoch) for name in ("once", "again")]
        answers = try_on_copies(wholes, seconds=seconds, folder=folder)
        if why := next((answer.error for answer in answers if answer.error), ""):
            return not_judged("resume", why)
        if unjudged := answers[0].value:
            return Judgement(not_judged={"resume": unjudged})
        once, again = (_load(folder / f"{name}.snapshots") for name in ("once", "again"))
        if _difference(once.ends.weights, again.ends.weights) > 0:
            why = "two runs with the same seeds and batches differ: the run is not deterministic"
            return not_judged("resume", why)
        places = [place for place in once.saved if place == "end" or inside_window]
        trials = [_resumed(run, place, once, within_epoch) for place in places]
        judgement = Judgement()
        for answer in try_on_copies(trials, seconds=seconds, folder=folder):
            if answer.error:
                judgement.add(not_judged("resume", answer.error))
            elif not within_epoch and LEFT_WITHIN in answer.value.refused:
                judgement.add(not_applicable("resume", "the run saves at epochs' ends, and resumes only from there"))
            elif not judgement.findings:  # the same cause is seen at both places
                judgement.add(_judge(answer.value))
        return judgement


@dataclass
class Recording:
    """The run that is not stopped, as far as it has come."""

    name: str
    """``"once"``, whose checkpoints and batches are kept, or ``"again"``."""
    folder: Path
    snapshots: Snapshots = field(default_factory=Snapshots)
    batches: dict[int, Any] = field(default_factory=dict)
    """By their number in the run."""
    bytes_held: int = 0
    """Of these batches."""
    updates: int = 0
    """Windows that have ended."""
    steps: int = 0
    """``global_step`` after the last batch, where the module's own code steps."""
    too_long: bool = False

    def keep(self, number: int, batch: Any) -> Any:
        self.batches[number] = batch
        self.bytes_held += sum(part.nbytes for part in tensors_in(batch))
        return batch

    def begin(self, trainer: Any, model: Any) -> None:
        _give_batches(trainer, self.keep)

    def end_batch(self, trainer: Any, model: Any, *_: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        if model.automatic_optimization:
            window_ends = not SHOULD_ACCUMULATE.of(loop)()
        else:  # the module's own code has stepped, or has not
            window_ends, self.steps = trainer.global_step > self.steps, trainer.global_step
        self.updates += window_ends
        place = ""
        if window_ends and self.updates == WINDOWS:
            place = "end"
        elif not window_ends and self.updates == WINDOWS and "inside" not in self.snapshots.saved:
            place = "inside"
        if place:
            self.snapshots.saved[place] = _snapshot(trainer, model)
            if self.name == "once":
                trainer.save_checkpoint(self.folder / f"{place}.ckpt")
        if self.updates == 2 * WINDOWS + 1:
            self.snapshots.ends = _snapshot(trainer, model)
            raise Enough
        self.too_long = self.bytes_held > MOST_BYTES or loop.batch_progress.total.ready >= MOST_BATCHES
        if self.too_long:
            raise Enough


def _whole(run: LightningRun, name: str, within_epoch: bool) -> Callable[[Path], Unjudged | None]:
    """A trial: the run that is not stopped. It saves its checkpoints and its snapshots, or returns why not."""

    def trial(folder: Path) -> Unjudged | None:
        recording = Recording(name, folder)
        _train(run, folder, recording.begin, recording.end_batch, within_epoch)
        if recording.too_long:
            return Unjudged(f"{2 * WINDOWS + 1} windows are too much to be tried in seconds")
        if not recording.snapshots.ends.batch:
            return Unjudged(f"the run has fewer than {2 * WINDOWS + 1} windows", Kind.NOT_APPLICABLE)
        torch.save(recording.snapshots, folder / f"{name}.snapshots")
        if name == "once":
            torch.save(recording.batches, folder / "batches")
        return None

    return trial


def _resumed(run: LightningRun, place: str, once: Snapshots, within_epoch: bool) -> Callable[[Path], Resumed]:
    """A trial: the run that is resumed from one of the checkpoints."""

    def trial(folder: Path) -> Resumed:
        batches = _load(folder / "batches")
        saved = once.saved[place]
        missing: tuple[str, ...] | None = None  # until it has begun
        last: Snapshot | None = None

        def begin(trainer: Any, model: Any) -> None:
            nonlocal missing
            missing = tuple(_not_restored(saved, _snapshot(trainer, model)))
            _give_batches(trainer, lambda number, batch: batches.get(number, batch))

        def end(trainer: Any, model: Any, *_: Any) -> None:
            nonlocal last
            if run.batches_begun >= once.ends.batch:
                last = _snapshot(trainer, model)
                raise Enough

        try:
            _train(run, folder, begin, end, within_epoch, ckpt_path=folder / f"{place}.ckpt")
        except Exception as error:
            if missing is not None:
                raise
            return Resumed(place, saved.batch, refused=in_a_line(error))
        if last is None:
            raise RuntimeError("the resumed run ended before the other")
        difference = _difference(once.ends.weights, last.weights)
        return Resumed(place, saved.batch, not_restored=missing or (), difference=difference)

    return trial


def _train(
    run: LightningRun,
    folder: Path,
    begin: Callable[..., None],
    end: Callable[..., None],
    within_epoch: bool,
    ckpt_path: Path | None = None,
) -> None:
    # ExactResume has callbacks save there.
    behind_the_hook = not within_epoch or any(is_any_of(one, {"ExactResume"}) for one in run.trainer.callbacks)

    def begin_here(trainer: Any, model: Any) -> None:
        begin(trainer, model)
        if behind_the_hook:
            _call_behind_the_modules_hook(end, trainer, model)

    run.start(
        folder,
        ckpt_path=ckpt_path,
        on_train_start=begin_here,
        on_train_batch_start=_seed_by_batch,
        on_train_batch_end=nothing if behind_the_hook else end,
    )


def _call_behind_the_modules_hook(end: Callable[..., None], trainer: Any, model: Any) -> None:
    """In this copy's process: callbacks come ahead of it."""
    hook = model.on_train_batch_end

    def both(*arguments: Any) -> None:
        hook(*arguments)
        end(trainer, model)

    model.on_train_batch_end = both


def _seed_by_batch(trainer: Any, *_: Any) -> None:
    seed_as_another_process(int(trainer.fit_loop.epoch_loop.batch_progress.total.ready))


def _give_batches(trainer: Any, give: Callable[[int, Any], Any]) -> None:
    """Have each batch pass ``give(number in the run, batch)`` on its way to the module."""
    to_device = trainer.strategy.batch_to_device

    def given(batch: Any, *arguments: Any, **options: Any) -> Any:
        if trainer.training:
            batch = give(int(trainer.fit_loop.epoch_loop.batch_progress.total.ready), batch)
        return to_device(batch, *arguments, **options)

    trainer.strategy.batch_to_device = given


# ---------------------------------------------------------------------------------------------------- the snapshots


def _snapshot(trainer: Any, model: Any) -> Snapshot:
    return Snapshot(
        batch=int(trainer.fit_loop.epoch_loop.batch_progress.total.ready),
        weights={name: value.detach().clone() for name, value in [*model.named_parameters(), *model.named_buffers()]},
        optimizers=dict(_states(trainer.optimizers)),
    )


def _states(optimizers: list[Any]) -> Iterator[tuple[str, Tensor]]:
    for optimizer in optimizers:
        for number, state in enumerate(optimizer.state_dict()["state"].values()):
            for name, value in state.items():
                if isinstance(value, Tensor):
                    yield f"{type(optimizer).__name__}'s {name} of parameter {number}", value.detach().clone()


def _not_restored(saved: Snapshot, now: Snapshot) -> Iterator[str]:
    for before, after in ((saved.weights, now.weights), (saved.optimizers, now.optimizers)):
        for name, value in before.items():
            if name not in after or not torch.equal(value, after[name].to(value.dtype)):
                yield name


def _difference(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    largest = 0.0
    for name, value in weights.items():
        if name not in others or others[name].shape != value.shape:
            return float("inf")
        if value.numel():
            most = max(value.double().abs().max().item(), 1e-12)
            change = (value.double() - others[name].double()).abs().nan_to_num(0.0).max().item()
            largest = max(largest, change / most)
    return largest


def _load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def _judge(resumed: Resumed) -> Judgement:
    where = f"saved {PLACES[resumed.place]}, after {counted(resumed.batch, 'micro-batch', 'micro-batches')}"
    changed = resumed.difference > TOLERANCE
    if resumed.refused:
        wrong = (
            f"A checkpoint {where}, cannot be loaded: {resumed.refused}.",
            "The run cannot be resumed from its checkpoints.",
            "Let load_state_dict and on_load_checkpoint ask for what the saving side puts in.",
        )
    elif changed and resumed.not_restored:
        names, most = resumed.not_restored, 2
        more = f" and {len(names) - most} more" if len(names) > most else ""
        wrong = (
            f"A run that is {where}, and resumed has not got back {', '.join(names[:most])}{more}.",
            "It goes on with other numbers than it was stopped with, and no error says so.",
            "Leave the checkpoint whole; register what belongs to the model as a persistent buffer.",
        )
    elif changed and resumed.place == "inside":
        wrong = (
            f"A run that is {where}, and resumed has lost the gradients of its begun window.",
            "Its next update is made of the rest of the window, and the earlier samples' part is lost.",
            "Add course_lib.callbacks.ExactResume(), or save when a window ends.",
        )
    elif changed:
        wrong = (
            f"A run that is {where}, and resumed goes on to weights that differ by {resumed.difference:.1g} of the "
            "largest, with the same batches and seeds.",
            "Something that training changes is in no checkpoint.",
            "Look for what the step reads and nobody saves, as a counter or an average: make it a buffer of the module "
            "(register_buffer), or give its callback state_dict and load_state_dict.",
        )
    else:
        return Judgement()
    return Judgement().find("resume", *wrong, chapter="09_all_at_once")
