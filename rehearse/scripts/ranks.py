"""One rank of several, played alone: the others answer at once with what this one gave, and no process is started."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing.process
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

from course_lib._tensors import parameters_of
from course_lib._words import counted
from rehearse.scripts.lapse import Lapse, instead_of

COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "send", "isend", "batch_isend_irecv", "gather"),
    *("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_to_all", "all_to_all_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "_all_gather_base", "_reduce_scatter_base"),
)
"""By which ranks exchange tensors; what they send as objects goes through these, too."""


def pretend_ranks(lapse: Lapse) -> None:
    """Let every process group be of one process, and every ``spawn`` run here, as the rank that is rehearsed."""
    _play_spawned_ranks(lapse)
    _count_processes(lapse)
    if dist.is_available():
        _pretend_groups(lapse)
        _answer_collectives(lapse)
        _average_nothing(lapse)


class _Ended:
    """In place of what ``spawn(..., join=False)`` returns: its processes have been rehearsed, and have ended."""

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
                f"it starts {nprocs} processes by spawn, maybe as many as there are GPUs, of which it sees none. "
                "Give it a number"
            )
            return None if join else _Ended()
        rank = min(lapse.journal.rank, nprocs - 1)
        lapse.journal.world_size = max(lapse.journal.world_size, nprocs)
        lapse.note(f"Of {nprocs} processes that the script starts, rank {rank} was rehearsed.")
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
            f"it starts {counted(started, 'process', 'processes')} by multiprocessing.Process, and a rehearsal sees "
            "its own alone. Start its ranks by torchrun (--ranks 2 rehearses one) or torch.multiprocessing.spawn"
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
        lapse.journal.world_size, lapse.journal.has_group = ranks, True
        begin("fake", rank=own, world_size=ranks, store=FakeStore())

    @instead_of(dist, dist.distributed_c10d)
    def broadcast_object_list(_: Any, object_list: Any, src: int = 0, *__: Any, **___: Any) -> None:
        if dist.get_rank() != src:
            lapse.note("What another rank broadcasts as an object is not known here; this rank kept its own.")


def _from_environment(name: str) -> int:
    if name not in os.environ:
        raise ValueError(
            f"the script starts a process group and {name} is not set, as torchrun would set it: "
            "give the number of ranks, --ranks 2 or rehearse_script(..., ranks=2)"
        )
    return int(os.environ[name])


def _answer_collectives(lapse: Lapse) -> None:
    """Count what the script exchanges; where the ranks add up, add what the others would give, which is the same."""

    def answered(name: str) -> None:
        def exchange(run: Any, *arguments: Any, **options: Any) -> Any:
            if lapse.backwards:
                lapse.journal.exchanged += sum(tensor.numel() for tensor in _tensors_in((arguments, options)))
            returned = run(*arguments, **options)
            if name in ("all_reduce", "reduce"):
                given = inspect.signature(run).bind(*arguments, **options).arguments
                if given.get("op", dist.ReduceOp.SUM) == dist.ReduceOp.SUM and given["tensor"].dtype != torch.bool:
                    ranks = dist.get_world_size(given.get("group"))
                    with torch.no_grad():
                        given["tensor"].mul_(max(ranks, 1))  # -1 in a group that this rank is not in
            return returned

        exchange.__name__ = name
        instead_of(dist, dist.distributed_c10d)(exchange)

    for name in COLLECTIVES:
        if hasattr(dist, name):
            answered(name)


def _tensors_in(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, dict):
        yield from _tensors_in(list(given.values()))
    elif isinstance(given, list | tuple):
        for part in given:
            yield from _tensors_in(part)
    elif isinstance(given, dist.P2POp):
        yield given.tensor


def see_what_is_averaged_by_none(
    lapse: Lapse, trained: Mapping[int, torch.nn.Parameter], names: Mapping[int, str]
) -> None:
    """What the ranks train apart; parameters that FSDP or a DTensor shards are exchanged by torch itself."""
    journal = lapse.journal
    sharded = any("FullyShardedDataParallel" in name for name in journal.modules)
    if sharded or any(hasattr(parameter, "device_mesh") for parameter in trained.values()):
        return
    held = {id(parameter) for optimizer in lapse.optimizers.things for parameter in parameters_of(optimizer)}
    alone = {number: trained[number] for number in trained if number in held - lapse.wrapped}
    journal.averaged_by_none = tuple(names.get(number, "a parameter") for number in alone)
    journal.unaveraged = sum(parameter.numel() for parameter in alone.values())


def _average_nothing(lapse: Lapse) -> None:
    """DDP's reducer waits for tensors that a pretended group does not send; what the script asks for is kept."""

    def asked(module: Any) -> bool:
        return False

    def ask(module: Any, value: bool) -> None:
        vars(module)["averages_asked"] = value

    kind: Any = DistributedDataParallel
    kind.require_backward_grad_sync = property(asked, ask)

    @instead_of(kind)
    def __init__(make: Any, module: Any, *arguments: Any, **options: Any) -> None:
        make(module, *arguments, **options)
        lapse.journal.is_wrapped = True
        lapse.averages = False
        lapse.wrapped.update(id(parameter) for parameter in module.parameters() if parameter.requires_grad)

    @instead_of(kind)
    @contextlib.contextmanager
    def no_sync(_: Any, module: Any) -> Iterator[None]:
        before = vars(module).get("averages_asked", True)  # what was asked for, and not what the property says
        vars(module)["averages_asked"] = False
        yield
        vars(module)["averages_asked"] = before
