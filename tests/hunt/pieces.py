"""What a drawn run is made of. Every value that a field may have stands here; the first one is the plainest.

The axes are those of the promise, and no others. A Trainer's run: one rank, two, and others within an epoch; windows,
also by epoch; clipping; bf16-mixed; BatchNorm and dropout; an EMA and WeightAveraging; an EarlyStopping; a
ModelCheckpoint of the best, and of the last; torch's schedules by step and by epoch; SkipBadSteps, ExactAccumulation,
StepAudit, SizeScheduleDataModule; a ResumableDataLoader with workers that augment; a module that keeps buffers, extra
state, frozen parts, or draws. And a loop with ``windows``, ``accumulate`` and ``StepGuard``. It is stopped one to five
times: inside a window, in a validation, by an exception, a kill, SIGTERM, or told to stop as by ``max_time``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

PLACES = (
    *("forward", "start", "before step", "within step", "after step", "end"),
    *("validation", "within validation", "epoch end", "train end", "loader"),
    *("a shorter run", "SIGTERM", "told to stop"),
)
"""Where in a micro-batch a life can end; ``loader``: while a sample is being read, perhaps ahead of the training;
``a shorter run``: by a ``max_epochs`` of 1, which the next life raises; ``SIGTERM``: where Lightning answers it;
``told to stop``: as by ``max_time``, which the next life has more of."""
SAVES = ("every step", "every epoch", "every other step", "validation", "a time", "an exception", "by hand")
LOOP_SAVES = ("every step", "every other step", "validation", "every epoch")
AVERAGES = ("", "WeightAveraging", "EMAWeightAveraging", "EMAWeightAveraging of epochs")
CALLBACKS = ("ExactResume", "ExactAccumulation", "SkipBadSteps", "StepAudit")
SCHEDULES = (
    *("cosine of steps", "one cycle", "warm-up, then cosine"),
    *("every other step", "step of epochs", "every other epoch", "plateau"),
)
"""The first three are a loop's as well."""
OWN_CODE = ("counts", "draws", "warms up", "clips", "averages")
"""What a module does by itself, beside its optimizer. On several ranks, the first four."""
BESIDE = (
    *("a log", "a timer", "a checkpoint of an exception", "no sanity check", "no inference mode"),
    "a callback that draws",
)
"""What a Trainer has, and what changes nothing."""
STRATEGIES = ("gradient_as_bucket_view=True", "find_unused_parameters=True")
SAMPLERS = ("TwoStreamBatchSampler", "ShardedBatchSampler")
KINDS = ("a loop", "averages", "ranks", "a Trainer", "windows", "averages")
"""What a run is about, and so where faults are looked for, in turn.

Averages come twice: what goes wrong with them shows where much comes together, their order, a kill within a window that
is not the first, and BatchNorm."""


@dataclass(frozen=True)
class Kill:
    """How one life ends: in its n-th micro-batch, counted from its start."""

    micro_batch: int
    place: str = "forward"
    hard: bool = False
    """By the process's end, and not by an exception that a Trainer hears of."""
    of_rank: int | None = None
    """The one rank that dies; ``None``: all of them."""

    @property
    def arguments(self) -> tuple[int, str, bool, int | None]:
        return self.micro_batch, self.place, self.hard, self.of_rank


