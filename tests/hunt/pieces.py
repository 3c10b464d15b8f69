"""What a drawn run is made of. Every value that a field may have stands here; the first one is the plainest."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from hypothesis import strategies as st

PLACES = (
    *("forward", "start", "before step", "within step", "after step", "end"),
    *("validation", "within validation", "epoch end", "train end", "loader", "a shorter run", "SIGTERM"),
)
"""Where in a micro-batch a life can end; ``loader``: while a sample is being read, perhaps ahead of the training;
``a shorter run``: by a ``max_epochs`` of 1, which the next life raises; ``SIGTERM``: where Lightning answers it."""
SAVES = ("every step", "every epoch", "every other step", "validation", "a time", "an exception", "by hand")
LOOP_SAVES = ("every step", "every other step", "validation", "every epoch")
AVERAGES = ("", "WeightAveraging", "EMAWeightAveraging", "EMAWeightAveraging of epochs", "StochasticWeightAveraging")
CALLBACKS = ("ExactResume", "ExactAccumulation", "SkipBadSteps", "StepAudit")
SCHEDULES = (
    *("cosine of steps", "one cycle", "warm-up, then cosine"),
    *("every other step", "step of epochs", "every other epoch", "plateau", "plateau of training"),
)
"""The first three are a loop's as well, and the last one is refused on several ranks."""
OWN_CODE = (
    *("moves a target", "counts", "draws", "warms up", "clips"),
    *("averages", "keeps a buffer", "logs", "keeps a metric", "returns None"),
)
"""What a module does by itself, beside its optimizer. On several ranks, the first five."""
BESIDE = ("a log", "a timer", "a checkpoint of an exception", "no sanity check", "no inference mode")
"""What a Trainer has, and what changes nothing."""
KINDS = ("a loop", "averages", "ranks", "a Trainer", "windows", "averages", "loaders", "optimizers")
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
    loader: str = "ResumableDataLoader"
    """Or ``MiniDataLoader``, or torch's ``DataLoader``, which is resumed at an epoch's end alone."""
    stream: bool = False
    """Whether its dataset has no length."""
    second_loader: str = ""
    """The mode of a CombinedLoader that reads another loader like the first one beside it."""
    reload_every: int = 0
    """Epochs after which a data module makes the loader again."""
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
    thaws: bool = False
    """Whether what is frozen is trained from epoch 1 on, and dropout is left out from there on."""
    noisy_forward: bool = False
    own_generator: str = ""
    """Of which kind the generator is that the module holds and draws from, in a validation too."""
    own_code: tuple[str, ...] = ()
    precision: str = ""
    optimizer: str = "SGD"
    groups: bool = False
    """Whether what is trained is in two groups, with rates of their own."""
    by_hand: bool = False
    """Whether the module steps two optimizers by itself."""
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
    more_epochs: int = 0
    """Of a second fit with the same Trainer."""
    saves: str = "every step"
    saves_the_best: bool = False
    """Whether another ModelCheckpoint keeps the two best by the loss, and the last one, in a folder of its own."""
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
    def all_epochs(self) -> int:
        adds_one = self.batch_norm and "StochasticWeightAveraging" in self.callbacks  # for BatchNorm's statistics
        return self.max_epochs + self.more_epochs + adds_one

    @property
    def weighs_samples(self) -> bool:
        return "ExactAccumulation" in self.callbacks


def pieces_of(run: DrawnRun) -> str:
    """How the run is written down, for a test of its own: the fields that are not the plainest."""
    said = [f"{f.name}={value!r}" for f in fields(run) if (value := getattr(run, f.name)) != f.default]
    return f"DrawnRun({', '.join(said)})"


def one_of(*values: object) -> st.SearchStrategy:
    return st.sampled_from(values)


