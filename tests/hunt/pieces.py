"""What a drawn run is made of. Every value that a field may have stands here; the first one is the plainest."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

PLACES = ("forward", "start", "before step", "within step", "after step", "end", "validation", "epoch end", "loader")
"""Where in a micro-batch a life can end; ``loader``: while a sample is being read, perhaps ahead of the training."""
SAVES = ("every step", "every epoch", "every other step", "validation", "a time", "an exception", "by hand")
AVERAGES = ("", "WeightAveraging", "EMAWeightAveraging", "StochasticWeightAveraging")
CALLBACKS = ("ExactResume", "ExactAccumulation", "SkipBadSteps", "StepAudit")


@dataclass(frozen=True)
class Kill:
    """How one life ends: in its n-th micro-batch, counted from its start."""

    micro_batch: int
    place: str = "forward"
    hard: bool = False
    """By the process's end, and not by an exception that a Trainer hears of."""
    of_rank: int | None = None
    """The one rank that dies; ``None``: all of them."""


@dataclass(frozen=True)
class DrawnRun:
    """A whole run: its data, its loader, its network, what is beside it, and how it is stopped."""

    samples: int
    trainer: bool = True
    """A Lightning Trainer's run; else that of a loop with ``windows``, ``accumulate`` and ``StepGuard``."""
    batch_size: int = 2
    shuffle: bool = True
    tail: str = "spread"
    sampler: str = "ShuffledBatchSampler"
    noise: tuple[str, ...] = ()
    """Generators that a sample draws from: ``python``, ``numpy``, ``torch``."""
    collate_draws: bool = False
    asks_epoch: bool = False
    sized: bool = False
    """Whether a SizeScheduleDataModule deals batches that shrink."""
    workers: tuple[int, ...] = (0,)
    """Of each life; the last one's go on."""
    persistent: bool = False
    prefetch_factor: int = 2

    batch_norm: bool = False
    dropout: bool = False
    frozen: bool = False
    noisy_forward: bool = False
    optimizer: str = "SGD"
    schedule: str = ""
    callbacks: tuple[str, ...] = ("ExactResume",)
    """In this order, the averages among them."""
    bad_sample: int | None = None

    accumulate_grad_batches: int = 1
    windows_by_epoch: bool = False
    max_epochs: int = 2
    max_steps: int = -1
    limit_train_batches: int | None = None
    val_check_interval: int | None = None
    clip: bool = False

    ranks: tuple[int, ...] = (1,)
    """Of each life; the last one's go on."""
    more_epochs: int = 0
    """Of a second fit with the same Trainer."""
    saves: str = "every step"
    kills: tuple[Kill, ...] = field(default=())
    same_objects: bool = False
    """Whether a life after an exception goes on with the Trainer, module and loader that it had."""

    def ranks_of(self, life: int) -> int:
        return self.ranks[min(life, len(self.ranks) - 1)]

    def workers_of(self, life: int) -> int:
        return self.workers[min(life, len(self.workers) - 1)]

    @property
    def changes_ranks(self) -> bool:
        return len({self.ranks_of(life) for life in range(len(self.kills) + 1)}) > 1

    @property
    def validates(self) -> bool:
        return self.val_check_interval is not None or self.saves == "validation"

    @property
    def window_lengths(self) -> dict[int, int]:
        """The micro-batches of a window, from which epoch on."""
        return {0: self.accumulate_grad_batches} | ({1: 3} if self.windows_by_epoch else {})

    @property
    def all_epochs(self) -> int:
        return self.max_epochs + self.more_epochs

    @property
    def weighs_samples(self) -> bool:
        return "ExactAccumulation" in self.callbacks


def one_of(*values: object) -> st.SearchStrategy:
    return st.sampled_from(values)


