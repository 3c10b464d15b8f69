"""One rank of several, played alone: the others answer at once with what this one gave, and no process is started."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

from course_lib.timelapse.lapse import Lapse, take_place


def pretend_ranks(lapse: Lapse) -> None:
    """Let every process group be of one process, and every ``spawn`` run here, as the rank that is played."""
    _play_spawned_ranks(lapse)
    if dist.is_available():
        _pretend_groups(lapse)
        _average_nothing()


def _play_spawned_ranks(lapse: Lapse) -> None:
    def spawn(
        fn: Any, args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, daemon: bool = False, **_: Any
    ) -> None:
        rank = min(lapse.journal.rank, nprocs - 1)
        lapse.journal.world_size = max(lapse.journal.world_size, nprocs)
        lapse.note(f"Of {nprocs} processes that the script starts, rank {rank} was played.")
        fn(rank, *args)

    torch.multiprocessing.spawn = spawn  # type: ignore[assignment]
    torch.multiprocessing.spawn.__globals__["spawn"] = spawn


def _pretend_groups(lapse: Lapse) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    begin = dist.init_process_group

    @functools.wraps(begin)
    def init_process_group(
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        **_: Any,
    ) -> None:
        ranks = world_size if world_size > 0 else _from_environment("WORLD_SIZE")
        own = rank if rank >= 0 else _from_environment("RANK")
        lapse.journal.world_size = ranks
        begin("fake", rank=own, world_size=ranks, store=FakeStore())

    def broadcast_object_list(object_list: Any, src: int = 0, *_: Any, **__: Any) -> None:
        if dist.get_rank() != src:
            lapse.note("What another rank broadcasts as an object is not known here; this rank kept its own.")

    for place in (dist, dist.distributed_c10d):
        take_place(place, init_process_group, broadcast_object_list)


def _from_environment(name: str) -> int:
    if name not in os.environ:
        raise ValueError(
            f"the script starts a process group and {name} is not set, as torchrun would set it: "
            "give the number of ranks, --ranks 2 or preflight_script(..., ranks=2)"
        )
    return int(os.environ[name])


def _average_nothing() -> None:
    """DDP's reducer waits for tensors that a pretended group does not send; what the script asks for is kept."""

    def asked(module: Any) -> bool:
        return False

    def ask(module: Any, value: bool) -> None:
        vars(module)["averages_asked"] = value

    kind: Any = DistributedDataParallel
    kind.require_backward_grad_sync = property(asked, ask)
    no_sync = kind.no_sync

    @functools.wraps(no_sync)
    def kept(module: Any) -> Any:
        return _NoSync(module)

    kind.no_sync = kept


class _NoSync:
    """``no_sync``, which puts back what was asked for, and not what the property says."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __enter__(self) -> None:
        self.before = vars(self.module).get("averages_asked", True)
        vars(self.module)["averages_asked"] = False

    def __exit__(self, *_: object) -> None:
        vars(self.module)["averages_asked"] = self.before
