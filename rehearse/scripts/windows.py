"""Which backward passes are in which optimizer step, and what each loop over a loader gave: read off a journal."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rehearse.scripts.events import Backward, Delivered, Forward, PassBegun, PassEnded, Step, loop_of
from rehearse.scripts.journal import Journal


@dataclass(frozen=True)
class Pass:
    """One backward pass, where it stands in the run."""

    number: int
    line: str
    micro_batch: int
    """How many batches of what is trained on had come."""
    epoch: int
    """How many loops over what is trained on had begun, from 1."""
    samples: int
    averages: bool
    loader: int | None = None
    """Whose batch came last before it."""
    of_evaluation: bool = False


@dataclass(frozen=True)
class Window:
    """What one optimizer step was made with."""

    passes: tuple[Pass, ...]
    """Those that no step of this optimizer had used before."""
    stale: int
    """Passes in the gradients that an earlier step had used already."""
    cleared: bool
    """Whether the gradients had been cleared before the step."""
    factor: float
    micro_batch: int
    epoch: int


@dataclass
class OptimizerWindows:
    """All steps of one optimizer, and what no step used."""

    windows: list[Window] = field(default_factory=list)
    lost: list[Pass] = field(default_factory=list)
    """Cleared before any optimizer stepped with them."""
    left_over: list[Pass] = field(default_factory=list)
    """There at the end of the run, and used by no step."""
    assigned: int = 0
    """Steps with gradients that the script has made of those of passes, by its own code."""

    @property
    def usual(self) -> int:
        """The micro-batches of most windows; of those within an epoch, where there are some."""
        lengths = [len(window.passes) for window in self.windows]
        within = [len(window.passes) for window in self.windows if len({one.epoch for one in window.passes}) == 1]
        counts = Counter(within or lengths)
        return max(counts, key=lambda length: (counts[length], length))


def windows_of(journal: Journal) -> list[OptimizerWindows]:
    """For each optimizer, its windows."""
    trained, evaluating = journal.trained(), journal.evaluating()
    batch_of = _batches_behind(journal, trained)
    found = [OptimizerWindows() for _ in journal.optimizers]
    held: list[list[Pass]] = [[] for _ in journal.optimizers]
    used: list[set[int]] = [set() for _ in journal.optimizers]
    used_by_any: set[int] = set()
    suspects: list[list[Pass]] = [[] for _ in journal.optimizers]
    micro_batch = epoch = number = 0
    for at, event in enumerate(journal.events):
        if isinstance(event, Delivered) and at in trained:
            micro_batch += 1
        elif isinstance(event, PassBegun) and at in trained:
            epoch += 1
        elif isinstance(event, Backward):
            number += 1
            own, samples, loader = batch_of.get(at, (0, 0, None))
            made = Pass(number, event.line, own or number, epoch, samples, event.averages, loader, at in evaluating)
            if event.moved:  # by a step that is the script's own code, as the first of two
                used_by_any |= {one.number for of_one in held for one in of_one}
            if event.in_a_step:
                used_by_any.add(number)
            for optimizer, cleared in zip(event.reached, event.cleared, strict=True):
                if cleared:
                    suspects[optimizer] += held[optimizer]
                    held[optimizer] = []
                held[optimizer].append(made)
        elif isinstance(event, Step) and event.optimizer < len(found):
            mine, of = held[event.optimizer], found[event.optimizer]
            of.assigned += event.assigned
            if event.cleared:
                suspects[event.optimizer] += mine
                mine = held[event.optimizer] = []
            fresh = tuple(one for one in mine if one.number not in used[event.optimizer])
            of.windows.append(
                Window(fresh, len(mine) - len(fresh), event.cleared, event.factor, micro_batch or number, epoch)
            )
            used[event.optimizer] |= {one.number for one in fresh}
            used_by_any |= {one.number for one in fresh}
    for optimizer, of in enumerate(found):
        # A pass through one net for the step of another leaves gradients here that are rightly cleared.
        of.lost = [one for one in suspects[optimizer] if one.number not in used_by_any]
        of.left_over = [one for one in held[optimizer] if one.number not in used_by_any]
    return found


def _batches_behind(journal: Journal, trained: set[int]) -> dict[int, tuple[int, int, int | None]]:
    """Of each backward pass, by its place: the number of its micro-batch, the samples in it, and the loader.

    It is the last one that came. Where several come at once, and as many passes follow, each pass has its own.
    """
    found: dict[int, tuple[int, int, int | None]] = {}
    batches: list[tuple[int, int, int | None]] = [(0, 0, None)]
    passes: list[int] = []

    def end_group() -> None:
        each = batches if 1 < len(batches) == len(passes) else [batches[-1]] * len(passes)
        found.update(zip(passes, each, strict=True))
        passes.clear()

    number = 0
    for at, event in enumerate(journal.events):
        if isinstance(event, Delivered) and at in trained:
            if passes:
                end_group()
                batches.clear()
            elif not number:
                batches.clear()
            number += 1
            batches.append((number, event.size, event.loader))
        elif isinstance(event, Backward):
            passes.append(at)
    end_group()
    return found


@dataclass
class LoaderPass:
    """One loop over a loader."""

    loader: int
    promised: int | None
    micro_batch: int
    """How many batches of what is trained on had come when it began."""
    batches: list[tuple[int, ...] | None] = field(default_factory=list)
    """The indices of each; None where they are not known."""
    contents: list[int] = field(default_factory=list)
    """Of a stream, numbers for what is in its first batches."""
    ended: bool = False
    """Whether the loop came to the loader's end, or was given as many batches as it promises."""
    trained: set[int] = field(default_factory=set)
    """The weights that were in training while it gave batches; numbered as in ``Journal.weights``."""
    evaluated: set[int] = field(default_factory=set)

    def indices(self) -> list[int] | None:
        """In their order; None where some are not known."""
        found: list[int] = []
        for batch in self.batches:
            if batch is None:
                return None
            found += batch
        return found


