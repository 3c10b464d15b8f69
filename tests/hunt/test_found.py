"""What the hunt has found: each was wrong once."""

from dataclasses import replace

import pytest

from tests.hunt.judging import judge
from tests.hunt.pieces import DrawnRun, Kill

FOUND = {
    # It was passed over, so that the best checkpoint was another epoch's.
    "a checkpoint of an epoch's last batch, and a kill in the validation behind it": DrawnRun(
        samples=8, batch_size=2, max_epochs=3, validates_epochs=True, kills=(Kill(5, "validation"),)
    ),
    "the same in the last epoch": DrawnRun(
        samples=8, batch_size=2, max_epochs=2, validates_epochs=True, kills=(Kill(5, "within validation"),)
    ),
    "the same, saved by the exception that ended the validation": DrawnRun(
        samples=1,
        batch_size=1,
        max_epochs=1,
        validates_epochs=True,
        saves="an exception",
        kills=(Kill(1, "validation"),),
    ),
    # The next epoch's number of batches was taken for this one's, and a batch of it was trained.
    "the same with sizes that follow a schedule, and a module that asks for its length": DrawnRun(
        samples=2, batch_size=1, sized=True, asks_length=True, stops_early="val", kills=(Kill(1, "validation"),)
    ),
    # By the next epoch's number of batches no validation was due there, and batches of the ended epoch were trained.
    "a checkpoint behind the last of an epoch's validations, and more batches in the next epoch": DrawnRun(
        samples=9, sized=True, val_check_interval=0.5, saves="validation", kills=(Kill(4, "forward"),)
    ),
    "the same with one rank more": DrawnRun(
        samples=28, val_check_interval=0.5, ranks=(1, 2), saves="validation", kills=(Kill(15, "forward"),)
    ),
    # It was refused: the schedule goes by that validation.
    "the same with a ReduceLROnPlateau and an epoch that is cut": DrawnRun(
        samples=5, batch_size=1, sized=True, schedule="plateau", limit_train_batches=2, kills=(Kill(1, "validation"),)
    ),
    "an epoch without a validation ahead of one with one": DrawnRun(
        samples=4, batch_size=1, max_epochs=2, validates_every=2, kills=(Kill(1, "epoch end"),)
    ),
    # The epochs behind the one that max_steps would have ended were not counted.
    "sizes that follow a schedule, a step that is skipped, and max_steps at an epoch's end": DrawnRun(
        samples=5,
        batch_size=1,
        sized=True,
        callbacks=("ExactResume", "ExactAccumulation", "SkipBadSteps", "StepAudit"),
        bad_sample=0,
        max_steps=3,
        kills=(Kill(1, "validation"),),
    ),
    # The steps of the next epochs were taken as done, so that a strict audit refused a right run.
    "an epoch that limit_train_batches ends, then one rank fewer": DrawnRun(
        samples=28,
        batch_size=4,
        callbacks=("ExactResume", "StepAudit"),
        limit_train_batches=2,
        ranks=(2, 1),
        saves="every epoch",
        kills=(Kill(3, "before step"),),
    ),
    # The window's length came back before the scheduler had looked at the Trainer's, and the resume was refused.
    "ExactResume ahead of a GradientAccumulationScheduler": DrawnRun(
        samples=15,
        accumulate_grad_batches=3,
        windows_by_epoch=True,
        kills=(Kill(5), Kill(2, "end")),
    ),
    # The state stood within an epoch that the Trainer had ended, and was loaded once more in the next one.
    "an epoch that limit_train_batches ends, killed in its validation": DrawnRun(
        samples=5, limit_train_batches=2, val_check_interval=2, kills=(Kill(1, "validation"),)
    ),
    "an epoch that limit_train_batches ends, killed at its end": DrawnRun(
        samples=5, limit_train_batches=2, kills=(Kill(2, "epoch end"),)
    ),
    # Lightning steps it neither in an epoch that it has resumed nor for one whose end it has saved.
    "ReduceLROnPlateau, resumed within an epoch": DrawnRun(
        samples=9, shuffle=False, schedule="plateau", kills=(Kill(2, "start"),)
    ),
    "ReduceLROnPlateau, resumed at an epoch's end": DrawnRun(
        samples=9, schedule="plateau", max_epochs=4, saves="every epoch", kills=(Kill(7, "start"),)
    ),
    # The audit asked the loader where the run was before ExactResume, behind it in the list, had put it there: a
    # whole epoch too many was planned, and a right run was refused at its end.
    "StepAudit ahead of ExactResume, sizes that follow a schedule, one rank fewer": DrawnRun(
        samples=15,
        batch_size=3,
        sized=True,
        callbacks=("StepAudit", "ExactResume"),
        limit_train_batches=2,
        ranks=(2, 1),
        saves="validation",
        kills=(Kill(3, "start", of_rank=0),),
    ),
    # Its step at the end of epoch 0 was in the checkpoint, which was set back to ahead of it, and was made again.
    "ReduceLROnPlateau, saved by an exception in an epoch's first window": DrawnRun(
        samples=2,
        batch_size=1,
        schedule="plateau",
        callbacks=("ExactAccumulation",),
        accumulate_grad_batches=2,
        max_epochs=2,
        saves="an exception",
        kills=(Kill(3, "forward"),),
    ),
    # Lightning passed the validation over, and there was no metric at the epoch's end.
    "ReduceLROnPlateau, saved ahead of a validation within the epoch": DrawnRun(
        samples=6,
        batch_norm=True,
        schedule="plateau",
        callbacks=("ExactResume", "WeightAveraging"),
        max_epochs=1,
        accumulate_grad_batches=2,
        val_check_interval=2,
        saves="by hand",
        kills=(Kill(1, "validation"),),
    ),
    # A run of one window: its checkpoint was taken for one of the next epoch, and the step was never made.
    "ReduceLROnPlateau, saved ahead of the validation of the run's first window": DrawnRun(
        samples=4,
        batch_norm=True,
        schedule="plateau",
        callbacks=("ExactAccumulation", "StepAudit", "WeightAveraging"),
        accumulate_grad_batches=2,
        max_epochs=1,
        saves="by hand",
        kills=(Kill(1, "validation"),),
    ),
    # A validation had put the average into the module, and the exception's checkpoint held each in the other's place.
    "WeightAveraging, saved by an exception within a validation": DrawnRun(
        samples=6,
        batch_norm=True,
        callbacks=("ExactResume", "WeightAveraging"),
        saves="an exception",
        val_check_interval=1,
        kills=(Kill(3, "within validation"),),
    ),
    # Lightning returned before training started, and the module was left without its average.
    "WeightAveraging, resumed behind the run's last step": DrawnRun(
        samples=6,
        batch_norm=True,
        callbacks=("ExactResume", "WeightAveraging"),
        accumulate_grad_batches=3,
        max_epochs=3,
        max_steps=3,
        saves="a time",
        kills=(Kill(7, "epoch end"),),
    ),
    # What was refused was saved once more, by the refusal's own exception, without the mark that it was refused for.
    "a refused checkpoint, beside a ModelCheckpoint that saves on exceptions": DrawnRun(
        samples=1, batch_size=1, schedule="plateau", max_epochs=1, saves="an exception", kills=(Kill(1, "end"),)
    ),
    # Lightning counted the epoch's start once too few, then once too often, and the third resume trained nothing.
    "saved at an epoch's start, and killed in its first micro-batch three times": DrawnRun(
        samples=1, batch_size=1, saves="by hand", kills=(Kill(2), Kill(1), Kill(1))
    ),
    # The audit asked for a plan that there is not, and so refused the run.
    # The skipped steps behind max_steps were not counted, so that a strict audit refused a right run.
    "StepAudit, more skipped steps than max_steps, one rank fewer": DrawnRun(
        samples=2,
        batch_size=4,
        sized=True,
        callbacks=("ExactAccumulation", "SkipBadSteps", "StepAudit"),
        bad_sample=0,
        max_epochs=3,
        max_steps=1,
        ranks=(2, 1),
        saves="by hand",
        kills=(Kill(3, "forward", of_rank=0),),
    ),
    # A skip of an audited attempt was taken for one before the audit as well.
    "StepAudit, a skip, and a step whose end was not audited": DrawnRun(
        samples=9,
        callbacks=("StepAudit", "ExactAccumulation", "SkipBadSteps"),
        bad_sample=0,
        accumulate_grad_batches=2,
        max_steps=2,
        limit_train_batches=3,
        saves="an exception",
        kills=(Kill(3, "end"), Kill(1, "forward"), Kill(1, "forward")),
    ),
    "StepAudit, sizes that follow a schedule, an epoch cut by limit_train_batches, one rank fewer": DrawnRun(
        samples=6,
        batch_size=1,
        sized=True,
        callbacks=("StepAudit",),
        max_epochs=1,
        limit_train_batches=3,
        ranks=(2, 1),
        saves="a time",
        kills=(Kill(2),),
    ),
    "a part that is trained, and dropout left out, from epoch 1 on": DrawnRun(
        samples=9, dropout=True, frozen=True, thaws=True, max_epochs=3, kills=(Kill(8), Kill(2))
    ),
    # So was an average that takes in an epoch's weights at its end.
    "averages of epochs, killed at the run's end": DrawnRun(
        samples=2,
        callbacks=("ExactResume", "EMAWeightAveraging of epochs"),
        max_epochs=1,
        saves="an exception",
        kills=(Kill(1, "epoch end"),),
    ),
    # A later life on the same ranks took the run for one that had begun on them.
    "StepAudit, sizes that follow a schedule, limit_train_batches, stopped once more on one rank fewer": DrawnRun(
        samples=17,
        batch_size=3,
        tail="drop",
        sized=True,
        callbacks=("ExactResume", "StepAudit"),
        max_epochs=3,
        limit_train_batches=3,
        ranks=(2, 1),
        saves="a time",
        kills=(Kill(4, "end"), Kill(4, "end")),
    ),
    # For that, Lightning makes the loaders ahead of their states, and loads none: the epoch's order began again.
    "a module that asks how long the run is": DrawnRun(
        samples=11, schedule="one cycle", asks_length=True, kills=(Kill(4), Kill(2))
    ),
    "the same on two ranks, with a worker": DrawnRun(
        samples=21, workers=(1,), accumulate_grad_batches=2, asks_length=True, ranks=(2,), kills=(Kill(5, "end"),)
    ),
    "the same with sizes that follow a schedule": DrawnRun(
        samples=15, batch_size=3, sized=True, asks_length=True, max_epochs=3, kills=(Kill(8), Kill(3))
    ),
    # What was left of the epoch was counted ahead of the loader's state, and so the steps that were due.
    "the same, audited, on one rank more": DrawnRun(
        samples=22, asks_length=True, callbacks=("StepAudit",), ranks=(1, 2), kills=(Kill(7),)
    ),
    "the same, audited, on one rank fewer": DrawnRun(
        samples=22, asks_length=True, callbacks=("StepAudit",), ranks=(2, 1), kills=(Kill(3),)
    ),
    # The validation of the epoch that had ended was made, and the next one came by that epoch's length.
    "an epoch that is longer than the one whose validation was put off": DrawnRun(
        samples=24,
        sized=True,
        limit_train_batches=0.8,
        validates_epochs=True,
        ranks=(2,),
        kills=(Kill(4, "before step"),),
    ),
    # What was logged last was gone, and of an epoch's last batch the mean that its end would have logged.
    "a module that goes by what was logged last": DrawnRun(
        samples=10,
        batch_size=1,
        goes_by_metrics=True,
        accumulate_grad_batches=4,
        kills=(Kill(8, "start"), Kill(1, "end")),
    ),
    "the same behind an epoch's last batch": DrawnRun(
        samples=5, batch_size=1, goes_by_metrics=True, accumulate_grad_batches=4, saves="a time", kills=(Kill(8),)
    ),
    "the same behind a validation within an epoch": DrawnRun(
        samples=9, goes_by_metrics=True, accumulate_grad_batches=2, val_check_interval=2, kills=(Kill(8, "end"),)
    ),
    # An epoch that was begun by a resume, and saved ahead of its first batch again, was taken for one that has ended.
    "an epoch's start, saved by hand, twice": DrawnRun(
        samples=1,
        callbacks=("ExactResume", "StepAudit"),
        validates_epochs=True,
        saves="by hand",
        kills=(Kill(2), Kill(1, "before step")),
    ),
    # It was saved as it was within the window.
    "a module's extra state, which counts micro-batches": DrawnRun(
        samples=5, own_code=("counts",), callbacks=("ExactAccumulation",), saves="an exception", kills=(Kill(6),)
    ),
    # The epoch's average was taken once more, as the checkpoint's counters were those of the window's end.
    "SIGTERM in the last step, an average of epochs, and a checkpoint of the exception": DrawnRun(
        samples=9,
        callbacks=("EMAWeightAveraging of epochs", "ExactResume"),
        beside=("a checkpoint of an exception",),
        accumulate_grad_batches=2,
        max_steps=2,
        saves="validation",
        kills=(Kill(4), Kill(2, "SIGTERM")),
    ),
    # Lightning raised, at the end of that epoch: of two ranks, the mean is not in the checkpoint.
    "two ranks, and a ModelCheckpoint that goes by the mean of an epoch whose last batch was saved": DrawnRun(
        samples=20,
        ranks=(2,),
        limit_train_batches=2,
        validates_epochs=True,
        saves_the_best=True,
        kills=(Kill(3, "end", hard=True),),
    ),
    # The audit took the batches of the epoch before, on two ranks, for those of the next ones.
    "StepAudit, a share of each epoch's batches, one rank fewer": DrawnRun(
        samples=32,
        callbacks=("ExactResume", "StepAudit"),
        max_epochs=3,
        limit_train_batches=0.8,
        ranks=(2, 1),
        saves="every other step",
        kills=(Kill(6, "end"),),
    ),
    # Its last epoch's end was left out, at which an average takes in the weights.
    "an average of epochs, max_steps, and a checkpoint of the last step": DrawnRun(
        samples=11,
        batch_size=3,
        callbacks=("EMAWeightAveraging of epochs", "ExactResume"),
        accumulate_grad_batches=2,
        max_steps=2,
        saves="by hand",
        kills=(Kill(4, "epoch end"),),
    ),
}


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("name", FOUND)
def test_it_is_right_now(name):
    run = FOUND[name]
    if run.trainer and "ExactResume" not in run.callbacks:
        run = replace(run, callbacks=("ExactResume", *run.callbacks))
    verdict = judge(run)
    assert verdict.outcome == "right", verdict.why