@st.composite
def drawn_runs(draw: st.DrawFn) -> DrawnRun:
    """A run of what the README admits."""
    rarely = one_of(False, False, False, True)
    often = st.booleans()
    ranks = draw(one_of((1,), (1,), (1,), (1,), (2,), (2, 1), (2, 1), (1, 2), (3, 2), (3, 1), (2, 3)))
    several = max(ranks)
    noise = draw(one_of((), ("torch",), ("numpy",), ("python",), ("torch", "numpy", "python")))
    brought = ["ExactResume", *[name for name in CALLBACKS[1:] if draw(often)]]
    if len(brought) > 1 and draw(often):
        del brought[0]  # the others bring it
    if brought == ["StepAudit"]:
        brought = ["ExactResume", "StepAudit"]  # which brings it without its seeds
    average = draw(one_of("", "", "", *AVERAGES)) if several == 1 else ""
    callbacks = draw(st.permutations(brought + ([average] if average else [])))
    trainer = draw(one_of(True, True, True, False))
    if not trainer:
        callbacks = [name for name in callbacks if name in ("ExactAccumulation", "SkipBadSteps")]
    epochs = draw(st.integers(1, 3))
    kills = draw(st.integers(1, 3)) if several == 1 else draw(st.integers(1, 2))
    sized = trainer and draw(rarely) and average != "StochasticWeightAveraging"
    batch_size = draw(st.integers(1, 4))
    samples = draw(st.integers(1, 24)) + (several * 2 if several > 1 else 0)
    batches = max(1, samples // batch_size // several)
    workers = tuple(draw(st.lists(one_of(0, 0, 1, 2), min_size=1, max_size=2)))
    places = PLACES if several == 1 else ("forward", "start", "end", "before step")
    run = DrawnRun(
        samples=samples,
        trainer=trainer,
        batch_size=batch_size,
        shuffle=draw(one_of(True, True, False)),
        tail=draw(one_of("spread", "spread", "drop", "pad")),
        # Two streams need an index each.
        sampler="ShuffledBatchSampler" if sized else draw(one_of("", "", *SAMPLERS[samples < 3 :])),
        noise=noise,
        collate_draws=draw(rarely),
        asks_epoch=draw(rarely),
        sized=sized,
        workers=workers,
        persistent=draw(often),
        prefetch_factor=draw(one_of(2, 1, 4)),
        batch_norm=several == 1 and draw(often),
        dropout=trainer and draw(often),
        frozen=draw(rarely),
        noisy_forward=trainer and draw(rarely),
        optimizer=draw(one_of("SGD", "AdamW")),
        schedule=draw(one_of("", "cosine of steps", "one cycle", *["step of epochs"] * trainer)),
        callbacks=tuple(callbacks),
        bad_sample=draw(st.integers(0, samples - 1)) if "SkipBadSteps" in callbacks and draw(often) else None,
        accumulate_grad_batches=1 if sized else draw(one_of(1, 2, 3, 4)),
        windows_by_epoch=trainer and not sized and draw(rarely),
        max_epochs=epochs,
        max_steps=draw(one_of(-1, -1, -1, 1, 3)) if trainer else -1,
        limit_train_batches=draw(one_of(None, None, None, 2, 3)) if trainer else None,
        val_check_interval=draw(one_of(None, None, 1, 2)) if trainer and batches > 1 else None,
        clip=draw(rarely),
        ranks=ranks,
        saves=draw(one_of(*SAVES)),
        kills=tuple(
            Kill(
                micro_batch=draw(st.integers(1, max(1, min(batches * epochs, 12)))),
                place=draw(one_of(*places)),
                hard=draw(often),
                of_rank=draw(one_of(None, 0)) if several > 1 else None,
            )
            for _ in range(kills)
        ),
        more_epochs=0,
        same_objects=trainer and several == 1 and draw(rarely),
    )
    # A second fit is Lightning's to refuse where the first has left its marks: a limit that is reached, one epoch more
    # for the averages, a window's length that a scheduler has set.
    may_go_on = run.max_steps == -1 and not run.windows_by_epoch and not average
    if trainer and several == 1 and may_go_on and draw(rarely):
        run = replace(run, more_epochs=1)
    return replace(run, same_objects=False) if run.windows_by_epoch else run


SAMPLERS = ("TwoStreamBatchSampler", "ShardedBatchSampler", "ShardedBatchSampler, split")
