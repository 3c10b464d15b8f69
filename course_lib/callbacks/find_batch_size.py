"""A Trainer's batch size, found before the first batch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils.data import DataLoader

from course_lib._arguments import int_of_at_least
from course_lib._lightning import COMBINED_LOADER, DATA_SOURCE
from course_lib.callbacks._replaced_methods import replace_methods
from course_lib.callbacks._trainer import accumulation_by_epoch, callbacks_of_kind, require_plain_optimization
from course_lib.callbacks.exact_accumulation import ExactAccumulation
from course_lib.callbacks.size_schedule import SizeScheduleDataModule
from course_lib.memory.batch_size import FittedBatchSize, find_batch_size


class FindBatchSize(Callback):
    """Find the largest batch size that fits, on all ranks the same, and train with it.

    The module (or its ``hparams``, or the datamodule) has a ``batch_size`` that ``train_dataloader`` reads, and
    ``training_step`` is what is predicted and tried, on batches of the training data's first sample:

        finder = FindBatchSize(fraction=0.9, multiple_of=8)
        Trainer(callbacks=[finder]).fit(model, datamodule=data)
        print(finder.fitted)

    Nothing is logged meanwhile, and nothing of the run has changed when it begins: weights, optimizer, generators.
    ``configure_optimizers`` is called again with the size that was found, so that schedules have the run's real length.
    A ``training_step`` that asks for its trainer can't be predicted, so smaller trials take its place.

    A learning rate that was chosen for one effective batch (the samples of one optimizer step, over all ranks) wants
    another one for another. ``effective_batch_size`` holds it: the size that is found divides it, and the Trainer
    accumulates as many micro-batches as make it up. Without it, the Trainer's accumulation stays, and a line says what
    the effective batch became.

    Args:
        batch_arg_name: The attribute to set.
        effective_batch_size: The samples of one optimizer step, over all ranks; None: whatever comes out.
        options: Of ``find_batch_size``: ``limit_bytes``, ``fraction``, ``max_batch_size``, ``multiple_of``.

    Attributes:
        fitted: What was found; None before.

    Raises:
        MisconfigurationException: Manual optimization, more than one optimizer, a strategy other than one device and
            DDP, no such attribute, or a train loader that was made before the fit, whose size can't be set any more;
            an ``effective_batch_size`` that the ranks can't share, or beside a ``GradientAccumulationScheduler``.
        ValueError: An optimizer that evaluates the loss itself (LBFGS).
        MemoryError: No size fits, or none of those that make up ``effective_batch_size``.
    """

    def __init__(
        self, batch_arg_name: str = "batch_size", *, effective_batch_size: int | None = None, **options: Any
    ) -> None:
        if effective_batch_size is not None:
            effective_batch_size = int_of_at_least(1, "effective_batch_size", effective_batch_size)
        self.batch_arg_name = batch_arg_name
        self.effective_batch_size = effective_batch_size
        self.options = options
        self.fitted: FittedBatchSize | None = None
        self._trainers_own: int | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        require_plain_optimization(
            self,
            trainer,
            pl_module,
            with_manual="call course_lib.memory.find_batch_size(..., step_fn=...) before the fit",
            other_strategies="whose memory course_lib.memory doesn't know",
        )
        if not lightning_hasattr(pl_module, self.batch_arg_name):
            raise MisconfigurationException(
                f"FindBatchSize sets {self.batch_arg_name!r}, which neither module, hparams nor datamodule has"
            )
        if isinstance(getattr(trainer, "datamodule", None), SizeScheduleDataModule):
            raise MisconfigurationException(
                "a schedule of sizes says its batch sizes itself, and reads no batch_size: find one with "
                "course_lib.memory.find_batch_size before, and give the schedule a budget that it fits into"
            )
        source = DATA_SOURCE.of(trainer.fit_loop)
        if not source.is_module():
            raise MisconfigurationException(
                "FindBatchSize needs a train_dataloader() that reads the batch size, of the module or a datamodule, "
                "got a loader that is made already"
            )
        loader = source.dataloader()
        if not isinstance(loader, DataLoader):
            raise MisconfigurationException(f"FindBatchSize knows one torch DataLoader, got {type(loader).__name__}")
        if len(trainer.optimizers) != 1:
            raise MisconfigurationException(f"FindBatchSize knows one optimizer, got {len(trainer.optimizers)}")
        options = self.options | self._options_of_effective_batch(trainer)
        with_index = is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2)

        def loss_fn(module: nn.Module, batch: Any) -> Tensor:
            arguments = (batch, 0) if with_index else (batch,)
            with trainer.precision_plugin.train_step_context(), ExitStack() as stack:
                module.trainer = trainer  # type: ignore[assignment]  # a copy has none
                stack.callback(replace_methods(module, log=_say_nothing, log_dict=_say_nothing))
                output = module.training_step(*arguments)  # type: ignore[operator]
            if isinstance(output, tuple):  # what ExactAccumulation takes: the loss's sum, and its count
                output = output[0]
            loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
            return loss

        with ExitStack() as stack:
            for callback in callbacks_of_kind(
                trainer, ExactAccumulation
            ):  # a prediction has no numbers that could be counted
                stack.enter_context(callback.not_counting())
            self.fitted = find_batch_size(pl_module, loader, trainer.optimizers[0], loss_fn=loss_fn, **options)
        size, size_before = self.fitted.batch_size, lightning_getattr(pl_module, self.batch_arg_name)
        lightning_setattr(pl_module, self.batch_arg_name, size)
        changed = size != size_before
        before = trainer.accumulate_grad_batches
        if self.effective_batch_size is not None:
            trainer.accumulate_grad_batches = self.effective_batch_size // (size * trainer.world_size)
            self._trainers_own = before
            changed |= trainer.accumulate_grad_batches != before
        rank_zero_info(f"FindBatchSize: {_effective_batch(trainer, size, before, size_before)}")
        if changed:
            # configure_optimizers may have asked for the length of the run, which made the loader and a wrong horizon.
            COMBINED_LOADER.put(trainer.fit_loop, None)
            trainer.strategy.setup_optimizers(trainer)

    def _options_of_effective_batch(self, trainer: Trainer) -> dict[str, Any]:
        if self.effective_batch_size is None:
            return {}
        if accumulation_by_epoch(trainer) is not None:
            raise MisconfigurationException(
                f"effective_batch_size={self.effective_batch_size} says how many batches an update takes, and "
                "GradientAccumulationScheduler changes that: leave one of the two out"
            )
        per_rank, left = divmod(self.effective_batch_size, trainer.world_size)
        if left:
            raise MisconfigurationException(
                f"effective_batch_size={self.effective_batch_size} can't be shared by {trainer.world_size} ranks: give "
                f"a multiple of {trainer.world_size}, such as {(per_rank + 1) * trainer.world_size}"
            )
        most = self.options.get("max_batch_size")
        return {"divisor_of": per_rank, "max_batch_size": per_rank if most is None else min(most, per_rank)}

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._trainers_own is not None:
            trainer.accumulate_grad_batches, self._trainers_own = self._trainers_own, None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")


def _effective_batch(trainer: Trainer, size: int, accumulated_before: int, size_before: Any) -> str:
    """Say what the samples of one optimizer step are now, over all ranks, and what they were."""
    ranks, windows = trainer.world_size, accumulation_by_epoch(trainer)
    on_ranks = "on 1 rank" if ranks == 1 else f"on each of {ranks} ranks"
    if windows is not None:
        by_epoch = ", ".join(f"{size * k * ranks:,} from epoch {epoch}" for epoch, k in sorted(windows.items()))
        return (
            f"The effective batch is now {by_epoch}, in samples: batches of {size:,} {on_ranks}, in "
            "GradientAccumulationScheduler's windows"
        )
    k = trainer.accumulate_grad_batches
    now = f"{size * k * ranks:,} samples"
    if isinstance(size_before, int):
        now += f" ({size_before * accumulated_before * ranks:,} before)"
    return f"The effective batch is now {now}: batches of {size:,}, {k} a step, {on_ranks}"


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    """Instead of ``self.log``, which has nowhere to go before the first epoch."""
