"""What the hunt has found in runs that go on with the objects of a fit that an exception ended: each was wrong once."""

from tests.hunt.pieces import DrawnRun, Kill

WITH_THE_SAME_OBJECTS = {
    # Lightning left the module in eval mode.
    "an exception within a validation, and on with the same objects": DrawnRun(
        samples=6,
        batch_norm=True,
        max_epochs=1,
        val_check_interval=1,
        kills=(Kill(1, "within validation"), Kill(1)),
        same_objects=True,
    ),
    # It added its epoch to max_epochs at each fit. Now the second fit is refused, and a new process goes on.
    "StochasticWeightAveraging, stopped by two exceptions": DrawnRun(
        samples=2,
        batch_norm=True,
        callbacks=("ExactResume", "StochasticWeightAveraging"),
        accumulate_grad_batches=2,
        max_epochs=1,
        saves="by hand",
        kills=(Kill(1), Kill(1)),
        same_objects=True,
    ),
    # A Trainer that had validated took the next epoch for one that was over, and trained nothing of it.
    "an exception in an epoch behind a validation, and on with the same objects": DrawnRun(
        samples=20,
        batch_size=4,
        sampler="TwoStreamBatchSampler",
        accumulate_grad_batches=4,
        val_check_interval=2,
        saves="validation",
        kills=(Kill(8), Kill(2)),
        same_objects=True,
    ),
    # The hunt's own fault: with the same objects, a second resume that is refused was an error.
    "ReduceLROnPlateau, stopped by two exceptions, the second ahead of its metric": DrawnRun(
        samples=1,
        batch_size=1,
        schedule="plateau",
        max_epochs=1,
        saves="by hand",
        kills=(Kill(1), Kill(1, "validation")),
        same_objects=True,
    ),
    # What the fit had gathered that an exception ended was taken for the epoch's first metric behind the resume.
    "ReduceLROnPlateau of a training metric, resumed twice with the same objects ahead of a validation": DrawnRun(
        samples=6,
        sampler="",
        schedule="plateau of training",
        callbacks=("SkipBadSteps",),
        bad_sample=3,
        max_epochs=3,
        val_check_interval=1,
        kills=(Kill(9), Kill(1)),
        same_objects=True,
    ),
    # The epoch that the first fit had told its loader was taken for one that was told behind the loaded state.
    "a second fit with the same objects, behind one that an exception had ended": DrawnRun(
        samples=2,
        sampler="",
        callbacks=("ExactResume",),
        more_epochs=1,
        saves="an exception",
        kills=(Kill(1, "end"), Kill(3)),
        same_objects=True,
    ),
    # The step that the first fit had saved in a checkpoint of its own was taken for saved: it was no best.
    "the same objects behind a fit that ended in its last hook, and the best of a validation": DrawnRun(
        samples=1,
        batch_size=1,
        sampler="",
        callbacks=("ExactAccumulation",),
        max_epochs=1,
        validates_epochs=True,
        kills=(Kill(1, "train end"), Kill(1, "forward")),
        same_objects=True,
    ),
    # Its skip was counted on in the next fit, whose checkpoint is older, so that a strict audit refused a right run.
    "a skip, an exception, and a checkpoint ahead of the first batch": DrawnRun(
        samples=1,
        batch_size=1,
        callbacks=("ExactResume", "SkipBadSteps", "StepAudit"),
        bad_sample=0,
        max_epochs=1,
        stops_early="val",
        saves="by hand",
        kills=(Kill(1, "forward"), Kill(1, "after step")),
        same_objects=True,
    ),
    # What had not moved by the checkpoint stood as the ended fit had left it.
    "attributes that move behind the checkpoint": DrawnRun(
        samples=2,
        sampler="",
        batch_norm=True,
        own_code=("moves a target", "keeps plain attributes"),
        callbacks=("WeightAveraging", "ExactResume"),
        accumulate_grad_batches=2,
        max_epochs=1,
        saves="by hand",
        kills=(Kill(1), Kill(1)),
        same_objects=True,
    ),
    "a buffer with persistent=False that moves behind the checkpoint": DrawnRun(
        samples=2,
        sampler="",
        own_code=("keeps a buffer",),
        max_epochs=1,
        saves="by hand",
        kills=(Kill(1, "end"), Kill(1, "end")),
        same_objects=True,
    ),
}
