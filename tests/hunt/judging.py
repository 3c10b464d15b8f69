"""A drawn run, played: right, refused by a sentence before a batch was trained, no run at all, or wrong."""

from __future__ import annotations

import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.hunt.by_hand import Line, can_be_trained_by_hand, kept_lines, lines_of, trained_by_hand
from tests.hunt.pieces import DrawnRun
from tests.hunt.processes import End, Unfinished, played
from tests.hunt.script import script_of

SECONDS = 180.0
"""What a run may take, with all its lives."""
MAY_BE_REFUSED: dict[str, str] = {
    # what a refusal says: why it is one
    r"in the middle of an update": "some parameters have moved and others have not",
    r"ahead of the first step of its run": "there is no clean point yet",
    r"a mean over all of the epoch's batches": "what an epoch has gathered is in no checkpoint",
    r"which needs frequency=1: Lightning counts a larger one in batches": "updates that are skipped are no batches",
    r'tail="spread" cannot (share|deal)': "fewer samples than ranks: another tail is named",
}
"""A refusal that says none of these is a fault: else a library that refuses everything would pass."""
OF_A_LATER_EPOCH = r'tail="spread" cannot deal the \d+ samples to'
"""What a run on other ranks is told when that epoch comes: its sampler does not know that one comes."""
NOT_A_RUN = (
    r"Expected more than 1 value per channel",  # BatchNorm, of a batch of one
    r"`val_check_interval` \(\d+\) must be less than or equal",
    r"does not allow for gradient clipping because it performs unscaling",  # a fused one, beside a scaler
    r"Integer division with addcdiv",  # an average of BatchNorm's count of batches, on a GPU
)
"""What torch and Lightning refuse by themselves, whatever is beside it."""


@dataclass(frozen=True)
class Verdict:
    """What came of a run."""

    outcome: str
    """``"right"``, ``"refused"``, ``"no run"``, ``"wrong"`` or ``"unfinished"``."""
    why: str = ""


class Wrong(Exception):
    """A promise is broken."""


class Refused(Exception):
    """A life did not begin, and said why."""


class NoRun(Exception):
    """What was drawn is no run, with or without this library."""


def judge(run: DrawnRun, ends: float = math.inf) -> Verdict:
    """Play a run without a stop, and with its kills, and compare; until ``ends``, by ``time.monotonic()``."""
    with tempfile.TemporaryDirectory(prefix="hunt-", ignore_cleanup_errors=True) as folder:
        try:
            _judged(run, Path(folder), min(ends, time.monotonic() + SECONDS))
        except Wrong as wrong:
            return Verdict("wrong", str(wrong))
        except Refused as refused:
            return Verdict("refused", str(refused))
        except NoRun as no_run:
            return Verdict("no run", str(no_run))
        except Unfinished:
            return Verdict("unfinished")
    return Verdict("right")


def _judged(run: DrawnRun, folder: Path, ends: float) -> None:
    names: dict[str, Any] = {"__name__": "hunted"}
    exec(compile(script_of(run), "<the drawn run>", "exec"), names)
    whole_folder, stopped_folder = folder / "whole", folder / "stopped"
    whole_folder.mkdir()
    stopped_folder.mkdir()
    whole = _uninterrupted(run, names["life"], whole_folder, ends)
    whole_lines = kept_lines(whole_folder, [run.ranks[0]])
    if can_be_trained_by_hand(run):
        _compare_with_plain_torch(run, names, whole, whole_lines[0])
    _compare_samples(run, whole_lines, "uninterrupted")
    end, ranks_of_lives = _stopped(run, names["life"], stopped_folder, ends)
    lines = kept_lines(stopped_folder, ranks_of_lives)
    if not run.changes_ranks:
        _compare_batches(whole_lines, lines)
        was_over = not _trained(stopped_folder, len(ranks_of_lives) - 1, ranks_of_lives[-1])
        cut_short = run.max_steps != -1 or (was_over and run.stops_early != "")
        _leave_out_the_last_epochs_end(whole, end, was_over, cut_short)
        # A step that is skipped puts them back to before its own forward pass.
        if was_over or run.bad_sample is not None:
            _leave_out_the_other_ranks_statistics(whole[1:] + end[1:])
        # A ModelCheckpoint passes over what is validated at the step of its last save, and forgets that step; and what
        # ends one callback's hook of an epoch's end leaves out those of the others.
        same_step = run.val_check_interval is not None
        # One that is saved at an epoch's last batch has not seen its end, which a resume tells of.
        ahead_of_it = run.saves_the_best and run.saves != "every epoch"
        if same_step or ahead_of_it or any(kill.place == "epoch end" for kill in run.kills):
            for one in (*whole, *end):
                one.pop("best", None)
        _compare_ends(whole, end)
    _compare_samples(run, lines, "stopped")


