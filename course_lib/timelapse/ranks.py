"""One rank of several, played alone: the others answer at once with what this one gave, and no process is started."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

from course_lib._words import counted
from course_lib.timelapse.lapse import Lapse, instead_of


def pretend_ranks(lapse: Lapse) -> None:
    """Let every process group be of one process, and every ``spawn`` run here, as the rank that is played."""
    _play_spawned_ranks(lapse)
    _count_processes(lapse)
    if dist.is_available():
        _pretend_groups(lapse)
        _average_nothing()


class _Ended:
    """In place of what ``spawn(..., join=False)`` returns: its processes have been played, and have ended."""

    processes: tuple[Any, ...] = ()

    def join(self, *_: Any, **__: Any) -> bool:
        return True

    def pids(self) -> list[int]:
        return []


def _play_spawned_ranks(lapse: Lapse) -> None:
    def spawn(
        fn: Any, args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any
    ) -> _Ended | None:
        if nprocs < 1:
            lapse.journal.elsewhere = (
                f"it starts {nprocs} processes by spawn, maybe as many as there are GPUs, of which a play sees none. "
                "Give it a number"
            )
            return None if join else _Ended()
        rank = min(lapse.journal.rank, nprocs - 1)
        lapse.journal.world_size = max(lapse.journal.world_size, nprocs)
        lapse.note(f"Of {nprocs} processes that the script starts, rank {rank} was played.")
        fn(rank, *args)
        return None if join else _Ended()

    torch.multiprocessing.spawn = spawn  # type: ignore[assignment]
    torch.multiprocessing.spawn.__globals__["spawn"] = spawn


def _count_processes(lapse: Lapse) -> None:
    started = 0

    @instead_of(multiprocessing.process.BaseProcess)
    def start(begin: Any, process: Any) -> None:
        nonlocal started
        started += 1
        lapse.journal.elsewhere = (
            f"it starts {counted(started, 'process', 'processes')} by multiprocessing.Process, and a play sees its own "
            "alone. Start its ranks by torchrun (--ranks 2 plays one of them) or torch.multiprocessing.spawn"
        )
        begin(process)


def _pretend_groups(lapse: Lapse) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    @instead_of(dist, dist.distributed_c10d)
    def init_process_group(
        begin: Any,
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

    @instead_of(dist, dist.distributed_c10d)
    def broadcast_object_list(_: Any, object_list: Any, src: int = 0, *__: Any, **___: Any) -> None:
        if dist.get_rank() != src:
            lapse.note("What another rank broadcasts as an object is not known here; this rank kept its own.")


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

    @instead_of(kind)
    @contextlib.contextmanager
    def no_sync(_: Any, module: Any) -> Iterator[None]:
        before = vars(module).get("averages_asked", True)  # what was asked for, and not what the property says
        vars(module)["averages_asked"] = False
        yield
        vars(module)["averages_asked"] = before
