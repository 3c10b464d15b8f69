"""An unchanged training script is played to its end, in ``player.py``: what it did is its journal."""