def _uninterrupted(run: DrawnRun, life: Callable[..., Any], folder: Path, ends: float) -> list[Any]:
    arguments = folder, 0, run.ranks[0], run.workers[0], []
    end = played(life, run.ranks[0], arguments, ends, clean=run.device != "cpu")
    if end.values:
        return end.values
    _judge_what_others_refuse(end)
    sentence = _refusal(end)
    if sentence and not _trained(folder, 0, run.ranks[0]):
        _judge_refusal(sentence)
        raise Refused(sentence)
    raise Wrong(f"the uninterrupted run ends by an error: {end.error}\n{end.details}")


def _stopped(run: DrawnRun, life: Callable[..., Any], folder: Path, ends: float) -> tuple[list[Any], list[int]]:
    """Play all lives; what the last one returned, and the number of ranks of each."""
    parts = [[kill.arguments] for kill in run.kills]
    lives_to_come = [*parts, []]
    ranks_of_lives: list[int] = []
    while lives_to_come:
        kills_of_life, number = lives_to_come[0], len(ranks_of_lives)
        ranks, workers = run.ranks_of(min(number, len(parts))), run.workers_of(min(number, len(parts)))
        ranks_of_lives.append(ranks)
        arguments = folder, number, ranks, workers, kills_of_life
        end = played(life, ranks, arguments, ends, clean=run.device != "cpu")
        if end.values:
            return end.values, ranks_of_lives  # also where a kill was drawn behind the run's end
        if end.hung:
            raise Wrong(f"life {number} hangs: {end.details}")
        if run.changes_ranks:  # a batch of one may come then; on the same ranks, it is a fault
            _judge_what_others_refuse(end)
        refused = _refusal(end)
        if _was_killed(end, kills_of_life):
            del lives_to_come[0]
        elif re.search(OF_A_LATER_EPOCH, refused):
            raise Refused(refused)
        elif not refused or _trained(folder, number, ranks):
            raise Wrong(f"life {number} ends by an error: {end.error}\n{end.details}")
        else:
            _judge_refusal(refused)
            for path in folder.glob(f"life-{number}-*.jsonl"):
                path.unlink()  # it has trained nothing
            if not (newest := sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)):
                raise Refused(refused)
            newest[-1].unlink()  # a reader takes the one before it
    raise Wrong("the last life did not end")


def _was_killed(end: End, kills: list[Any]) -> bool:
    words_of_a_kill = ["Killed", "SIGTERMException", "a sample cannot be read", "DataLoader worker"]
    if any(of_rank is not None for *_, of_rank in kills):  # what the others meet then, where gloo tells them of it
        words_of_a_kill += ["Connection closed by peer", "Connection reset by peer"]
    # A worker that dies torch tells of by a signal: its exception may come anywhere, and become another one there.
    if any(place == "loader" and hard for _, place, hard, _ in kills):
        words_of_a_kill += ["ConnectionResetError", "ConnectionRefusedError", "EOFError"]
        if "exited unexpectedly" in end.details:  # and Lightning, which it met while it tore down, tears down again
            words_of_a_kill += ["TypeError", "Please call `iter(combined_loader)` first"]
    return not end.error or any(words in end.error for words in words_of_a_kill)


def _refusal(end: End) -> str:
    """The sentence of a refusal: raised by this library, or by Lightning's own kind of error for settings."""
    kind, _, sentence = end.error.partition(": ")
    files = re.findall(r'File "([^"]+)"', end.details)
    by_library = bool(files) and "course_lib" in files[-1]
    return sentence if by_library or kind in ("MisconfigurationException", "CheckpointError") else ""


def _judge_what_others_refuse(end: End) -> None:
    if any(re.search(pattern, end.error) for pattern in NOT_A_RUN):
        raise NoRun(end.error)


def _judge_refusal(sentence: str) -> None:
    if not any(re.search(pattern, sentence) for pattern in MAY_BE_REFUSED):
        raise Wrong(f"what the README admits is refused: {sentence}")


def _trained(folder: Path, life: int, ranks: int) -> bool:
    """Whether a rank has trained."""
    return any("number" in line for rank in range(ranks) for line in lines_of(folder, life, rank))


# ------------------------------------------------------------------------------------------------------- oracles


def _compare_with_plain_torch(run: DrawnRun, names: dict[str, Any], end: list[Any], lines: list[Line]) -> None:
    net = trained_by_hand(run, names["make_net"], names["make_optimizer"], lines)
    # BatchNorm takes the bias ahead of it away again: all but SGD step by the sign of what rounding leaves of its
    # gradient.
    means_nothing = {"0.bias", "1.running_mean"} if run.batch_norm and run.optimizer != "SGD" else set()
    for name, expected in net.state_dict().items():
        if name in means_nothing:
            continue
        got = end[0]["weights"][f"net.{name}"]
        if not torch.allclose(got, expected, rtol=1e-7, atol=1e-9):
            off = float((got.double() - expected.double()).abs().max())
            raise Wrong(f"{name} is off by {off:.2g} from the same batches in plain torch")


