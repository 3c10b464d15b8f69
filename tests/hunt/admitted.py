"""What no drawn run has: pieces that torch, Lightning or this library refuses together, or that no promise reaches."""

from dataclasses import replace

from tests.hunt.pieces import DrawnRun, Kill


def admitted(run: DrawnRun) -> DrawnRun:
    """The run, with a plainer piece in place of each that does not go with the others."""
    for plainer in (_pieces_of_one_kind, _own_code, _lives, _deaths, _batches_of_two, _validations):
        run = plainer(run)
    return run


def _pieces_of_one_kind(run: DrawnRun) -> DrawnRun:
    if not run.trainer and run.tail == "drop" and run.fewest_batches == 0:  # there a Trainer leaves out the epoch
        run = replace(run, tail="spread")
    if run.optimizer == "Adagrad" and run.schedule == "one cycle":  # which wants a momentum
        run = replace(run, optimizer="RMSprop")
    if run.unusable is not None:  # BatchNorm's statistics have seen the window up to there
        run = replace(run, batch_norm=False)
    if run.windows_by_epoch:
        run = replace(run, same_objects=False)
    if run.precision and run.average:
        run = replace(run, same_objects=False)  # an average that is made of a converted module is in its precision
        # And a validation rounds it: a resume's sanity check is one more, and so is one that comes again.
        run = replace(run, beside=tuple(dict.fromkeys((*run.beside, "no sanity check"))))
        for place in ("validation", "within validation", "epoch end"):
            run = replace(run, kills=tuple(_at(kill, place, "end") for kill in run.kills))
    return replace(run, groups=run.groups and run.optimizer != "LBFGS")


def _own_code(run: DrawnRun) -> DrawnRun:
    if "StepAudit" in run.callbacks or run.optimizer == "LBFGS":
        # One tells of a window that has changed nothing, and the other wants a loss.
        run = _without_code(run, "returns None")
    if run.clips_values:  # torch raises where no parameter has a gradient yet
        run = _without_code(run, "returns None")
    if run.goes_by_metrics:  # what a torchmetrics.Metric had gathered is in no checkpoint
        run = _without_code(run, "keeps a metric")
    of_exceptions = run.saves == "an exception" or "a checkpoint of an exception" in run.beside
    dies_ahead = of_exceptions and any(kill.place == "end" for kill in run.kills)
    if run.saves == "by hand" or dies_ahead:  # ahead of the module's own hook, which a resume warns of
        run = _without_code(run, "averages", "draws", "logs")
    return run


def _without_code(run: DrawnRun, *names: str) -> DrawnRun:
    return replace(run, own_code=tuple(name for name in run.own_code if name not in names))


def _lives(run: DrawnRun) -> DrawnRun:
    if not run.trainer:
        run = replace(run, kills=tuple(_at(kill, "SIGTERM", "start") for kill in run.kills))
    # A share of max_epochs is another one in a shorter run; and no later life is shorter than what has been done.
    may_be_short = run.trainer and not run.same_objects and run.average != "StochasticWeightAveraging"
    kept = 1 if may_be_short and run.max_epochs > 1 else 0
    longer = (_at(kill, "a shorter run", "epoch end") for kill in run.kills[kept:])
    return replace(run, kills=(*run.kills[:kept], *longer))


def _deaths(run: DrawnRun) -> DrawnRun:
    # In a checkpoint of an exception one rank waits for the others, and they for its gradients.
    if run.saves == "an exception" or "a checkpoint of an exception" in run.beside:
        run = replace(run, kills=tuple(kill if kill.hard else replace(kill, of_rank=None) for kill in run.kills))
        run = replace(run, batch_norm=run.batch_norm and max(run.ranks) == 1)  # else one may have a batch of one sample
    # A validation that dies, or that hears SIGTERM, leaves them in eval mode: ExactResume is not there.
    if run.by_hand and run.same_objects:
        for place in ("validation", "within validation", *(["SIGTERM"] if run.validates else [])):
            run = replace(run, kills=tuple(_at(kill, place, "end") for kill in run.kills))
    return run


def _at(kill: Kill, place: str, other: str) -> Kill:
    return replace(kill, place=other) if kill.place == place else kill


def _batches_of_two(run: DrawnRun) -> DrawnRun:
    """BatchNorm wants two samples in each batch."""
    if run.batch_norm:
        run = replace(run, batch_size=max(2, run.batch_size))
        run = replace(run, samples=run.samples + (run.smallest_batch == 1))
        run = replace(run, batch_norm=run.smallest_batch > 1)
    if run.batch_norm and run.strategy == "broadcast_buffers=False":  # each rank's buffers, which a resume warns of
        run = replace(run, strategy="")
    return run


def _validations(run: DrawnRun) -> DrawnRun:
    """A limit leaves a batch, and a validation within an epoch has as many as it waits for."""
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
