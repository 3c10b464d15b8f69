"""What no drawn run has: pieces that torch, Lightning or this library refuses together, or that no promise reaches."""

from dataclasses import replace

from tests.hunt.pieces import DrawnRun, Kill


def admitted(run: DrawnRun) -> DrawnRun:
    """The run, with a plainer piece in place of each that does not go with the others."""
    for plainer in (_pieces_of_one_kind, _lives, _deaths, _batches_of_two, _validations):
        run = plainer(run)
    return run


def _pieces_of_one_kind(run: DrawnRun) -> DrawnRun:
    if not run.trainer and run.tail == "drop" and run.fewest_batches == 0:  # there a Trainer leaves out the epoch
        run = replace(run, tail="spread")
    if run.optimizer == "Adagrad" and run.schedule == "one cycle":  # which wants a momentum
        run = replace(run, optimizer="RMSprop")
    if run.unusable is not None:  # BatchNorm's statistics have seen the window up to there
        run = replace(run, batch_norm=False)
    return run


def _lives(run: DrawnRun) -> DrawnRun:
    if not run.trainer:
        for place in ("SIGTERM", "told to stop"):
            run = replace(run, kills=tuple(_at(kill, place, "start") for kill in run.kills))
    if run.stops_early:  # the reason that a run was stopped is one of both
        run = replace(run, kills=tuple(_at(kill, "told to stop", "start") for kill in run.kills))
    # No later life is shorter than what has been done.
    kept = 1 if run.trainer and run.max_epochs > 1 else 0
    longer = (_at(kill, "a shorter run", "epoch end") for kill in run.kills[kept:])
    return replace(run, kills=(*run.kills[:kept], *longer))


def _deaths(run: DrawnRun) -> DrawnRun:
    # In a checkpoint of an exception one rank waits for the others, and they for its gradients.
    if run.saves == "an exception" or "a checkpoint of an exception" in run.beside:
        run = replace(run, kills=tuple(kill if kill.hard else replace(kill, of_rank=None) for kill in run.kills))
        run = replace(run, batch_norm=run.batch_norm and max(run.ranks) == 1)  # else one may have a batch of one sample
    return run


def _at(kill: Kill, place: str, other: str) -> Kill:
    return replace(kill, place=other) if kill.place == place else kill


def _batches_of_two(run: DrawnRun) -> DrawnRun:
    """BatchNorm wants two samples in each batch."""
    if run.batch_norm:
        run = replace(run, batch_size=max(2, run.batch_size))
        run = replace(run, samples=run.samples + (run.smallest_batch == 1))
        run = replace(run, batch_norm=run.smallest_batch > 1)
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
