"""Ranks that are pretended: one process is told that it is one of several, and the others answer at once.

Its process group's collectives return what this rank gave, and nobody waits for anybody.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist


def join_pretended_group(rank: int, world_size: int) -> None:
    """Have this process be one of so many; with one, it is in no process group."""
    forget_process_group()
    if world_size > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


def pretended_environment(rank: int, world_size: int) -> SimpleNamespace:
    """A cluster, as Lightning asks for one, in which this process is one of several that exist already."""

    def known(*_: Any) -> None:
        """Nothing is set up, and nothing torn down."""

    return SimpleNamespace(
        creates_processes_externally=True,
        main_address="localhost",
        main_port=0,
        world_size=lambda: world_size,
        global_rank=lambda: rank,
        local_rank=lambda: rank,
        node_rank=lambda: 0,
        set_world_size=known,
        set_global_rank=known,
        validate_settings=known,
        teardown=known,
    )


_forgotten: list[Any] = []


def forget_process_group() -> None:
    """Have no process group in this process any more, without ending it: its threads did not come along in a fork."""
    if not dist.is_initialized():
        return
    c10d: Any = dist.distributed_c10d
    world = c10d._world
    _forgotten.append((dict(world.pg_map), c10d.GroupMember.WORLD))  # destroyed, a group would wait for its threads
    c10d._update_default_pg(None)
    for groups in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        groups.clear()
    world.tags_to_pg.clear()
    world.pg_coalesce_state.clear()
    world.group_count = 0
    c10d._unregister_all_process_groups()
