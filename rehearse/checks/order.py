"""order: whether each epoch has an order of its own, and all ranks draw the same."""

from __future__ import annotations

from collections.abc import Sequence

from rehearse.checks.dealt import Dealt
from rehearse.report import Judgement, not_applicable

FEWEST = 8
"""Samples of a rank from which on two shuffled epochs are not alike by chance."""


def judge_order(dealt: Dealt) -> Judgement:
    """The epochs of one rank."""
    if dealt.why_not:
        return Judgement(not_judged={"order": dealt.why_not})
    if dealt.stream:
        return not_applicable("order", "a stream has no indices")
    orders = [dealt.epoch(number) for number in range(len(dealt.epochs))]
    if dealt.overfits or len(orders) < 2 or len(orders[0]) < FEWEST:
        return Judgement()
    twice = [(a, b) for b in range(len(orders)) for a in range(b) if orders[a] == orders[b]]
    if not twice:
        return Judgement()
    if (not dealt.draws and not dealt.set_epoch_would_shuffle) or all(order == sorted(order) for order in orders):
        return Judgement(notes=["order: nothing shuffles, every epoch has the same order"])
    first, again = twice[0]
    if dealt.reloads:
        cause = "the loader that is made again in each epoch starts its generator at the same seed"
        cure = "Seed the new loader's generator by SeedSequence([seed, trainer.current_epoch])."
    elif dealt.set_epoch_would_shuffle:
        cause = "its sampler has set_epoch, and the Trainer's call does not arrive there"
        cure = (
            "A Trainer calls set_epoch of loader.sampler and of loader.batch_sampler.sampler: give the batch sampler a "
            "property sampler that is the one with set_epoch, or use one of course_lib.samplers."
        )
    else:
        cause = "its sampler starts its generator at the same seed whenever it is asked"
        cure = "Draw the order from SeedSequence([seed, epoch]), with the epoch that set_epoch brings."
    says = f"Epochs {first} and {again} have the same shuffled order, {_start(orders[first])}: {cause}."
    means = "The samples that share a batch are the same in each of these epochs; nothing says so."
    return Judgement().find("order", says, means, cure)


def _start(order: Sequence[int]) -> str:
    return f"[{', '.join(map(str, order[:4]))}, …]"
