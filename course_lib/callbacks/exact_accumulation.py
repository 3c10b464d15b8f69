"""A Trainer's accumulated gradient, made that of the one big batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import Optimizer

from course_lib._lightning import SHOULD_ACCUMULATE
from course_lib._ranks import world_size_of
from course_lib.accumulation import (
    NothingToAverage,
    checked_count,
    checked_loss_sum,
    count_window,
    gradients_as_zeros,
)
from course_lib.callbacks._replaced_methods import replace_methods
from course_lib.callbacks._trainer import callbacks_of_kind, require_plain_optimization
from course_lib.callbacks._windows import TellsOfWindows
from course_lib.callbacks.skip_bad_steps import SkipBadSteps
from course_lib.samplers import count_batches_everywhere


class ExactAccumulation(TellsOfWindows):
    """Weigh samples (or tokens) equally within each window of automatic optimization, over all ranks.

    A Trainer divides each loss by ``accumulate_grad_batches`` and averages over ranks: it gives equal weights to
    micro-batches and to ranks even where they hold different numbers of samples, and too little weight to a short last
    window. With this callback ``training_step`` returns a sum and what it runs over; the rest of the run stays as is:

        def training_step(self, batch):
            loss_sum = cross_entropy(self(batch.x), batch.y, reduction="sum", ignore_index=-100)
            return loss_sum, (batch.y != -100).sum()
        Trainer(accumulate_grad_batches=8, callbacks=[ExactAccumulation()])

    A Trainer without the callback refuses that pair. A dict with the keys ``"loss"`` (the sum) and ``"count"`` is
    taken as well, and its other keys reach ``on_train_batch_end``; a Trainer without the callback would train on the
    sum. To log the mean: ``self.log("loss", loss_sum / count, batch_size=count)``.

    When the window's last backward has run, the gradients are multiplied by ``k · W / N``: Lightning divided by ``k``,
    DDP by the ``W`` ranks, and ``N`` is the window's count over all ranks (one collective of four numbers a window).
    Clipping and every ``on_before_optimizer_step`` come after it. A micro-batch whose count is 0 adds nothing, also
    where its mean is NaN; a window whose count is 0 on all ranks raises, or, where there is a ``SkipBadSteps``, is
    skipped. ``accumulate_grad_batches`` may change from epoch to epoch. Under ``16-mixed`` the scaler sees sums, so its
    scale settles lower. BatchNorm's statistics and dropout's draws stay those of each micro-batch.

    Attributes:
        global_count: The count over all ranks of the last window, what its gradient was divided by.

    Raises:
        MisconfigurationException: Manual optimization, a strategy other than one device and DDP, or a
            ``training_step`` that takes ``dataloader_iter``.
        ValueError: ``training_step`` returned no count, a mean, or a loss that is not 0-dim; a window has a total count
            of 0; the ranks have different numbers of batches, as far as their loaders have a length.
    """

    def __init__(self) -> None:
        self.global_count = math.nan
        self._counts: dict[int, float] = {}
        self._batch_idx = 0
        self._replaced, self._without_gradients = ExitStack(), ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        require_plain_optimization(
            self,
            trainer,
            pl_module,
            with_manual="call course_lib.accumulation.accumulate(..., backward=self.manual_backward) in your own loop",
            other_strategies="which reduces or accumulates gradients in a way that this callback has not been tested "
            "with",
        )
        self.tell_of_windows(trainer)
        if len(callbacks_of_kind(trainer, ExactAccumulation)) > 1:
            raise MisconfigurationException(
                "there are two ExactAccumulation callbacks: gradients would be scaled twice"
            )
        if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
            raise MisconfigurationException(
                "ExactAccumulation needs a training_step that takes the batch, got one that takes the loader's "
                "iterator (dataloader_iter): there Lightning zeroes the gradients one micro-batch late, so that no "
                "window has those of its micro-batches"
            )
        # The count is needed between a window's last backward and its step: no hook there sees what was returned.
        training_step = pl_module.training_step

        @functools.wraps(training_step)
        def counted_step(*args: Any, **kwargs: Any) -> Any:
            return self._take_count(pl_module, training_step(*args, **kwargs))

        # A Trainer looks for batch_idx in the signature of what was wrapped, one wrapper deep.
        counted_step.__wrapped__ = getattr(training_step, "__wrapped__", training_step)
        self._replaced.callback(replace_methods(pl_module, training_step=counted_step))

    def _take_count(self, pl_module: LightningModule, output: Any) -> Any:
        if output is None:
            return output
        if isinstance(output, tuple) and len(output) == 2:
            output = {"loss": output[0], "count": output[1]}
        if not isinstance(output, Mapping) or not {"loss", "count"} <= output.keys():
            keys = f" with the keys {sorted(map(str, output))}" if isinstance(output, Mapping) else ""
            raise ValueError(
                "with ExactAccumulation, training_step must return (loss_sum, count) "
                f'or {{"loss": loss_sum, "count": count}}, got a {type(output).__name__}{keys}'
            )
        count = checked_count(output["count"])
        loss = checked_loss_sum(output["loss"], count)
        if count == 0 and bool(loss.isnan()):  # a mean over nothing
            output = {**output, "loss": loss.nan_to_num()}
            self._without_gradients.enter_context(gradients_as_zeros(pl_module))
        self._counts[self._batch_idx] = count  # once, also where an optimizer calls its closure again (LBFGS)
        return output

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if math.isfinite(trainer.num_training_batches):
            # A Trainer talks between ranks in every batch: also where the windows are as many, it would hang.
            count_batches_everywhere(range(int(trainer.num_training_batches)))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch_idx = batch_idx
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._counts = {}

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._without_gradients.close()
        # Ahead of every on_before_optimizer_step, so that the order of the callbacks does not matter.
        if not SHOULD_ACCUMULATE.of(trainer.fit_loop.epoch_loop)():
            self._average(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._average(trainer, pl_module)  # the window's last training_step returned None: no backward came

    def _average(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._counts:  # done already; or one device, and training_step returned None for the whole window
            return
        k = trainer.accumulate_grad_batches
        counts, self._counts = self._counts, {}
        try:
            self.global_count = count_window(
                sum(counts.values()), micro_batches=len(counts), number=self._batch_idx // k + 1
            )
        except NothingToAverage:
            skippers = callbacks_of_kind(trainer, SkipBadSteps)
            if not skippers:
                raise
            skippers[0].reject_on_all_ranks("no sample of the window has a label")
            return
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(k * world_size_of() / self.global_count)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._replaced.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._without_gradients.close()
        self._replaced.close()
