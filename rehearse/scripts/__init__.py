"""An unchanged training script is rehearsed to its end, in ``player.py``: what it did is its journal."""
