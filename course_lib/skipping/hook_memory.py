"""What a communication hook remembers from one reduction to the next."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch.nn.parallel import DistributedDataParallel


def forget_compression_errors(replicas: Iterable[DistributedDataParallel]) -> None:
    """Let PowerSGD begin again on all ranks: what it compressed wrongly it adds to the next gradient, a NaN as well."""
    power_sgd = sys.modules.get("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    for replica in replicas:
        for _, state in replica._comm_hooks:
            if power_sgd is not None and isinstance(state, power_sgd.PowerSGDState):
                state.error_dict.clear()
                state.p_memory_dict.clear()
                state.q_memory_dict.clear()
