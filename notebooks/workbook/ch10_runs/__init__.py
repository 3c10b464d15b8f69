"""Runs as chapter 10 judges them: each module has a ``make_run()``, which returns ``(trainer, model, data)``."""
