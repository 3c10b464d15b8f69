"""Sizes that follow a schedule, in a Trainer.

A Trainer counts a loader's batches once, and cuts or ends every later epoch by that count; and it accumulates by one
number. Both change with the size. The rule: *ask for the loader in every epoch, so that it is counted again; it may be
the same loader each time.*

    schedule = SizeSchedule.with_budget({0: 32, 3: 64}, budget=65536, effective_batch_size=64)
    data = SizeScheduleDataModule(images, schedule, render, num_workers=4, persistent_workers=True)
    Trainer(max_epochs=10).fit(model, datamodule=data)
    data.plan().total_steps  # in configure_optimizers: self.trainer.datamodule.plan()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from course_lib.callbacks._trainer import accumulation_by_epoch
from course_lib.callbacks.skip_bad_steps import attempts_of
from course_lib.resume import ResumableDataLoader
from course_lib.samplers.epoch import SamplerTail
from course_lib.schedules import ScheduledBatchSampler, SizedDataset, SizeSchedule
from course_lib.schedules.schedule_plan import LrRule, SchedulePlan
from course_lib.steps.arguments import at_epoch


class SizeScheduleDataModule(LightningDataModule):
    """The training loader of a :class:`~course_lib.schedules.SizeSchedule`, with its sizes, windows and lengths.

    There is one loader, whose workers may persist. The data module has the Trainer ask for it in every epoch (it sets
    ``reload_dataloaders_every_n_epochs=1``), so that each is counted.

    ``accumulate_grad_batches`` follows from the schedule, epoch by epoch; leave it out of the Trainer, and leave out
    ``GradientAccumulationScheduler``. As always in a Trainer, the short window at an epoch's end is divided by the full
    one's length; ``ExactAccumulation`` corrects that.

    ``trainer.estimated_stepping_batches`` goes by the first epoch's length. For a learning rate schedule, take
    ``trainer.datamodule.plan().total_steps``, and ``trainer.datamodule.lr_factor("linear")`` for one that follows the
    batch.

    A run is resumed with ``ExactResume``: it goes on where it was stopped, also within an epoch, and on other ranks.
    (There, where a window's length depends on the ranks, as with ``effective_batch_size``, the first update may have a
    shorter window: a Trainer counts windows from the epoch's start.)

    What the samples, ``render`` and ``collate_fn`` draw at random comes again after a resume, on any number of workers
    and ranks: see :class:`~course_lib.resume.ResumableDataLoader`, whose ``seed_samples`` this takes as well.

    Args:
        dataset: Map-style; or a ``SizedDataset``, without ``render``.
        schedule: Size and batch size, by epochs, optimizer steps or samples.
        render: ``render(sample, size)`` -> the sample at that size.
        shuffle, seed, tail: Of the :class:`~course_lib.schedules.ScheduledBatchSampler`.
        val_dataloaders: What ``val_dataloader()`` returns; Lightning takes none beside a data module.
        loader_arguments: Whatever else a ResumableDataLoader takes: ``num_workers``, ``collate_fn``, ``seed_samples`` …

    Raises:
        MisconfigurationException: The Trainer's flags and the schedule don't go together.
        ValueError: Accumulation would change within an epoch; ``effective_batch_size`` does not divide on these ranks;
            or ``tail="spread"`` cannot deal an epoch to them: said before the first batch of a run from its start;
            after a resume, or with manual optimization and ``max_steps``, when that epoch comes.
    """

    trainer: Any

    def __init__(
        self,
        dataset: Any,
        schedule: SizeSchedule,
        render: Callable[[Any, Any], Any] | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        tail: SamplerTail = "spread",
        val_dataloaders: Any = None,
        **loader_arguments: Any,
    ) -> None:
        super().__init__()
        if render is None and not isinstance(dataset, SizedDataset):
            raise ValueError(
                "render says how a sample comes at a size, render(sample, size): give it, or a SizedDataset"
            )
        self.dataset = dataset if render is None else SizedDataset(dataset, render)
        self.schedule = schedule
        self._sampler = ScheduledBatchSampler(len(self.dataset), schedule, shuffle=shuffle, seed=seed, tail=tail)
        self._loader = ResumableDataLoader(self.dataset, batch_sampler=self._sampler, **loader_arguments)
        self.val_dataloaders = val_dataloaders
        self._trainers_own: tuple[int, int] | None = None

    def plan(self) -> SchedulePlan:
        """The optimizer steps of the Trainer's whole run."""
        trainer = self._trainer("plan()")
        return self._sampler.plan(
            world_size=trainer.world_size,
            max_epochs=trainer.max_epochs,
            max_steps=trainer.max_steps,
            limit_train_batches=trainer.limit_train_batches,
        )

    def state_dict(self) -> dict[str, Any]:
        """The loader's state; a Trainer asks a loader for its own as well, but not at the end of an epoch."""
        return {"loader": self._loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loader.load_state_dict(state_dict["loader"])

    def setup(self, stage: str) -> None:
        if stage != "fit":
            return
        trainer = self._trainer("setup()")
        windows = self.schedule.accumulate_grad_batches(trainer.world_size)
        allowed = {1, windows if isinstance(windows, int) else windows[0]}
        if trainer.accumulate_grad_batches not in allowed or accumulation_by_epoch(trainer) is not None:
            raise MisconfigurationException(
                f"the schedule says how many batches an update takes: {windows}. Leave accumulate_grad_batches (got "
                f"{trainer.accumulate_grad_batches}) and GradientAccumulationScheduler out of the Trainer"
            )
        if trainer.overfit_batches:
            raise MisconfigurationException(
                "overfit_batches would make the loader again with a sampler of its own, without the schedule: take "
                "limit_train_batches, and shuffle=False"
            )
        if windows != 1 and not trainer.lightning_module.automatic_optimization:
            raise MisconfigurationException(
                f"the schedule says that an update takes {windows} batches, and with manual optimization nobody "
                "accumulates them: step once for as many batches in your training_step, or give a schedule of windows "
                "of 1 (no accumulate_grad_batches, no effective_batch_size)"
            )
        self._trainers_own = (trainer.reload_dataloaders_every_n_epochs, trainer.accumulate_grad_batches)
        trainer.reload_dataloaders_every_n_epochs = 1

    def train_dataloader(self) -> ResumableDataLoader:
        trainer = self._trainer("train_dataloader()")
        if self._trainers_own is None:
            raise MisconfigurationException(
                f"setup() of {type(self).__name__} does not call super().setup(stage): the Trainer would count the "
                "batches of the first epoch and cut the others by it. Call it first"
            )
        epoch = trainer.current_epoch
        self._loader.set_epoch(epoch)  # before the Trainer asks for its length
        # With manual optimization nobody knows how many steps an epoch makes, nor which one max_steps ends.
        countable = trainer.max_steps == -1 or trainer.lightning_module.automatic_optimization
        if epoch == trainer.global_step == 0 and countable and (trainer.max_epochs, trainer.max_steps) != (-1, -1):
            self.plan()  # which refuses a run that comes to an epoch that cannot be dealt
        windows = self.schedule.accumulate_grad_batches(trainer.world_size)
        trainer.accumulate_grad_batches = windows if isinstance(windows, int) else at_epoch(windows, epoch)
        return self._loader

    def val_dataloader(self) -> Any:
        return [] if self.val_dataloaders is None else self.val_dataloaders

    def lr_factor(self, rule: LrRule = "linear") -> Callable[[int], float]:
        """The factor of the learning rate that goes with the batch, for ``LambdaLR`` stepped at each update.

        ``plan().lr_factor`` goes by updates and the sizes by attempts, so after a step that ``SkipBadSteps`` has
        skipped they part. This one goes by attempts: it is that of the batch that comes next.
        """
        factor = self.plan().lr_factor(rule)
        return lambda step: factor(attempts_of(self._trainer("lr_factor()")))

    def teardown(self, stage: str) -> None:
        if stage == "fit" and self._trainers_own is not None:
            trainer = self._trainer("teardown()")
            trainer.reload_dataloaders_every_n_epochs, trainer.accumulate_grad_batches = self._trainers_own
            self._trainers_own = None

    def on_exception(self, exception: BaseException) -> None:
        self.teardown("fit")

    def _trainer(self, what: str) -> Any:
        if self.trainer is None:
            raise RuntimeError(f"{what} asks a Trainer: call it within trainer.fit(model, datamodule=...)")
        return self.trainer