@st.composite
def drawn_runs(draw: st.DrawFn, about: str, turn: int, device: str = "cpu") -> DrawnRun:
    """A run of what the README admits: of one kind, with more micro-batches and more lives from turn to turn."""
    rarely, often, mostly = one_of(False, False, False, True), st.booleans(), one_of(True, True, False)
    ranks: tuple[int, ...] = (1,)
    if about == "ranks":
        ranks = draw(one_of(*[(2,)] * 6, (2, 1), (2, 1), (1, 2), (3, 2), (3, 1), (2, 3)))
    several = max(ranks)
    trainer = about != "a loop" and (about != "ranks" or draw(one_of(True, True, False)))
    average = draw(one_of(*AVERAGES[1:], *AVERAGES[1:3])) if about == "averages" else ""
    callbacks = draw(st.permutations(_brought(draw) + ([average] if average else [])))
    if average and draw(mostly):
        callbacks = [average, *(name for name in callbacks if name != average)]  # it has saved ahead of the others
    if not trainer:
        callbacks = [name for name in callbacks if name in ("ExactAccumulation", "SkipBadSteps")]
    sized = trainer and about in ("a Trainer", "ranks") and draw(rarely)
    batch_norm = draw(one_of(True, True, True, False) if about == "averages" else often if several == 1 else rarely)
    batch_size = draw(st.integers(1 + batch_norm, 4))
    windows = about in ("windows", "averages", "a loop")
    # Micro-batches of an epoch; of the last one, any part. With windows, some more, so that several of these end.
    # A rank's place shows behind a save within an epoch.
    within = about == "ranks" and draw(mostly)
    steps = draw(st.integers(1 + within, min(8, 4 + 2 * windows + turn)))
    samples = (steps - 1) * batch_size * several + draw(st.integers(1, batch_size)) * several - draw(often)
    samples = max(several, samples)
    epochs = draw(st.integers(1, 3))
    # A ModelCheckpoint saves once a step: within a window, a reader's own hand saves most often, and an exception.
    inside = (*("by hand", "by hand", "an exception") * 2, "a time", "validation") if trainer else LOOP_SAVES
    saves = draw(one_of(*inside) if windows else one_of("every step", *inside) if within else one_of(*SAVES))
    accumulate_grad_batches = 1 if sized else draw(one_of(2, 3, 4) if windows else one_of(1, 1, 2, 3))
    max_steps = draw(one_of(-1, -1, -1, 1 + windows, 3 + windows)) if trainer else -1
    limit_train_batches = draw(one_of(None, None, None, None, 2 + 3 * windows, 3, 0.8)) if trainer else None
    kept = max(1, int(0.8 * steps)) if limit_train_batches == 0.8 else int(limit_train_batches or steps)
    micro_batches = epochs * min(steps, kept)
    if max_steps != -1:
        micro_batches = min(micro_batches, max_steps * accumulate_grad_batches)
    # The average of one step is the weights, and of two, another one.
    first = 1 + min(2 * accumulate_grad_batches if average and draw(mostly) else within, micro_batches - 1)
    anywhere = st.integers(first, max(first, min(micro_batches, 12)))
    # Nothing is saved for a process that dies at once, and what comes behind it is the run itself.
    dies_hard = rarely if saves == "an exception" else often
    precisions = [""] * 6 + ["64-true", "bf16-true"] + ["16-mixed"] * 4 * (device == "cuda")
    run = DrawnRun(
        samples=samples,
        device=device,
        trainer=trainer,
        batch_size=batch_size,
        shuffle=draw(one_of(True, True, False)),
        tail=draw(one_of("spread", "spread", "drop", "pad")),
        # Two streams need an index each.
        sampler="ShuffledBatchSampler" if sized else draw(one_of("", "", *SAMPLERS[samples < 3 :])),
        noise=draw(one_of((), ("torch",), ("numpy",), ("python",), ("torch", "numpy", "python"))),
        collate_draws=draw(rarely),
        asks_epoch=draw(rarely),
        sized=sized,
        workers=tuple(draw(st.lists(one_of(0, 0, 0, 0, 0, 1, 2), min_size=1, max_size=2))),
        persistent=draw(often),
        prefetch_factor=draw(one_of(2, 1, 4)),
        batch_norm=batch_norm,
        dropout=trainer and draw(often),
        frozen=draw(rarely),
        noisy_forward=trainer and draw(rarely),
        own_generator=draw(one_of("", "", "", "torch", "numpy", "python")) if trainer else "",
        goes_by_metrics=trainer and several == 1 and draw(rarely),
        own_code=tuple(draw(st.permutations(OWN_CODE[: None if several == 1 else 5]))[:2])
        if trainer and draw(rarely)
        else (),
        precision=draw(one_of(*precisions)) if trainer else "",
        optimizer=draw(one_of("SGD", "AdamW", "AdamW", "SGD", "fused AdamW", "RMSprop", "Adagrad")),
        groups=draw(rarely),
        schedule=draw(one_of("", *SCHEDULES[: None if several == 1 else -1] if trainer else SCHEDULES[:3])),
        callbacks=tuple(callbacks),
        beside=tuple(name for name in BESIDE if draw(rarely)) if trainer else (),
        bad_sample=draw(st.integers(0, samples - 1)) if "SkipBadSteps" in callbacks and draw(often) else None,
        accumulate_grad_batches=accumulate_grad_batches,
        windows_by_epoch=trainer and not sized and draw(rarely),
        max_epochs=epochs,
        max_steps=max_steps,
        limit_train_batches=limit_train_batches,
        val_check_interval=draw(one_of(None, None, None, 1, 2, 0.5)) if trainer else None,
        validates_every=draw(one_of(1, 1, 1, 2, None)) if trainer else 1,
        validates_epochs=trainer and draw(often),
        stops_early=draw(one_of(*[""] * 6, "val", "loss")) if trainer and several == 1 else "",
        clip=draw(rarely),
        clips_values=trainer and draw(rarely),
        ranks=ranks,
        strategy=draw(one_of("", *STRATEGIES)) if trainer and several > 1 else "",
        saves=saves,
        saves_the_best=trainer and draw(rarely),
        kills=tuple(
            draw(_kills(several, anywhere, accumulate_grad_batches if windows and draw(mostly) else 1, dies_hard))
            for _ in range(draw(st.integers(1, min(3, 2 + turn // 2))))
        ),
        same_objects=trainer and several == 1 and draw(rarely),
    )
    if about == "a loop" and "ExactAccumulation" in callbacks:
        run = replace(run, unusable=draw(one_of(None, 0, samples // 2)))
        if run.unusable is not None:
            run = replace(run, batch_norm=False)  # whose statistics have seen the window up to there
        if "SkipBadSteps" not in callbacks and draw(rarely):
            run = replace(run, optimizer="LBFGS", clip=False, schedule=run.schedule.replace("one cycle", ""))
    if about == "loaders":
        run = _with_another_loader(draw, run)
    elif about == "optimizers":
        run = _with_another_optimizer(draw, run)
    # A second fit is Lightning's to refuse where the first has left its marks: a limit that is reached, one epoch more
    # for the averages, a window's length that a scheduler has set.
    may_go_on = run.max_steps == -1 and not (run.windows_by_epoch or average or run.by_hand or run.stops_early)
    may_go_on &= "plateau" not in run.schedule  # whose last step is left out where a run was over
    if trainer and several == 1 and may_go_on and draw(rarely):
        run = replace(run, more_epochs=1)
    if trainer and several == 1 and not run.by_hand and draw(rarely):
        run = replace(run, frozen=True, thaws=True)
    if trainer and not (run.sized or run.stream) and draw(rarely):
        run = replace(run, second_loader=draw(one_of("max_size_cycle", "min_size")))
    if trainer and not (run.windows_by_epoch or run.stream) and draw(rarely):  # which Lightning cannot estimate
        run = replace(run, asks_length=True)
    if run.optimizer == "Adagrad" and run.schedule == "one cycle":  # which wants a momentum
        run = replace(run, optimizer="RMSprop")
    if "StepAudit" in run.callbacks:  # which tells of a window that has changed nothing
        run = _without_code(run, "returns None")
    if run.goes_by_metrics:  # what a torchmetrics.Metric had gathered is in no checkpoint
        run = _without_code(run, "keeps a metric")
    if run.precision and any("Averaging" in name for name in run.callbacks):
        run = replace(run, same_objects=False)  # an average that is made of a converted module is in its precision
        # And a validation rounds it: a resume's sanity check is one more.
        run = replace(run, beside=tuple(dict.fromkeys((*run.beside, "no sanity check"))))
    run = replace(run, groups=run.groups and run.optimizer != "LBFGS")
    run = replace(run, same_objects=False) if run.windows_by_epoch else run
    return _without_what_others_refuse(run)


def _without_what_others_refuse(run: DrawnRun) -> DrawnRun:
    """BatchNorm wants two samples in each batch, and a validation within an epoch so many batches in it."""
    # A share of max_epochs is another one in a shorter run; and no later life is shorter than what has been done.
    may_be_short = run.trainer and not run.same_objects and "StochasticWeightAveraging" not in run.callbacks
    kept = 1 if may_be_short and run.max_epochs > 1 else 0
    dies_ahead = run.saves == "an exception" and any(kill.place == "end" for kill in run.kills)
    if run.saves == "by hand" or dies_ahead:  # ahead of the module's own hook, which a resume warns of
        run = _without_code(run, "averages", "draws", "logs")
    if not run.trainer:
        run = replace(run, kills=tuple(_of_a_loop(kill) for kill in run.kills))
    run = replace(run, kills=run.kills[:kept] + tuple(_at_an_epochs_end(kill) for kill in run.kills[kept:]))
    if (
        run.saves == "an exception" or "a checkpoint of an exception" in run.beside
    ):  # in which one rank waits for the others, and they for its gradients
        run = replace(run, kills=tuple(kill if kill.hard else replace(kill, of_rank=None) for kill in run.kills))
        run = replace(run, batch_norm=run.batch_norm and max(run.ranks) == 1)  # else one may have a batch of one sample
    if run.by_hand and run.same_objects:  # which Lightning leaves in eval mode, and ExactResume cannot be there
        awake = (replace(kill, place="end") if "validation" in kill.place else kill for kill in run.kills)
        run = replace(run, kills=tuple(awake))
    if run.batch_norm:
        run = replace(run, batch_size=max(2, run.batch_size))
        run = replace(run, samples=run.samples + (run.smallest_batch == 1))
        run = replace(run, batch_norm=run.smallest_batch > 1)
    if run.batch_norm and run.strategy == "broadcast_buffers=False":  # each rank's buffers, which a resume warns of
        run = replace(run, strategy="")
    if isinstance(run.limit_train_batches, float) and run.fewest_batches == 0:
        run = replace(run, limit_train_batches=None)
    if isinstance(run.val_check_interval, float):  # a share of an epoch, and it must be a batch at least
        share = run.val_check_interval if run.val_check_interval * run.fewest_batches >= 1 else None
        run = replace(run, val_check_interval=share, validates_every=run.validates_every or 1)
    over_epochs = run.validates_every is None
    if (run.val_check_interval or 0) > run.fewest_batches and not over_epochs:
        run = replace(run, val_check_interval=None)
    # Lightning wants a number of batches where it counts on over epochs, and a metric whenever somebody asks for it.
    goes_by_metrics = run.schedule == "plateau" or run.stops_early == "val" or run.saves == "validation"
    if (over_epochs and run.val_check_interval is None) or (goes_by_metrics and run.validates_every != 1):
        run = replace(run, validates_every=1)
        run = replace(run, val_check_interval=None if over_epochs else run.val_check_interval)
    return run


def _brought(draw: st.DrawFn) -> list[str]:
    brought = ["ExactResume", *[name for name in CALLBACKS[1:] if draw(st.booleans())]]
    if len(brought) > 1 and draw(st.booleans()):
        del brought[0]  # the others bring it
    return ["ExactResume", "StepAudit"] if brought == ["StepAudit"] else brought  # which brings it without its seeds


def _without_code(run: DrawnRun, *names: str) -> DrawnRun:
    return replace(run, own_code=tuple(name for name in run.own_code if name not in names))


def _of_a_loop(kill: Kill) -> Kill:
    return replace(kill, place="start") if kill.place == "SIGTERM" else kill


def _at_an_epochs_end(kill: Kill) -> Kill:
    return replace(kill, place="epoch end") if kill.place == "a shorter run" else kill


@st.composite
def _kills(
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


def _with_another_loader(draw: st.DrawFn, run: DrawnRun) -> DrawnRun:
    loader = draw(one_of("ResumableDataLoader", "MiniDataLoader", "MiniDataLoader", "DataLoader"))
    run = replace(run, loader=loader, reload_every=draw(one_of(0, 0, 1, 2)), sized=False)
    if loader == "ResumableDataLoader":
        return run
    # Workers that are new after a resume draw anew here; and a loader that forgets is told of by a strict callback.
    quiet = dict(noise=(), collate_draws=False) if any(run.workers) else {}
    if draw(one_of(False, False, True)):
        quiet |= dict(stream=True, shuffle=False, noise=(), reload_every=0, limit_train_batches=None)
        quiet |= dict(val_check_interval=None if isinstance(run.val_check_interval, float) else run.val_check_interval)
    explicit = ("ExactResume", *(name for name in run.callbacks if name != "ExactResume"))
    tail = "spread" if "stream" in quiet else _plain(run.tail)
    return replace(run, **quiet, sampler="", asks_epoch=False, callbacks=explicit, workers=run.workers[:1], tail=tail)


def _plain(tail: str) -> str:
    return "drop" if tail == "drop" else "spread"


def _with_another_optimizer(draw: st.DrawFn, run: DrawnRun) -> DrawnRun:
    kind = draw(one_of("LBFGS", "by hand"))
    if kind == "LBFGS":
        return replace(run, optimizer="LBFGS", clip=False, schedule=run.schedule.replace("one cycle", "plateau"))
    # Nothing here goes on within an epoch of it.
    quiet = dict(
        dropout=False, noisy_forward=False, own_generator="", clip=False, schedule="", frozen=False, saves="every epoch"
    )
    quiet |= dict(goes_by_metrics=False, own_code=(), saves_the_best=False)  # ExactResume keeps them
    quiet |= dict(beside=tuple(name for name in run.beside if name != "a checkpoint of an exception"))
    quiet |= dict(stops_early="", max_steps=-1)  # with which Lightning counts the epoch that has ended once more
    audited = run.callbacks if draw(st.booleans()) else tuple(one for one in run.callbacks if one == "StepAudit")
    return replace(run, **quiet, by_hand=True, callbacks=audited, windows_by_epoch=False, accumulate_grad_batches=1)


STRATEGIES = ("gradient_as_bucket_view=True", "find_unused_parameters=True", "broadcast_buffers=False")
SAMPLERS = ("TwoStreamBatchSampler", "ShardedBatchSampler", "ShardedBatchSampler, split")
