"""What PyTorch's CUDA allocator takes from the device for a sequence of allocations and frees.

Tensors don't get their bytes from the device one by one: the allocator takes segments, cuts them into blocks, and keeps
what is freed. The rule: *a request is rounded up to 512 bytes. Up to 1 MiB it comes from segments of 2 MiB, below
10 MiB from segments of 20 MiB, and from there on from a segment of its own, in steps of 2 MiB. The allocator takes the
smallest cached block that fits, and cuts it if enough remains.*

This imitates the default settings, on one stream, without `PYTORCH_CUDA_ALLOC_CONF`. It doesn't imitate what the
allocator does once the device is full: it gives cached segments back and asks again.

Source: pytorch/pytorch, ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass

MIB = 2**20
ROUND = 512
SMALL = 1 * MIB
SMALL_SEGMENT = 2 * MIB
MIDDLE_SEGMENT = 20 * MIB
LARGE = 10 * MIB


class CachingAllocator:
    """Hands out blocks.

    Attributes:
        allocated: Bytes in blocks that are in use (``torch.cuda.memory_allocated``).
        reserved: Bytes in segments (``torch.cuda.memory_reserved``); never shrinks here.
    """

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0
        self._used: dict[Hashable, _Block] = {}
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self._numbers = 0

    def allocate(self, key: Hashable, nbytes: int) -> int:
        """Return the bytes of the block, 0 for a request of 0 bytes. ``free`` needs the same ``key``."""
        if nbytes <= 0:
            return 0
        size = rounded(nbytes)
        small = size <= SMALL
        free = self._free[small]
        place = bisect_left(free, (size,))
        block = free.pop(place)[2] if place < len(free) else self._segment(size, small)
        rest = block.size - size
        if rest >= ROUND if small else rest > SMALL:
            remainder = _Block(self._number(), rest, small, before=block, after=block.after)
            if block.after:
                block.after.before = remainder
            block.size, block.after = size, remainder
            self._cache(remainder)
        block.free = False
        self._used[key] = block
        self.allocated += block.size
        return block.size

    def free(self, key: Hashable) -> int:
        """Return the bytes of the block that was given back, 0 where there was none."""
        block = self._used.pop(key, None)
        if block is None:
            return 0
        size = block.size
        self.allocated -= size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._free[block.small].remove((neighbour.size, neighbour.number, neighbour))
                block = _joined(block, neighbour)
        self._cache(block)
        return size

    def _segment(self, size: int, small: bool) -> _Block:
        if small:
            taken = SMALL_SEGMENT
        elif size < LARGE:
            taken = MIDDLE_SEGMENT
        else:
            taken = -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        self.reserved += taken
        return _Block(self._number(), taken, small)

    def _cache(self, block: _Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.number, block))

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


def rounded(nbytes: int) -> int:
    """A request as the allocator counts it: a multiple of 512 bytes."""
    return -(-nbytes // ROUND) * ROUND


@dataclass(slots=True, eq=False)
class _Block:
    number: int
    size: int
    small: bool
    before: _Block | None = None
    after: _Block | None = None
    free: bool = False


def _joined(block: _Block, neighbour: _Block) -> _Block:
    first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
    first.size += second.size
    first.after = second.after
    if second.after:
        second.after.before = first
    return first
