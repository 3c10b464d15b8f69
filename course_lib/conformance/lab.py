"""The two ways in: get a report, or have a test fail with it. Every rule is judged over every trial."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any

from course_lib._arguments import int_of_at_least
from course_lib._generators import generators_put_back
from course_lib.conformance.calls import Fault, named_arguments
from course_lib.conformance.report import RULES, ConformanceReport, Shape, Violation, listed, named_rules
from course_lib.conformance.rules import IN_ORDER, Checks, Finding
from course_lib.conformance.trial import Game, Trial


def check_batch_sampler(
    factory: Callable[..., Any],
    exactly_once: Collection[int] | Callable[[Shape], Collection[int]],
    *,
    world_sizes: Iterable[int] = (1, 2, 3, 5, 8),
    epochs: int = 3,
    shapes: Iterable[Shape] | None = None,
    repeats: bool = False,
    drops: bool = False,
) -> ConformanceReport:
    """Judge a batch sampler by playing all ranks in this process.

    Args:
        factory: ``factory(num_replicas, rank, **shape)`` makes one rank's batch sampler, for every shape. If it takes
            a keyword ``seed``, other seeds are judged too. ``partial(ShuffledBatchSampler, 100, 8)`` is one.
        exactly_once: The indices that an epoch must cover, or a function that tells them from the shape (a dict).
            Other indices are taken for a second stream, which is cycled; the two must not overlap. A list or range
            also gives the order in which a sampler that does not shuffle yields them; for a set it is the ascending
            order.
        world_sizes: Numbers of ranks.
        epochs: How many to read, at least 2.
        shapes: Keywords of the factory. A few small ones, some of them uneven, find what large ones would find. A
            sampler that groups by length needs one that is larger than a group.
        repeats: The sampler repeats indices by design (weighted sampling, repeated augmentation, padding), so rules 1,
            9 and 10 allow it.
        drops: It leaves indices out by design (weighted sampling, ``drop_last``), so rules 1 and 9 allow it.

    A sampler or factory that raises a ``ValueError`` before the first batch, on all ranks, refuses that shape or world
    size: this is a note, not a violation. Any other exception, a batch that is empty or holds no integers, and an
    epoch without an end are violations. The kit tells a shuffling sampler from a plain one by its epochs: if all are
    equal and in the order of ``exactly_once``, or if the shape has ``shuffle=False``, rules 5 and 6 do not ask for
    another order.

    So that one fault is one violation, checks that depend on a broken rule are left out and noted: rule 9 depends on
    1, 4 and 7, and the resumes of rule 8 depend on 7. The fourth rule is strict: an order that changes when a sampler
    is iterated twice, with no set_epoch in between, is no function of (seed, epoch). Every epoch is read hundreds of
    times: keep shapes small.

    Raises:
        ValueError: An argument is out of its range, or every shape was refused on every world size.
    """
    game = _game_of(factory, exactly_once, world_sizes, epochs, shapes)
    game.repeats, game.drops = repeats, drops
    with generators_put_back(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        checks = {number: _judge(game, number, rule) for number, rule in enumerate(IN_ORDER, start=1)}
        for warning in warned:
            game.note("the sampler warned", str(warning.message))
        return _report(game, checks)


def assert_batch_sampler(
    factory: Callable[..., Any],
    exactly_once: Collection[int] | Callable[[Shape], Collection[int]],
    *,
    world_sizes: Iterable[int] = (1, 2, 3, 5, 8),
    epochs: int = 3,
    shapes: Iterable[Shape] | None = None,
    repeats: bool = False,
    drops: bool = False,
) -> None:
    """Raise an ``AssertionError`` with the report if a rule is broken; see :func:`check_batch_sampler`."""
    __tracebackhide__ = True  # pytest shows the caller's line
    report = check_batch_sampler(
        factory, exactly_once, world_sizes=world_sizes, epochs=epochs, shapes=shapes, repeats=repeats, drops=drops
    )
    if not report.ok:
        raise AssertionError(str(report))


def _game_of(
    factory: Callable[..., Any],
    exactly_once: Collection[int] | Callable[[Shape], Collection[int]],
    world_sizes: Iterable[int],
    epochs: int,
    shapes: Iterable[Shape] | None,
) -> Game:
    sizes = sorted({int_of_at_least(1, "every world size", size) for size in world_sizes})
    given = [{}] if shapes is None else [dict(shape) for shape in shapes]
    if not sizes or not given:
        raise ValueError(f"there is nothing to judge: {len(sizes)} world sizes, {len(given)} shapes")
    parameters = named_arguments(factory)
    game = Game(
        factory,
        by_name={"num_replicas", "rank"} <= parameters,
        seeds="seed" in parameters or all("seed" in shape for shape in given),
        epochs=range(int_of_at_least(2, "epochs", epochs)),
    )
    smallest_first = [(shape, exactly_once(shape) if callable(exactly_once) else exactly_once) for shape in given]
    smallest_first.sort(key=lambda entry: len(entry[1]))
    game.trials += [Trial(game, shape, once, size) for size in sizes for shape, once in smallest_first]
    return game


def _judge(game: Game, number: int, rule: Callable[[Trial], Checks]) -> int:
    """Run a rule over the trials, up to its first violation, and return how many checks it passed."""
    passed = 0
    for trial in game.trials:
        try:
            for finding in rule(trial):
                if finding:
                    game.broken[number] = _violation(number, finding)
                    return passed
                passed += 1
        except Fault as fault:
            game.broken[number] = _violation(number, Finding(str(fault), trial.here))
            return passed
    return passed


def _violation(number: int, finding: Finding) -> Violation:
    name, meaning = RULES[number]
    message = f"Rule {number}, {name}: {finding.at}: {finding.text}.\n  In a training run: {finding.means or meaning}."
    return Violation(number, name, message, finding.at)


def _report(game: Game, checks: dict[int, int]) -> ConformanceReport:
    judged = [trial for trial in game.trials if trial.recorded()]
    if not judged and not game.broken:
        raise ValueError(f"nothing was judged, all was refused: {game.notes['refused'][0]}")
    missing = [text for trial in judged for text in trial.offers.missing()]
    if not game.seeds:
        missing.append("no keyword seed of the factory: rule 5 is not judged between seeds")
    for trial in judged:
        if trial.secondary:
            text = "indices outside exactly_once were taken for a second stream, which is cycled"
            game.note(text, listed(sorted(trial.secondary)))
        first = next(other for other in judged if other.shape is trial.shape)
        if trial is first and trial.unshuffled and len(trial.once) > 3:
            game.note("does not shuffle, so rules 5 and 6 asked for no other order", str(trial.at()))
    for number, needed in ((8, {7}), (9, {1, 4, 7})):
        broken = sorted(game.broken.keys() & needed)
        if broken and any(trial.offers.state for trial in judged):
            game.note(f"the resumes of rule {number} were not judged", f"they rest on {named_rules(broken)}")
    if game.repeats:
        game.note("repeats by design", "rules 1, 9 and 10 allowed it")
    if game.drops:
        game.note("drops by design", "rules 1 and 9 allowed it")
    notes = []
    for kind, details in game.notes.items():
        more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
        notes.append(f"{kind}: {details[0]}{more}")
    violations = tuple(game.broken[number] for number in sorted(game.broken))
    return ConformanceReport(violations, tuple(dict.fromkeys(missing)), tuple(notes), checks)
