"""setup: parameters of a rehearsed script that no optimizer holds or that get no gradient, and modes left on."""

from __future__ import annotations

from collections.abc import Sequence

from course_lib._words import counted
from rehearse.report import Judgement, not_applicable
from rehearse.scripts.events import Backward, Delivered, Forward
from rehearse.scripts.journal import Journal


def judge_setup(journal: Journal) -> Judgement:
    if not journal.optimizers:
        return not_applicable("setup", "the script has no optimizer")
    judgement = Judgement()
    loose = journal.held_by_none
    if loose:
        judgement.find(
            "setup",
            f"No optimizer holds {named(loose)}, which {'get' if len(loose) > 1 else 'gets'} gradients.",
            "What no optimizer holds keeps the values that it has now; nothing says so.",
            "Make the optimizer when the model is complete: replace layers before that. If it is meant, set "
            "requires_grad=False.",
        )
    hidden = journal.in_no_module
    if hidden:
        many = f"{len(hidden):,} parameters that get gradients and are"
        those = many if len(hidden) > 1 else "a parameter that gets a gradient and is"
        judgement.find(
            "setup",
            f"No optimizer holds {those} in no module which the script calls; of shape {named(hidden)}.",
            "What no optimizer holds keeps the values that it has now; nothing says so.",
            "Keep layers in an nn.ModuleList and a parameter in a module, or name them to the optimizer. If it is "
            "meant, set requires_grad=False.",
        )
    for name in journal.modules_held_by_none:
        judgement.notes.append(f"setup: {name} gets gradients, and no optimizer holds any of its parameters")
    for number, optimizer in enumerate(journal.optimizers):
        if optimizer.without_gradient and not loose:
            names = named(optimizer.without_gradient)
            judgement.notes.append(
                f"setup: {names} of {journal.optimizer_name(number)} got no gradient in the real micro-batches"
            )
    _left_in_evaluation(judgement, journal)
    return judgement


def named(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"


def _left_in_evaluation(judgement: Judgement, journal: Journal) -> None:
    """Backward passes behind forwards in which fewer modules are in training mode than before."""
    usual: dict[int, int] = {}
    ahead: list[Forward] = []
    micro_batch = first = less = in_evaluation = 0
    evaluated: set[int] = set()
    used = journal.used_in_training()
    for at, event in enumerate(journal.events):
        if isinstance(event, Forward) and event.has_graph:
            ahead.append(event)
        elif isinstance(event, Forward):
            evaluated.add(journal.weights[event.module])
            ahead = []
        elif isinstance(event, Delivered):  # what no backward pass followed was an evaluation with a graph
            evaluated |= {journal.weights[one.module] for one in ahead if not one.training}
            ahead = []
        elif isinstance(event, Backward):
            micro_batch += 1
            # A teacher whose outputs are detached is no part of this pass.
            reached = set(event.reached)
            trained = [one for one in ahead if not reached or journal.optimizers_of[one.module] & reached]
            fewer = [one for one in trained if one.modes < usual.setdefault(one.module, one.modes)]
            # In training mode itself, with parts that are not, it has BatchNorm frozen on purpose.
            if at in used and any(journal.weights[one.module] in evaluated and not one.training for one in fewer):
                first, less = first or micro_batch, less + 1
            in_evaluation += bool(trained) and all(_is_evaluated(one, journal) for one in trained)
            ahead = []
    if micro_batch and in_evaluation == micro_batch:  # it may be meant
        judgement.notes.append(
            "setup: each backward pass is behind a forward in evaluation mode, without dropout and with BatchNorm's "
            "running statistics; if that is not meant, call model.train() ahead of the first one"
        )
    if less:
        judgement.find(
            "setup",
            f"The model is left in evaluation mode after an evaluation: from backward pass {first:,} on, "
            f"{counted(less, 'pass', 'passes')} of {micro_batch:,} are behind a forward without dropout, or with "
            "BatchNorm's running statistics.",
            "From then on it trains as another model: no dropout, and BatchNorm's statistics stand still.",
            "Call model.train() at the start of each epoch, or at the end of the evaluation.",
            at=first,
        )


def _is_evaluated(forward: Forward, journal: Journal) -> bool:
    return journal.parts_with_modes[forward.module] > 0 and not (forward.training or forward.modes)