@dataclass(frozen=True)
class DrawnRun:
    """A whole run: its data, its loader, its network, what is beside it, and how it is stopped."""

    samples: int
    device: str = "cpu"
    """Or ``"cuda"``, of one process alone."""
    trainer: bool = True
    """A Lightning Trainer's run; else that of a loop with ``windows``, ``accumulate`` and ``StepGuard``."""
    batch_size: int = 2
    shuffle: bool = True
    tail: str = "spread"
    sampler: str = "ShuffledBatchSampler"
    noise: tuple[str, ...] = ()
    """Generators that a sample draws from: ``python``, ``numpy`` and ``torch``."""
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
    thaws: bool = False
    """Whether what is frozen is trained from epoch 1 on, and dropout is left out from there on."""
    noisy_forward: bool = False
    own_code: tuple[str, ...] = ()
    precision: str = ""
    optimizer: str = "SGD"
    groups: bool = False
    """Whether what is trained is in two groups, with rates of their own."""
    schedule: str = ""
    goes_by_metrics: bool = False
    """Whether the forward takes in what was logged last."""
    asks_length: bool = False
    """Whether the module asks for ``estimated_stepping_batches`` where it makes its optimizers."""
    callbacks: tuple[str, ...] = ("ExactResume",)
    """In this order, the averages among them."""
    beside: tuple[str, ...] = ()
    bad_sample: int | None = None
    unusable: int | None = None
    """A sample at which a loop's loss raises an exception; the loop goes on with the next window."""

    accumulate_grad_batches: int = 1
    windows_by_epoch: bool = False
    max_epochs: int = 2
    max_steps: int = -1
    limit_train_batches: int | float | None = None
    val_check_interval: int | float | None = None
    validates_every: int | None = 1
    """Epochs from a validation to the next; ``None``: ``val_check_interval`` counts on over the epochs' ends."""
    validates_epochs: bool = False
    """Whether there is a validation also where nothing goes by it."""
    stops_early: str = ""
    """The metric that an EarlyStopping goes by."""
    clip: bool = False
    clips_values: bool = False

    ranks: tuple[int, ...] = (1,)
    """Of each life; the last one's go on."""
    strategy: str = ""
    """The argument of a DDPStrategy."""
    saves: str = "every step"
    saves_the_best: bool = False
    """Whether another ModelCheckpoint keeps the two best by the loss, and the last one, in a folder of its own."""
    kills: tuple[Kill, ...] = field(default=())

    def ranks_of(self, life: int) -> int:
        return self.ranks[min(life, len(self.ranks) - 1)]

    def workers_of(self, life: int) -> int:
        return self.workers[min(life, len(self.workers) - 1)]

    @property
    def changes_ranks(self) -> bool:
        return len({self.ranks_of(life) for life in range(len(self.kills) + 1)}) > 1

    @property
    def average(self) -> str:
        """The callback that averages the weights, if there is one."""
        return next((name for name in self.callbacks if name in AVERAGES[1:]), "")

    @property
    def validates(self) -> bool:
        goes_by_it = self.schedule == "plateau" or self.stops_early == "val"
        return self.validates_epochs or self.val_check_interval is not None or self.saves == "validation" or goes_by_it

    @property
    def streams(self) -> int:
        return 2 if self.sampler == "TwoStreamBatchSampler" else 1

    @property
    def primary(self) -> int:
        """Indices below this one come once an epoch."""
        return self.samples - self.samples // 3 * (self.streams - 1)

    @property
    def smallest_batch(self) -> int:
        """Of one rank alone, over all epochs."""
        sizes = {self.batch_size, self.batch_size + self.sized}
        if self.tail != "drop" or self.sampler.startswith("Sharded"):  # which deals the batches of another sampler
            sizes |= {self.primary % size or size for size in sizes}
        return min(sizes) + self.streams - 1

    @property
    def fewest_batches(self) -> int:
        """Of an epoch, on the most ranks."""
        whole = self.primary // ((self.batch_size + self.sized) * max(self.ranks))
        return min(whole, self.limit_of(whole))

    def limit_of(self, batches: int) -> int:
        """How many batches of an epoch ``limit_train_batches`` leaves."""
        limit = self.limit_train_batches
        return batches if limit is None else int(limit * batches) if isinstance(limit, float) else limit

    @property
    def window_lengths(self) -> dict[int, int]:
        """The micro-batches of a window, from which epoch on."""
        return {0: self.accumulate_grad_batches} | ({1: 3} if self.windows_by_epoch else {})

    @property
    def weighs_samples(self) -> bool:
        return "ExactAccumulation" in self.callbacks


def pieces_of(run: DrawnRun) -> str:
    """How the run is written down, for a test of its own: the fields that are not the plainest."""
    said = [f"{f.name}={value!r}" for f in fields(run) if (value := getattr(run, f.name)) != f.default]
    return f"DrawnRun({', '.join(said)})"
