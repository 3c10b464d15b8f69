"""What a module is trained as, and no ``state_dict`` holds: which parameters are frozen, and the modes of its parts."""

from __future__ import annotations

from collections.abc import Iterator

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import prune

from course_lib._lightning import MODULE_MODE
from course_lib.callbacks._trainer import callbacks_of_kind


def modes_of(trainer: Trainer, pl_module: LightningModule) -> dict[str, list[str]]:
    """The names of parameters that are frozen, of modules in eval mode, and of those that keep no running statistics.

    A callback that unfreezes at an epoch's start does not do so where a run is resumed within that epoch. Lightning's
    BaseFinetuning does not do so at a later epoch's start either.
    """
    return {
        "frozen": [name for name, parameter in pl_module.named_parameters() if not parameter.requires_grad],
        "in_eval_mode": [name for name, trains in _training(trainer, pl_module).items() if not trains],
        "without_statistics": [name for name, part in _norms(pl_module) if not part.track_running_stats],
    }


def put_modes(trainer: Trainer, pl_module: LightningModule, modes: dict[str, list[str]] | None) -> None:
    """Make the module what it was when ``modes_of`` was called, and warn of what was otherwise; None: it was not."""
    if modes is None:
        return
    before = modes_of(trainer, pl_module)
    changed = sorted(set().union(*(set(before[kind]) ^ set(modes[kind]) for kind in modes)))
    if not changed:
        return
    for name, parameter in pl_module.named_parameters():
        parameter.requires_grad = name not in modes["frozen"]
    for name, part in pl_module.named_modules():
        part.training = name not in modes["in_eval_mode"]
    for name, norm in _norms(pl_module):
        norm.track_running_stats = name not in modes["without_statistics"]
    others = f" and {len(changed) - 1} others" if changed[1:] else ""
    rank_zero_warn(
        f"{changed[0]}{others} had been frozen or unfrozen, or put into another mode, since the run began, and "
        "ExactResume puts that back as it was. To train other parameters from here on, freeze and unfreeze them in "
        "on_train_epoch_start or later"
    )


def was_pruned(trainer: Trainer, pl_module: LightningModule) -> bool:
    """Whether a ModelPruning has cut something: its checkpoints hold zeros, and not the masks that keep them so."""
    return bool(callbacks_of_kind(trainer, ModelPruning)) and prune.is_pruned(pl_module)


def _training(trainer: Trainer, pl_module: LightningModule) -> dict[str, bool]:
    if trainer.validating or trainer.sanity_checking:
        return dict(MODULE_MODE.of(trainer.fit_loop.epoch_loop.val_loop).mode)
    return {name: part.training for name, part in pl_module.named_modules()}


def _norms(module: nn.Module) -> Iterator[tuple[str, _NormBase]]:
    return ((name, part) for name, part in module.named_modules() if isinstance(part, _NormBase))
