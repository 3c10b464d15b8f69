"""What several topics ask about the ranks: how many, what each of them says, what DDP reduces."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def in_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def world_size_of(group: dist.ProcessGroup | None = None) -> int:
    """The number of ranks; 1 where there is no process group."""
    return dist.get_world_size(group) if in_group() else 1


def rank_of_this_process() -> int:
    return dist.get_rank() if in_group() else 0


def rank_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where a rank's tensors belong in a group's collectives: on its GPU under NCCL, else on the CPU."""
    config = dist.get_backend_config(group) if in_group() else ""  # get_backend may be "undefined"
    if "nccl" in config and "gloo" not in config:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def gathered(numbers: Sequence[float], group: dist.ProcessGroup | None = None) -> list[list[float]]:
    """The numbers of each rank, in the order of the ranks; every rank gives as many. One collective.

    A rank that cannot answer gives NaN, as its exception would leave the others waiting; it raises afterwards.

    Raises:
        RuntimeError: A rank ended, or did not answer within the group's timeout.
    """
    if world_size_of(group) == 1:
        return [[float(number) for number in numbers]]
    row = torch.tensor(numbers, dtype=torch.float64, device=rank_device(group))
    rows = [torch.empty_like(row) for _ in range(world_size_of(group))]
    try:
        dist.all_gather(rows, row, group=group)
        return [row.tolist() for row in rows]
    except RuntimeError as error:
        raise RuntimeError(
            "a rank did not answer: it ended, failed, or went another way, such as one with fewer batches. Its own "
            "message says which"
        ) from error


def those_with_nan(numbers: Iterable[float]) -> str:
    """``"rank 0, rank 2"``: the ranks that gave NaN; empty where there is none."""
    return ", ".join(f"rank {rank}" for rank, number in enumerate(numbers) if math.isnan(number))


class Reduction(NamedTuple):
    """What averages a model's gradients over the ranks: DDP, or ``fully_shard`` (FSDP2); nothing, of a plain module."""

    replicas: list[DistributedDataParallel]
    shards: list[Any]
    """The modules that ``fully_shard`` has sharded."""
    group: dist.ProcessGroup | None
    """The ranks; None where nothing averages, for the default group."""


def reduction_of(model: nn.Module) -> Reduction:
    """What averages the gradients of a model that is or holds DDP wrappers or fully sharded modules.

    Raises:
        ValueError: It is no module; it is sharded by FSDP1, over a mesh of two dimensions, or by tensor parallelism;
            ``fully_shard`` holds only a part of what is trained.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}: give the module itself, first")
    replicas = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who has not imported it has sharded nothing
    kinds = "model must be plain, DistributedDataParallel, or sharded by fully_shard over one mesh of one dimension, "
    if fsdp and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(f"{kinds}got FullyShardedDataParallel (FSDP1), whose reduction course_lib doesn't know")
    shards = [module for module in model.modules() if fsdp and isinstance(module, fsdp.FSDPModule)]
    for module in shards:
        module.reshard()  # after a forward without a backward, its parameters may still be whole
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    meshes = {getattr(parameter, "device_mesh", None) for parameter in trained}  # a DTensor has one
    if meshes <= {None} and not shards:
        return Reduction(replicas, [], replicas[0].process_group if replicas else None)
    if not shards:
        raise ValueError(f"{kinds}got DTensor parameters (tensor parallelism)")
    mesh, *others = meshes or {None}
    if replicas or others or mesh is None or mesh.ndim != 1:
        raise ValueError(
            f"{kinds}got {len(meshes)} meshes, of {[0 if mesh is None else mesh.ndim for mesh in meshes]} dimensions "
            "(0 for parameters outside fully_shard, whose gradients would stay each rank's own): shard all that is "
            "trained over one"
        )
    return Reduction([], shards, mesh.get_group())


def refuse_what_is_outside_ddp(replicas: list[DistributedDataParallel], parameters: Iterable[Tensor]) -> None:
    """Raise a ValueError where there is DDP, and a parameter that is trained is in none."""
    reduced = {parameter for replica in replicas for parameter in replica.parameters()}
    if replicas and any(parameter.requires_grad and parameter not in reduced for parameter in parameters):
        raise ValueError(
            "some parameters that are trained are outside DistributedDataParallel: their gradients would stay each "
            "rank's own, and the ranks would part. Wrap all that is trained"
        )


_NEVER_REDUCED: WeakKeyDictionary[DistributedDataParallel, dict[str, Tensor]] = WeakKeyDictionary()


def refuse_what_ddp_never_reduces(replicas: Iterable[DistributedDataParallel]) -> None:
    """Raise a ValueError where a parameter is trained that was frozen when DDP wrapped it.

    DDP asks once what is trained. What is unfrozen later gets no sum over the ranks, and nothing says so: the ranks
    part. (What DDP has been told to ignore is its caller's to reduce.)
    """
    for replica in replicas:
        if dist.get_world_size(replica.process_group) == 1:
            continue
        if replica not in _NEVER_REDUCED:
            _NEVER_REDUCED[replica] = _never_reduced(replica)
        for name, parameter in _NEVER_REDUCED[replica].items():
            if parameter.requires_grad:
                raise ValueError(
                    f"{name} was frozen when DistributedDataParallel wrapped the model, and is trained now: DDP "
                    "reduces what was trained then alone, so each rank would step by its own gradient. Wrap it "
                    "unfrozen, and freeze it afterwards, with find_unused_parameters=True"
                )


def _never_reduced(replica: DistributedDataParallel) -> dict[str, Tensor]:
    ignored = replica.parameters_to_ignore
    held = {name: parameter for name, parameter in replica.module.named_parameters() if name not in ignored}
    if replica._get_ddp_logging_data()["num_parameter_tensors"] == len(held):
        return {}
    buckets = replica.reducer._get_zeros_like_grad_buckets()
    reduced = {parameter for bucket in buckets for parameter in bucket.parameters()}
    return {name: parameter for name, parameter in held.items() if parameter not in reduced}
