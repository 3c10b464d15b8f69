"""What may draw random numbers in a Trainer's run beside the module itself."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from course_lib._lightning import COMBINED_LOADER


def holders_of_generators(trainer: Any) -> list[Any]:
    """What may draw beside the module: the data module, and the callbacks that are a reader's own."""
    own = [one for one in trainer.callbacks if not type(one).__module__.startswith(("lightning.", "course_lib."))]
    return [one for one in (trainer.datamodule, *own) if hasattr(one, "__dict__")]


def data_that_draws(trainer: Trainer) -> list[Any]:
    """The datasets and the ``collate_fn`` of loaders that do not seed them for each sample."""
    own = [loader for loader in _loaders_of(trainer) if not getattr(loader, "seed_samples", False)]
    return [getattr(loader, name, None) for loader in own for name in ("dataset", "collate_fn")]


def orders_of(trainer: Trainer) -> list[Any]:
    """The loaders and their samplers, whose generators decide over the order."""
    loaders = _loaders_of(trainer)
    samplers = [getattr(loader, name, None) for loader in loaders for name in ("sampler", "batch_sampler")]
    return [*loaders, *samplers, *(getattr(sampler, "sampler", None) for sampler in samplers)]


def _loaders_of(trainer: Trainer) -> list[Any]:
    combined = COMBINED_LOADER.of(trainer.fit_loop), COMBINED_LOADER.of_set(trainer.fit_loop.epoch_loop.val_loop, None)
    return [loader for one in combined if one is not None for loader in one.flattened]
