"""A Trainer for figures and comparisons: it trains, says nothing and leaves no files."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from workbook.display import quiet_lightning


def quiet_trainer(**options: Any) -> Trainer:
    """A Trainer without logger, checkpoints, progress bar and model summary; ``options`` are Trainer's own."""
    quiet_lightning()
    return Trainer(
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options
    )
