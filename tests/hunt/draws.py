"""Draws a whole run of what the README admits: each function takes the run so far, and draws fields of its own."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import strategies as st

from tests.hunt.admitted import admitted
from tests.hunt.pieces import (
    AVERAGES,
    BESIDE,
    CALLBACKS,
    LOOP_SAVES,
    OWN_CODE,
    PLACES,
    SAMPLERS,
    SAVES,
    SCHEDULES,
    STRATEGIES,
    DrawnRun,
    Kill,
)


def one_of(*values: object) -> st.SearchStrategy:
    return st.sampled_from(values)


RARELY, OFTEN, MOSTLY = one_of(False, False, False, True), st.booleans(), one_of(True, True, False)


@st.composite
def drawn_runs(draw: st.DrawFn, about: str, turn: int, device: str = "cpu") -> DrawnRun:
    """A run about one kind of piece, with more micro-batches and more lives from turn to turn."""
    run = _with_callbacks(draw, about, device)
    run = _of_a_length(draw, run, about, turn)
    for with_its_pieces in (_with_data, _with_a_network, _with_an_optimizer, _with_flags, _with_own_code):
        run = with_its_pieces(draw, run)
    run = _with_kills(draw, run, about, turn)
    if about == "a loop":
        run = _of_a_loop(draw, run)
    return admitted(_that_thaws_and_asks(draw, run))


def _with_callbacks(draw: st.DrawFn, about: str, device: str) -> DrawnRun:
    ranks: tuple[int, ...] = (1,)
    if about == "ranks":
        ranks = draw(one_of(*[(2,)] * 4, *[(2, 1)] * 3, (1, 2), (3, 2), (3, 1), (2, 3)))
    trainer = about != "a loop" and (about != "ranks" or draw(MOSTLY))
    average = draw(one_of(*AVERAGES[1:], *AVERAGES[1:3])) if about == "averages" else ""
    beside_it = [name for name in CALLBACKS[1:] if draw(OFTEN)]
    callbacks = draw(st.permutations(["ExactResume", *beside_it, *([average] if average else [])]))
    if average and draw(MOSTLY):
        callbacks = [average, *(name for name in callbacks if name != average)]  # it has saved ahead of the others
    if not trainer:
        callbacks = [name for name in callbacks if name in ("ExactAccumulation", "SkipBadSteps")]
    beside = tuple(name for name in BESIDE if draw(RARELY)) if trainer else ()
    return DrawnRun(1, device=device, trainer=trainer, ranks=ranks, callbacks=tuple(callbacks), beside=beside)


def _of_a_length(draw: st.DrawFn, run: DrawnRun, about: str, turn: int) -> DrawnRun:
    """Samples, batches, windows and epochs: with windows some more, so that several of these end."""
    several = max(run.ranks)
    batch_norm = draw(one_of(True, True, True, False) if run.average else OFTEN if several == 1 else RARELY)
    batch_size = draw(st.integers(1 + batch_norm, 4))
    sized = run.trainer and about in ("a Trainer", "ranks") and draw(RARELY)
    windows, changes_ranks = about in ABOUT_WINDOWS, len(set(run.ranks)) > 1
    # A rank's place shows behind a save within an epoch.
    steps = draw(st.integers(1 + (about == "ranks" and draw(MOSTLY)), min(8, 4 + 2 * windows + turn)))
    samples = (steps - 1) * batch_size * several + draw(st.integers(1, batch_size)) * several - draw(OFTEN)
    return replace(
        run,
        samples=max(several, samples),
        batch_norm=batch_norm,
        batch_size=batch_size,
        sized=sized,
        accumulate_grad_batches=1 if sized else draw(one_of(2, 3, 4) if windows else one_of(1, 1, 2, 3)),
        windows_by_epoch=run.trainer and not sized and draw(RARELY),
        # On other ranks the rest of an epoch has another length, and the epochs behind it have a third.
        max_epochs=draw(st.integers(1 + changes_ranks, 3)),
        max_steps=draw(one_of(-1, -1, -1, 1 + windows, 3 + windows)) if run.trainer and not changes_ranks else -1,
        limit_train_batches=draw(one_of(*[None] * 4, 2 + 3 * windows, 3, 0.8)) if run.trainer else None,
    )


def _with_data(draw: st.DrawFn, run: DrawnRun) -> DrawnRun:
    # Two streams need an index each.
    sampler = "ShuffledBatchSampler" if run.sized else draw(one_of("", "", *SAMPLERS[run.samples < 3 :]))
    return replace(
        run,
        shuffle=draw(MOSTLY),
        tail=draw(one_of("spread", "spread", "drop", "pad")),
        sampler=sampler,
        noise=draw(one_of((), ("torch",), ("numpy",), ("python",), ("torch", "numpy", "python"))),
        collate_draws=draw(RARELY),
        asks_epoch=draw(RARELY),
        workers=tuple(draw(st.lists(one_of(0, 0, 0, 0, 0, 1, 2), min_size=1, max_size=2))),
        persistent=draw(OFTEN),
        prefetch_factor=draw(one_of(2, 1, 4)),
        bad_sample=draw(st.integers(0, run.samples - 1)) if "SkipBadSteps" in run.callbacks and draw(OFTEN) else None,
    )


def _with_a_network(draw: st.DrawFn, run: DrawnRun) -> DrawnRun:
    precisions = [""] * 6 + ["bf16-mixed"] * 2 + ["16-mixed"] * 4 * (run.device == "cuda")
    return replace(
        run,
        dropout=run.trainer and draw(OFTEN),
        frozen=draw(RARELY),
        noisy_forward=run.trainer and draw(RARELY),
        precision=draw(one_of(*precisions)) if run.trainer else "",
    )


def _with_an_optimizer(draw: st.DrawFn, run: DrawnRun) -> DrawnRun:
    schedules = SCHEDULES if run.trainer else SCHEDULES[:3]
    return replace(
        run,
        optimizer=draw(one_of("SGD", "AdamW", "AdamW", "SGD", "fused AdamW", "RMSprop", "Adagrad")),
        groups=draw(RARELY),
        schedule=draw(one_of("", *schedules)),
        clip=draw(RARELY),
        clips_values=run.trainer and draw(RARELY),
    )


def _with_flags(draw: st.DrawFn, run: DrawnRun) -> DrawnRun:
    if not run.trainer:
        return replace(run, saves=draw(one_of(*LOOP_SAVES)))
    alone = max(run.ranks) == 1
    return replace(
        run,
        saves=draw(one_of(*SAVES)),
        saves_the_best=draw(RARELY),
        val_check_interval=draw(one_of(None, None, None, 1, 2, 0.5)),
        validates_every=draw(one_of(1, 1, 1, 2, None)),
        validates_epochs=draw(OFTEN),
        stops_early=draw(one_of(*[""] * 6, "val", "val")) if alone else "",
        strategy="" if alone else draw(one_of("", *STRATEGIES)),
    )


def _with_own_code(draw: st.DrawFn, run: DrawnRun) -> DrawnRun:
    if not run.trainer:
        return run
    alone = max(run.ranks) == 1
    return replace(
        run,
        goes_by_metrics=alone and draw(RARELY),
        own_code=tuple(draw(st.permutations(OWN_CODE[: None if alone else 4]))[:2]) if draw(RARELY) else (),
    )


def _with_kills(draw: st.DrawFn, run: DrawnRun, about: str, turn: int) -> DrawnRun:
    """Within the run, and where a fault of its kind would show."""
    epoch = math.ceil(run.samples / (run.batch_size * max(run.ranks)))
    micro_batches = run.max_epochs * min(epoch, max(1, run.limit_of(epoch)))
    if run.max_steps != -1:
        micro_batches = min(micro_batches, run.max_steps * run.accumulate_grad_batches)
    within = about == "ranks" and epoch > 1 and draw(MOSTLY)
    if within and len(set(run.ranks)) > 1:
        micro_batches = epoch - 1
    # A ModelCheckpoint saves once a step: within a window, a reader's own hand saves most often, and an exception.
    inside = (*("by hand", "by hand", "an exception") * 2, "a time", "validation") if run.trainer else LOOP_SAVES
    if about in ABOUT_WINDOWS or within:
        run = replace(run, saves=draw(one_of("every step", *inside) if within else one_of(*inside)))
    # The average of one step is the weights, and of two, another one.
    first = 1 + min(2 * run.accumulate_grad_batches if run.average and draw(MOSTLY) else within, micro_batches - 1)
    anywhere = st.integers(first, max(first, min(micro_batches, 12)))
    window = run.accumulate_grad_batches if about in ABOUT_WINDOWS and draw(MOSTLY) else 1
    # Nothing is saved for a process that dies at once, and what comes behind it is the run itself.
    dies_hard = RARELY if run.saves == "an exception" else OFTEN
    lives = draw(st.integers(1, min(5, 2 + turn // 2)))
    return replace(run, kills=tuple(_a_kill(draw, max(run.ranks), anywhere, window, dies_hard) for _ in range(lives)))


def _a_kill(
    draw: st.DrawFn, ranks: int, micro_batches: st.SearchStrategy, window: int, dies_hard: st.SearchStrategy
) -> Kill:
    """Anywhere; or behind the first micro-batch of a window of several, ahead of its step."""
    micro_batch = draw(micro_batches)
    if window > 1:
        places: tuple[str, ...] = ("forward", "start", "end")
        micro_batch = (micro_batch - 1) // window * window + draw(st.integers(2, window))
    else:
        places = PLACES if ranks == 1 else ("forward", "start", "end", "before step")
    return Kill(
        micro_batch=micro_batch,
        place=draw(one_of(*places)),
        hard=draw(dies_hard),
        of_rank=draw(one_of(None, None, 0, 1)) if ranks > 1 else None,
    )


def _of_a_loop(draw: st.DrawFn, run: DrawnRun) -> DrawnRun:
    if "ExactAccumulation" not in run.callbacks:
        return run
    run = replace(run, unusable=draw(one_of(None, 0, run.samples // 2)))
    return run


def _that_thaws_and_asks(draw: st.DrawFn, run: DrawnRun) -> DrawnRun:
    """A second set of parameters; and a question that Lightning reads the loader for."""
    if not run.trainer:
        return run
    if max(run.ranks) == 1 and draw(RARELY):
        run = replace(run, frozen=True, thaws=True)
    if not run.windows_by_epoch and draw(RARELY):  # which Lightning cannot estimate
        run = replace(run, asks_length=True)
    return run


ABOUT_WINDOWS = ("windows", "averages", "a loop")