def _compare_batches(whole: list[list[Line]], stopped: list[list[Line]]) -> None:
    """The same samples with the same draws, micro-batch by micro-batch."""
    expected = [line for lines in whole for line in lines]
    got = [line for lines in stopped for line in lines]
    for wanted, line in zip(expected, got, strict=False):
        # json writes NaN as NaN, which equals nothing
        if str(wanted) != str(line):
            raise Wrong(f"micro-batch {wanted['number']} was {_shown(wanted)}, and after the stops {_shown(line)}")
    if len(expected) != len(got):
        raise Wrong(f"{len(expected)} micro-batches without a stop, {len(got)} with stops")


def _shown(line: Line) -> str:
    return f"epoch {line['epoch']}, indices {line['indices']}, x {line['x']}"


def _leave_out_the_last_epochs_end(whole: list[Any], stopped: list[Any], was_over: bool, cut_short: bool) -> None:
    """A run that is over within an epoch is not resumed to end that epoch: a Trainer returns at once."""
    for end in (*whole, *stopped):
        if cut_short:
            del end["counters"][1]  # current_epoch
            end.pop("best", None)
        if was_over:
            end.update(rates=[], schedules=[])


def _leave_out_the_other_ranks_statistics(ends: list[Any]) -> None:
    """A checkpoint holds the first rank's: the others take those over in their next forward pass, and none comes."""
    for end in ends:
        end["weights"] = {name: value for name, value in end["weights"].items() if ".running_" not in name}


def _compare_ends(whole: list[Any], stopped: list[Any]) -> None:
    for rank, (expected, got) in enumerate(zip(whole, stopped, strict=True)):
        for part in expected:
            difference = _difference(expected[part], got[part])
            if difference and (rank == 0 or part not in ("audited",)):
                raise Wrong(f"after the stops, {part} of rank {rank} differ: {difference}")


def _difference(expected: Any, got: Any, name: str = "") -> str:
    if isinstance(expected, torch.Tensor):
        if torch.equal(expected, got) or (expected.isnan() & got.isnan()).all():
            return ""
        return f"{name} by {float((expected.double() - got.double()).abs().max()):.2g}"
    if isinstance(expected, dict):
        if expected.keys() != got.keys():
            return f"{name} has {sorted(map(str, got))} and not {sorted(map(str, expected))}"
        return next(filter(None, (_difference(expected[k], got[k], f"{name}.{k}") for k in expected)), "")
    if isinstance(expected, list | tuple):
        if len(expected) != len(got):
            return f"{name} has {len(got)} and not {len(expected)}"
        pairs = enumerate(zip(expected, got, strict=True))
        return next(filter(None, (_difference(a, b, f"{name}[{i}]") for i, (a, b) in pairs)), "")
    return "" if expected == got else f"{name} {got!r} and not {expected!r}"


def _compare_samples(run: DrawnRun, lives: list[list[Line]], which: str) -> None:
    """Each epoch that was trained to its end has every sample once, but for a tail that is padded or dropped."""
    counts: dict[int, Counter[int]] = {}
    for lines in lives:
        for line in lines:
            counts.setdefault(line["epoch"], Counter()).update(i for i in line["indices"] if i < run.primary)
    ranks = {run.ranks_of(life) for life in range(len(run.kills) + 1)}
    if run.tail == "drop" and run.primary < (run.batch_size + run.sized) * max(ranks):
        return  # an epoch may have no whole step, of which Lightning tells
    may_miss = 0
    if run.tail == "drop":  # less than a batch of each rank; where their number changes, each number's share of it
        may_miss = (run.batch_size + run.sized) * sum(ranks) - 1
    cut_short = run.max_steps != -1 or run.limit_train_batches is not None or run.stops_early or not counts
    if not cut_short and (epochs := len(counts)) != run.max_epochs:
        raise Wrong(f"the {which} run trained {epochs} of {run.max_epochs} epochs")
    for epoch, count in counts.items():
        twice = sorted(i for i, times in count.items() if times > 1)
        if twice and run.tail != "pad":
            raise Wrong(f"in epoch {epoch}, the {which} run trained {twice} more than once")
        missing = sorted(set(range(run.primary)) - count.keys())
        if len(missing) > may_miss and not cut_short:
            raise Wrong(f"in epoch {epoch}, the {which} run trained {len(count)} of {run.primary}: not {missing}")
