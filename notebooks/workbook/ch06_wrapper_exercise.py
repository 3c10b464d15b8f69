"""What chapter 06 asks last: to repair a wrapper whose ranks cut different orders."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler

from course_lib._generators import generators_put_back
from workbook.exercises import PropertyExercise
from workbook.seeds_and_epochs import HASH, another_hash, global_states

Shard = Callable[..., list[list[int]]]
EPOCHS = [*range(130), 200, 256, 365, 500, 512, 1000, 1024, 4096, 10_000, 65_536, 100_000, 1_000_000]


def _part_of(
    shard: Shard, num_samples: int, num_replicas: int, rank: int, epoch: int, launched: int, batch_size: int = 2
) -> Any:
    """What one rank gets; its launcher has seeded the global generator with ``launched``."""
    torch.manual_seed(launched)
    batch_sampler = BatchSampler(RandomSampler(range(num_samples)), batch_size, drop_last=False)
    batches = list(shard(batch_sampler, num_replicas, rank, epoch=epoch))  # all are held, as by a loader with workers
    return [[int(index) for index in batch] for batch in batches]


def _parts_of(shard: Shard, num_samples: int, num_replicas: int, epoch: int = 0, batch_size: int = 2) -> list[Any]:
    """What each rank gets, where launchers seed each rank by its number."""
    return [
        _part_of(shard, num_samples, num_replicas, rank, epoch, launched=1000 + rank, batch_size=batch_size)
        for rank in range(num_replicas)
    ]


def _fault_of_shard(shard: Any) -> str | None:
    """What is wrong unless the ranks see every index, in one order for each epoch, and in as many batches each."""
    with generators_put_back():
        return _first_fault_of_shard(shard)


def _first_fault_of_shard(shard: Shard) -> str | None:
    for num_samples, num_replicas in ((8, 2), (20, 2), (24, 3)):
        ranks = _parts_of(shard, num_samples, num_replicas)
        lost, again = lost_and_again(ranks, num_samples)
        if lost or again:
            told = f"of {num_samples} indices on {num_replicas} ranks, {lost} are lost and {again} come again.\n"
            return told + _why_lost(shard)
    torch.manual_seed(3)
    torch.rand(1)  # a generator is more than its seed
    before = torch.get_rng_state()
    batches = shard(BatchSampler(RandomSampler(range(30)), 2, drop_last=False), 2, 0, epoch=0)
    states = [torch.get_rng_state(), *(torch.get_rng_state() for _ in batches)]  # also between two batches
    if not all(torch.equal(before, state) for state in states):
        return (
            "every index comes once, and torch's global generator is not as you found it: what draws from it next, "
            "dropout and augmentation, draws the same numbers on all ranks. Put it back with torch.random.fork_rng()."
        )
    here = _part_of(shard, 30, 2, 0, 3, launched=1)
    with another_hash():
        if _part_of(shard, 30, 2, 0, 3, launched=1) != here:
            return f"ranks are processes, and each would cut an order of its own.\n{HASH}"
    if fault := _fault_of_epochs(shard):
        return fault
    drawn = random.Random(0)
    goes_by_ranks = _goes_by_the_number_of_ranks(shard)
    corners = [(14, 2, 0, 2), (20, 3, 0, 2), (7, 2, 0, 2), (2, 3, 0, 2), (1, 4, 1, 1)]
    shapes = [(drawn.randint(1, 40), drawn.randint(1, 5), drawn.randint(0, 9), drawn.randint(1, 4)) for _ in range(195)]
    for num_samples, num_replicas, epoch, batch_size in [*corners, *shapes]:
        ranks = _parts_of(shard, num_samples, num_replicas, epoch, batch_size)
        where = f"of {num_samples} indices in batches of {batch_size} on {num_replicas} ranks"
        if fault := _fault_of_ranks(ranks, num_samples, batch_size):
            return f"{where}, {fault}"
        if goes_by_ranks:
            orders = _orders_by_either_deal(ranks, -(-num_samples // batch_size))
        else:
            orders = [_part_of(shard, num_samples, 1, 0, epoch, launched=1000, batch_size=batch_size)]
        if all(faults := [_fault_of_repeats(ranks, order) for order in orders]):
            return f"{where}, {faults[0]}"
    return _fault_of_another_sampler(shard)


def _fault_of_epochs(shard: Shard) -> str | None:
    parts = {epoch: _part_of(shard, 30, 1, 0, epoch, launched=5) for epoch in EPOCHS}
    if len({str(part) for part in parts.values()}) == 1:
        return "nothing is lost, and all epochs have one order: the epoch belongs in the seed."
    if all(part == sorted(part) for part in parts.values()):
        return (
            "nothing is lost, but in every epoch the batches come sorted, by the number of their first sample. Keep "
            "the order in which the wrapped sampler yields them."
        )
    of_order, of_batches = dict[str, int](), dict[frozenset[Any], int]()
    for epoch, part in parts.items():
        if (first := of_order.setdefault(str(part), epoch)) != epoch:
            return f"nothing is lost, but epoch {epoch} has the order of epoch {first}: each needs one of its own."
        if (first := of_batches.setdefault(frozenset(map(frozenset, part)), epoch)) != epoch:
            return (
                f"nothing is lost, but epoch {epoch} has the batches of epoch {first}, dealt in another order: the "
                "same samples meet again. Draw a new order in each epoch: the epoch belongs in the seed."
            )
    return None


class _OfAnotherClass:
    """A batch sampler that has what every one has, `iter` and `len`, and remembers what it yielded."""

    def __init__(self) -> None:
        self.yielded: list[list[int]] = []

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[list[int]]:
        for batch in torch.randperm(20).split(3):
            self.yielded.append(batch.tolist())
            yield batch.tolist()


def _fault_of_another_sampler(shard: Shard) -> str | None:
    theirs, ranks = _OfAnotherClass(), []
    try:
        for rank in (0, 1):
            torch.manual_seed(1000 + rank)
            ranks.append([[int(index) for index in batch] for batch in shard(theirs, 2, rank, epoch=3)])
    except AttributeError as error:
        return f"any batch sampler is to be wrapped, and of another class it raises {error}. All have `iter` and `len`."
    if any(batch not in theirs.yielded for batches in ranks for batch in batches):
        return "there are batches that the wrapped sampler does not yield: each rank takes whole batches, as they come."
    if lost := lost_and_again(ranks, 20)[0]:
        return f"of another class's 20 indices on 2 ranks, {lost} are lost.\n{ANY_CLASS}"
    return None


ANY_CLASS = (
    "Any batch sampler is to be wrapped, and one without a `sampler` draws from torch's global generator, which each "
    "rank has its own of: seed that one by the epoch while you make the list."
)


def _goes_by_the_number_of_ranks(shard: Shard) -> bool:
    """Whether one rank has other batches than three together, as where their number is in the seed."""
    for epoch in (0, 3):
        together = itertools.chain(*_parts_of(shard, 30, 3, epoch))
        if sorted(together) != sorted(_part_of(shard, 30, 1, 0, epoch, launched=1000)):
            return True
    return False


def _orders_by_either_deal(ranks: list[Any], num_batches: int) -> list[list[list[int]]]:
    """The batches in the order in which they were dealt: in turn, or in a piece for each rank."""
    in_turn = itertools.chain(*zip(*ranks, strict=True))
    return [list(itertools.islice(dealt, num_batches)) for dealt in (in_turn, itertools.chain(*ranks))]


def _fault_of_repeats(ranks: list[Any], order: list[list[int]]) -> str | None:
    dealt = list(itertools.chain(*ranks))
    wanted = list(itertools.islice(itertools.cycle(order), len(dealt)))
    if sorted(dealt) == sorted(wanted):
        return None
    again, first = (batches.copy() for batches in (dealt, wanted[len(order) :]))
    for batch in order:
        again.remove(batch)
    return f"{again} come again, and the first batches of the order are {first}: repeat the first ones."


def _fault_of_ranks(ranks: list[Any], num_samples: int, batch_size: int) -> str | None:
    lost, again = lost_and_again(ranks, num_samples)
    if lost:
        return f"{lost} are lost: the batches that do not divide are dropped. Repeat the first ones instead."
    counts = [len(batches) for batches in ranks]
    if len(set(counts)) > 1:
        told = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
        return f"the ranks have unequal numbers of batches ({told}): they get out of step, and the run hangs."
    if not all(batch for batches in ranks for batch in batches):
        return "a batch is empty, and its mean loss is NaN: each rank takes whole batches, and repeats the first ones."
    for size in {len(batch) for batches in ranks for batch in batches} - {batch_size, num_samples % batch_size}:
        return f"a batch has {size}: each rank takes whole batches of the wrapped sampler, none is cut or joined."
    needed = -(-num_samples // batch_size)
    repeated = -needed % len(ranks)
    if sum(counts) > needed + repeated or again > repeated * batch_size:
        return f"{again} come again: repeat as few batches as make the ranks equal, here {repeated}."
    return None


def lost_and_again(ranks: list[Any], num_samples: int) -> tuple[int, int]:
    seen = Counter(index for batches in ranks for batch in batches for index in batch)
    return num_samples - len(seen), sum(seen.values()) - len(seen)


def _why_lost(shard: Shard) -> str:
    held = list(shard(_unshuffled(), 2, 0, epoch=0))
    if len(held) > 1 and len(set(map(id, held))) == 1:
        return ONE_LIST
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002
    others = global_states()[1:]
    first, second = (_part_of(shard, 8, 2, 0, 0, launched) for launched in (1, 2))
    if others != global_states()[1:]:
        return "This seeds Python's or NumPy's generator, but RandomSampler draws from torch's."
    if first == second and _part_of(shard, 8, 2, 1, 0, launched=1) == first:
        return "All ranks take the same batches: each needs its own share of them."
    if any(lost_and_again([shard(_unshuffled(), 2, rank, epoch=0) for rank in (0, 1)], 8)):
        return "Also where nothing is shuffled: the ranks' shares overlap, or leave batches out. Look at the slice."
    if first == second:
        return "The order is seeded, but the ranks do not cut the same one: seed from the epoch, and not from the rank."
    return "Each rank shuffles with its own generator, so they cut different orders: give all ranks one order."


ONE_LIST = (
    "All batches are one list, which is written over: a loader with workers holds several, and all would be the last."
)


def _unshuffled() -> BatchSampler:
    return BatchSampler(range(8), 2, drop_last=False)


def seed_of(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def _in_turn(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    return list(batch_sampler)[rank::num_replicas]


def _by_the_global_seed(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    torch.manual_seed(epoch)
    return _in_turn(batch_sampler, num_replicas, rank, epoch)


def _by_pythons_seed(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    random.seed(epoch)
    return _in_turn(batch_sampler, num_replicas, rank, epoch)


def _the_first_share(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(epoch))
        return list(batch_sampler)[::num_replicas]


def _by_the_ranks_seed(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(epoch, rank))
        return _in_turn(batch_sampler, num_replicas, rank, epoch)


def _by_a_fixed_seed(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _in_turn(batch_sampler, num_replicas, rank, epoch)


def _by_the_hash_of_a_text(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hash(f"epoch {epoch}") % 2**63)
        return _in_turn(batch_sampler, num_replicas, rank, epoch)


def _in_uneven_turns(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(epoch))
        return _in_turn(batch_sampler, num_replicas, rank, epoch)


def _in_chunks(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(epoch))
        batches = list(batch_sampler)
    share = len(batches) // num_replicas
    return batches[rank * share : (rank + 1) * share]


def _one_order(batch_sampler: Any, epoch: int) -> list[list[int]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(epoch))
        return list(batch_sampler)


def _sorted(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    return sorted(_one_order(batch_sampler, epoch))[rank::num_replicas]


def _padded_with_nothing(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    batches = _one_order(batch_sampler, epoch)
    batches += [[]] * (-len(batches) % num_replicas)
    return batches[rank::num_replicas]


def _cut_in_pieces(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    return [batch[rank::num_replicas] for batch in _one_order(batch_sampler, epoch)]


def _each_order_twice(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    return _in_uneven_turns(batch_sampler, num_replicas, rank, epoch // 2)


def _repeated_once(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    batches = _one_order(batch_sampler, epoch)
    batches += batches[: -len(batches) % num_replicas]  # one batch is not enough for two that are missing
    return batches[rank::num_replicas]


def _by_the_seed_put_back(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    before = torch.initial_seed()
    torch.manual_seed(seed_of(epoch))
    batches = _in_turn(batch_sampler, num_replicas, rank, epoch)
    torch.manual_seed(before)  # the generator is at its beginning again, and not where it was
    return batches


def _repeats_the_last(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    batches = _one_order(batch_sampler, epoch)
    batches += [batches[-1]] * (-len(batches) % num_replicas)
    return batches[rank::num_replicas]


def _into_one_list(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> Iterator[list[int]]:
    given: list[int] = []
    for batch in _one_order(batch_sampler, epoch)[rank::num_replicas]:
        given[:] = batch
        yield given


def _neighbours(batch_sampler: Any, num_replicas: int, rank: int, epoch: int) -> list[list[int]]:
    return _one_order(batch_sampler, epoch)[rank : rank + num_replicas]


one_order_for_all_ranks = PropertyExercise(
    "shard",
    _fault_of_shard,
    {
        "Each rank shuffles with its own generator": _in_turn,
        "RandomSampler draws from torch's": _by_pythons_seed,
        "seed from the epoch, and not from the rank": _by_the_ranks_seed,
        "All ranks take the same batches": _the_first_share,
        "torch's global generator is not as you found it": _by_the_global_seed,
        "as you found it: what draws from it next": _by_the_seed_put_back,
        HASH: _by_the_hash_of_a_text,
        "all epochs have one order": _by_a_fixed_seed,
        "repeat the first ones.": _repeats_the_last,
        "the batches that do not divide are dropped": _in_chunks,
        "the ranks have unequal numbers of batches (rank 0: 4, rank 1: 3)": _in_uneven_turns,
        "in every epoch the batches come sorted": _sorted,
        "Also where nothing is shuffled": _neighbours,
        ONE_LIST: _into_one_list,
        "but epoch 1 has the order of epoch 0": _each_order_twice,
        "of 14 indices in batches of 2 on 2 ranks, a batch is empty": _padded_with_nothing,
        "of 14 indices in batches of 2 on 2 ranks, a batch has 1: each rank takes whole batches": _cut_in_pieces,
        "on 3 ranks, the ranks have unequal numbers of batches (rank 0: 1, rank 1: 1, rank 2: 0)": _repeated_once,
    },
)
