"""A Trainer's batch size, found before the first batch."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils.data import DataLoader

from course_lib._lightning import COMBINED_LOADER, DATA_SOURCE
from course_lib.callbacks._trainer import replace_methods, require_plain_optimization
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

    Args:
        batch_arg_name: The attribute to set.
        options: Of ``find_batch_size``: ``limit_bytes``, ``fraction``, ``max_batch_size``, ``multiple_of``.

    Attributes:
        fitted: What was found; None before.

    Raises:
        MisconfigurationException: Manual optimization, more than one optimizer, a strategy other than one device and
            DDP, no such attribute, or a train loader that was made before the fit, whose size can't be set any more.
    """

    def __init__(self, batch_arg_name: str = "batch_size", **options: Any) -> None:
        self.batch_arg_name = batch_arg_name
        self.options = options
        self.fitted: FittedBatchSize | None = None

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
        with_index = is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2)

        def loss_fn(module: nn.Module, batch: Any) -> Tensor:
            arguments = (batch, 0) if with_index else (batch,)
            with trainer.precision_plugin.train_step_context():
                output = module.training_step(*arguments)  # type: ignore[operator]
            loss: Tensor = output["loss"] if isinstance(output, dict) else output
            return loss

        put_back = replace_methods(pl_module, log=_say_nothing, log_dict=_say_nothing)
        try:
            self.fitted = find_batch_size(pl_module, loader, trainer.optimizers[0], loss_fn=loss_fn, **self.options)
        finally:
            put_back()
        changed = lightning_getattr(pl_module, self.batch_arg_name) != self.fitted.batch_size
        lightning_setattr(pl_module, self.batch_arg_name, self.fitted.batch_size)
        if changed:
            # configure_optimizers may have asked for the length of the run, which made the loader and a wrong horizon.
            COMBINED_LOADER.put(trainer.fit_loop, None)
            trainer.strategy.setup_optimizers(trainer)


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    """Instead of ``self.log``, which has nowhere to go before the first epoch."""