def samples_of(journal: Journal, one: LoaderPass) -> list[int]:
    """What a loop gave, by the indices in the dataset that is under its subset."""
    base = journal.loaders[one.loader].base_indices
    return [index if base is None else base[index] for index in one.indices() or ()]


def passes_of(journal: Journal, *, training: bool) -> list[LoaderPass]:
    """The loops over a loader that are trained on, or the others, in the order in which they began."""
    trained = journal.trained()
    found: list[LoaderPass] = []
    running: dict[tuple[int, int], LoaderPass] = {}
    last: tuple[int, int] | None = None
    waiting: set[tuple[int, int]] = set()
    """The loops whose batches no backward pass has followed, as those that ``zip`` takes along."""
    micro_batch = 0
    for at, event in enumerate(journal.events):
        if isinstance(event, PassBegun):
            running[loop_of(event)] = LoaderPass(event.loader, event.promised, micro_batch)
            if (at in trained) == training:
                found.append(running[loop_of(event)])
        elif isinstance(event, Delivered):
            last = loop_of(event)
            running[last].batches.append(event.indices)
            running[last].contents += [] if event.content is None else [event.content]
            running[last].ended |= len(running[last].batches) == running[last].promised
            micro_batch += at in trained
            waiting.add(last)
        elif isinstance(event, Forward) and last is not None:
            if event.training:
                for one in {last, *waiting}:
                    running[one].trained.add(journal.weights[event.module])
            else:
                running[last].evaluated.add(journal.weights[event.module])
                waiting.discard(last)
        elif isinstance(event, PassEnded):
            running[loop_of(event)].ended = True
            waiting.discard(loop_of(event))
        elif isinstance(event, Backward):
            waiting.clear()
    return found


def batches_behind_the_last_pass(journal: Journal) -> list[int]:
    """Of each loop over a training loader that came to its end: how many of its batches no backward pass follows."""
    trained = journal.trained()
    found: list[int] = []
    waiting, ended = 0, False
    for at, event in enumerate(journal.events):
        if isinstance(event, Delivered) and at in trained:
            found += [waiting] * (ended and waiting > 0)
            waiting, ended = waiting * (not ended) + 1, False
        elif isinstance(event, PassEnded):
            ended = True
        elif isinstance(event, Backward):
            waiting = 0
    found += [waiting] * (ended and waiting > 0)
    return found if any(isinstance(event, Backward) for event in journal.events) else []


def trained_beside_others(journal: Journal) -> set[int]:
    """The loaders of which most batches go into a backward pass together with a later one of another, as by ``zip``."""
    given: Counter[int] = Counter()
    in_a_pass: Counter[int] = Counter()
    waiting: set[int] = set()
    last = None
    used = journal.used_in_training()
    for at, event in enumerate(journal.events):
        if isinstance(event, Delivered):
            last = event.loader
            given[last] += 1
            waiting.add(last)
        elif isinstance(event, Forward) and last is not None and not event.training:
            waiting.discard(last)
        elif isinstance(event, PassEnded):
            waiting.discard(event.loader)
        elif isinstance(event, Backward):
            in_a_pass.update(waiting if at in used else ())
            waiting.clear()
    beside = {loader for loader, batches in in_a_pass.items() if batches > 1 and 2 * batches > given[loader]}
    return beside - journal.training_loaders()
