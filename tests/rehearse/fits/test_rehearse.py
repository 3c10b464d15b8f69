"""A rehearsal finds each planted fault under its check and nothing in a right run, and leaves the run as it was."""

import hashlib
import inspect
import json
import os
import random
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import randperm
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, OneCycleLR, SequentialLR
from torch.utils.data import DataLoader, Sampler

from course_lib.callbacks import ExactAccumulation, SkipBadSteps
from course_lib.launch import run_ranks
from rehearse import CHECKS, NotReady, Rehearsal, RehearsalReport, assert_ready, judge, rehearse, rehearse_loop
from rehearse.__main__ import main
from rehearse._checkpoints import is_lightnings
from rehearse._processes import cpu_seconds, is_ready, seconds_without_a_core
from rehearse.checks.dealt import draws_counted, draws_found
from rehearse.runs import copies, few_samples
from rehearse.runs.copies import try_on_copies
from rehearse.runs.walks import walk
from tests.notebook_rules import ROOT
from tests.rehearse.fits.parts import Net, Points, Scheduled, fitted, loader, quiet_trainer, script, scripts

FAULTS = [name for name in scripts("faults") if script("faults", name).CHECK in CHECKS]


def judged(module, run, **options) -> RehearsalReport:
    options.setdefault("expect", getattr(module, "EXPECT", None))
    if getattr(module, "LOOP", False):
        return rehearse_loop(**run, **{name: value for name, value in options.items() if name != "deep"})
    return rehearse(*run, **options)


DEEP = ("growth", "resume")
"""Checks whose faults are looked for with ``deep=True``."""


@pytest.mark.parametrize("check", CHECKS)
def test_a_fault_of_each_check_is_found_and_none_in_its_right_twin(check):
    """The first fault of the check, judged by that check alone."""
    fault = next(fault for fault in (script("faults", name) for name in FAULTS) if check == fault.CHECK)
    options = {"deep": check in DEEP, "skip": {*CHECKS} - {check}}
    found = judged(fault, fault.make_run(), **options).findings
    assert [finding.check for finding in found] == [check]
    assert judged(fault, fault.make_twin(), **options).ok


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_under_its_check_alone(name):
    fault = script("faults", name)
    report = judged(fault, fault.make_run(), deep=fault.CHECK in DEEP)
    assert [finding.check for finding in report.findings] == [fault.CHECK], str(report)
    assert any(character.isdigit() for character in report.findings[0].says)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_nothing_is_found_in_its_right_twin(name):
    fault = script("faults", name)
    report = judged(fault, fault.make_twin(), deep=fault.CHECK in DEEP)
    assert report.ok, str(report)


@pytest.mark.thorough
@pytest.mark.parametrize("name", scripts("right"))
def test_nothing_is_found_in_a_right_run(name):
    right = script("right", name)
    report = judged(right, right.make_run())
    assert report.ok, str(report)
    assert not any("Error" in why for why in report.not_judged.values()), str(report)


class SumAndCount(Net):
    def training_step(self, batch, batch_idx):
        x, y, indices = batch
        labelled = indices % 5 != 0
        loss_sum = torch.nn.functional.mse_loss(self(x[labelled]), y[labelled], reduction="sum")
        return {"loss": loss_sum, "count": labelled.sum()}


@pytest.mark.thorough
def test_a_sum_and_its_count_may_come_in_a_dict():
    trainer = quiet_trainer(accumulate_grad_batches=3, callbacks=[ExactAccumulation()])
    report = rehearse(trainer, SumAndCount(), loader(61))
    assert report.ok and "window" in report.passed, str(report)


@pytest.mark.parametrize("package", ["proj.model", "proj.core", "lightning_models.core"])
def test_a_hook_is_lightnings_where_it_is_the_function_of_its_class(package: str):
    """Whatever the package of the run's own module is called."""
    text = "class Lit(Net):\n    def on_after_backward(self): pass"
    names = {"__name__": f"{package}.lit", "Net": Net}
    exec(text, names)
    module = names["Lit"]()
    assert module.on_after_backward.__module__ == f"{package}.lit"
    assert not is_lightnings(module, "on_after_backward") and not is_lightnings(module, "training_step")
    assert is_lightnings(module, "validation_step") and is_lightnings(module, "on_train_start")


class LabelledMean(Net):
    """Of the batches of eight, each has as many labels as its place in ``labels`` says."""

    def __init__(self, labels):
        super().__init__()
        self.labels = labels

    def training_step(self, batch, batch_idx):
        x, y, indices = batch
        mask = (indices % 8 < torch.tensor(self.labels)[indices // 8]).float()
        return ((self(x) - y).square().mean(1) * mask).sum() / mask.sum()


def window_of(labels, **flags):
    """What a rehearsal says of a run in windows of four of these batches."""
    data = loader(8 * len(labels), shuffle=False)
    return rehearse(quiet_trainer(accumulate_grad_batches=4, max_epochs=1, **flags), LabelledMean(labels), data)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "flags",
    [{"limit_train_batches": 8}, {"limit_train_batches": 0.5}, {"overfit_batches": 8}, {"overfit_batches": 0.5}],
)
def test_the_last_window_is_that_of_the_limited_epoch(flags):
    (finding,) = window_of([4] * 4 + [1, 2, 3, 8] + [4] * 8, **flags).findings
    assert finding.check == "window" and finding.says.startswith("The last window of an epoch")
    assert "window" in window_of([4] * 8 + [1, 2, 3, 8] * 2, **flags).passed


@pytest.mark.thorough
@pytest.mark.parametrize("labels", [[0, 2, 3, 8], [3, 8, 0, 2], [4, 4, 4, 4, 0, 2, 3, 8]])
def test_a_window_whose_gradient_is_not_a_number_is_found(labels):
    (finding,) = window_of(labels).findings
    assert finding.check == "window" and "with a gradient that is NaN" in finding.says


@pytest.mark.thorough
def test_a_window_without_a_label_is_not_judged_if_it_ruins_the_weights():
    assert "window" not in window_of([0, 0, 0, 0], callbacks=[SkipBadSteps()]).failed
    report = window_of([0, 0, 0, 0])
    assert report.not_judged["window"].endswith("its step makes the weights NaN") and not report.ok


@pytest.mark.thorough
def test_growth_is_looked_for_in_a_run_whose_schedule_ends_before():
    model = Scheduled(lambda optimizer: OneCycleLR(optimizer, max_lr=0.05, total_steps=6))
    report = rehearse(quiet_trainer(max_epochs=1), model, loader(40), deep=True, skip=["resume"])
    assert report.ok and "growth" in report.passed, str(report)


# ------------------------------------------------------------------------------------- it leaves the run alone


def generators() -> list[object]:
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    return [python, numpy[1].tolist(), numpy[2], torch.get_rng_state().tolist()]


def weights(model) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def whole_run(judge: bool, seed: int, workers: int) -> tuple[object, ...]:
    """What a run ends with, and what it was given on its way, with or without a check before it."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    generator = torch.Generator().manual_seed(seed) if seed % 2 else None
    data = DataLoader(Points(40), 8, shuffle=True, num_workers=workers, generator=generator)
    model = Scheduled(lambda optimizer: CosineAnnealingLR(optimizer, 10))
    trainer = quiet_trainer(max_epochs=2)
    if judge:
        assert rehearse(trainer, model, data).ok
    before = generators(), weights(model), None if generator is None else generator.get_state().tolist()
    record = fitted(trainer, model, data)
    return *before, weights(model), record.samples, record.rates, generators()


@pytest.mark.thorough
@pytest.mark.parametrize(("seed", "workers"), [(0, 0), (1, 0), (2, 2), (3, 2)])
def test_a_run_after_it_is_the_run_without_it(seed, workers):
    assert whole_run(True, seed, workers) == whole_run(False, seed, workers)


def of_two_ranks(rank: int, judge: bool) -> tuple[object, ...]:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    model = Scheduled(lambda optimizer: CosineAnnealingLR(optimizer, 6))
    callbacks = [Rehearsal()] if judge else []
    trainer = quiet_trainer(max_epochs=2, devices=2, strategy="ddp", callbacks=callbacks)
    record = fitted(trainer, model, loader(40, 8))
    if judge:
        assert callbacks[0].report.facts["ranks"] == 2
    return weights(model), record.samples, record.rates, generators()


@pytest.mark.thorough
def test_a_run_on_two_ranks_is_the_same_with_the_callback():
    with_it, without = (run_ranks(of_two_ranks, 2, args=(judge,), timeout=120) for judge in (True, False))
    assert [result.value for result in with_it] == [result.value for result in without]
    assert with_it[0].value[1] != with_it[1].value[1]


class Writes(Net):
    """Appends to a file in each step, and writes another by torch."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def training_step(self, batch, batch_idx):
        with (self.folder / "log.txt").open("a") as file:
            file.write("step\n")
        return super().training_step(batch, batch_idx)

    def on_train_start(self):
        torch.save({}, str(self.folder / "weights.pt"))


@pytest.mark.thorough
def test_no_file_is_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.txt").write_text("before\n")
    trainer = quiet_trainer(logger=True, enable_checkpointing=True, enable_progress_bar=True)
    assert rehearse(trainer, Writes(tmp_path), loader()).ok is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt"]
    assert (tmp_path / "log.txt").read_text() == "before\n"


@pytest.mark.thorough
def test_no_process_is_left_and_nothing_is_printed(capfd):
    rehearse(quiet_trainer(), Net(), loader(num_workers=2, persistent_workers=True))
    captured = capfd.readouterr()
    assert captured.out == "" and "Epoch" not in captured.err
    children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "comm="], capture_output=True, text=True).stdout
    assert "pt_data_worker" not in children


# ------------------------------------------------------------------------------------- its own machinery


class InUseWhereItArrives:
    """As a tensor on a GPU: where it is unpickled, CUDA is in use."""

    def __setstate__(self, state: dict[str, object]) -> None:
        torch.cuda.is_initialized = lambda: True


@pytest.fixture(params=["forks", "forks of another process", "a process for each"])
def cargo(request, monkeypatch):
    """What the trials hold: it decides how they are tried."""
    if request.param != "forks":
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    held = InUseWhereItArrives() if request.param == "a process for each" else None
    if held is not None:
        held.state = 1  # without a state, __setstate__ is not called
    return held


@pytest.mark.thorough
def test_a_trial_that_hangs_ends_with_its_seconds_and_the_others_answer(cargo):
    began = time.monotonic()
    slow, quick = try_on_copies([lambda _, held=cargo: time.sleep(600), lambda _, held=cargo: 7], seconds=1.0)
    assert slow.error in ("it did nothing for 1 s", "it did not finish in 1 s") and quick.value == 7
    assert time.monotonic() - began < 300  # a server may have to start first, on a busy machine


@pytest.mark.parametrize(
    ("used", "waited", "why"),
    [
        (lambda now: 0.0, lambda now: 0.0, "it did nothing for 8 s"),
        (lambda now: 0.01 * now, lambda now: now, ""),  # ready, and the cores are others'
        (lambda now: now, lambda now: 5.0 * (now < 9), ""),  # threads that had waited have ended
        (lambda now: 2 * now, lambda now: 0.0, "it did not finish in 30 s"),
    ],
)
def test_a_trial_that_has_no_core_does_not_do_nothing(monkeypatch, used, waited, why):
    clock = [0.0]
    monkeypatch.setattr(copies.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(copies, "cpu_seconds", lambda _: used(clock[0]))
    monkeypatch.setattr(copies, "seconds_without_a_core", lambda _: waited(clock[0]))
    monkeypatch.setattr(copies, "is_ready", lambda _: False)
    child = copies._Child(pid=1, pipe=0, seconds=30.0, began=0.0)
    ended = None
    while not ended and clock[0] < 25:
        clock[0] += 1
        ended = child.over()
    assert (ended.error if ended else "") == why
    assert not ended or (ended.timed_out and ended.hung == ("nothing" in why))


@pytest.mark.parametrize(
    ("ready", "reads", "seconds_between_looks"),
    [(True, False, 1.0), (False, True, 1.0), (False, False, 12.0)],
    ids=["waits for a core since long", "waited to be read", "was not looked at"],
)
def test_a_trial_that_waits_for_others_does_not_do_nothing(monkeypatch, ready, reads, seconds_between_looks):
    clock = [0.0]
    monkeypatch.setattr(copies.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(copies, "cpu_seconds", lambda _: 0.0)
    monkeypatch.setattr(copies, "seconds_without_a_core", lambda _: 0.0)
    monkeypatch.setattr(copies, "is_ready", lambda _: ready)
    reading, writing = os.pipe()
    child = copies._Child(pid=1, pipe=reading, seconds=30.0, began=0.0)
    for _ in range(7 if seconds_between_looks > 1 else 25):
        clock[0] += seconds_between_looks
        if reads:
            os.write(writing, b"a part")
            assert copies._read(child)
        assert child.over() is None
    os.close(reading)
    os.close(writing)


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no kernel tells in what state a thread is")
def test_who_computes_is_ready_and_who_sleeps_is_not():
    # The kernel counts in hundredths of a second, and a fast machine starts Python in less than one.
    programs = ["while True: pass", "import time\nwhile time.process_time() < 0.1: pass\ntime.sleep(600)"]
    computes, sleeps = (subprocess.Popen([sys.executable, "-c", program]) for program in programs)
    try:
        while not is_ready(computes.pid) or is_ready(sleeps.pid) or cpu_seconds(sleeps.pid) == 0:
            time.sleep(0.05)
    finally:
        for one in (computes, sleeps):
            one.kill()
            one.wait()


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="no kernel tells how long a thread waits")
def test_who_shares_a_core_waits_for_it():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
        while sum(cpu_seconds(one.pid) for one in busy) < 0.6:
            time.sleep(0.05)
        waited = [seconds_without_a_core(one.pid) for one in busy]
    finally:
        os.sched_setaffinity(0, cores)
        for one in busy:
            one.kill()
            one.wait()
    assert sum(waited) > 0.3 and seconds_without_a_core(busy[0].pid) == 0.0


@pytest.mark.thorough(but=2)
def test_a_trial_that_dies_or_raises_says_so(cargo):
    def raises(folder: Path):
        raise KeyError("no such layer")

    died, raised = try_on_copies([lambda _, held=cargo: os._exit(3), raises], seconds=10.0)
    assert died.error.startswith("its process ended")
    assert ("exit code 3" if cargo is None else "exited with code 3") in died.error
    assert raised.error.startswith("KeyError: 'no such layer' (test_rehearse.py, line ")


@pytest.mark.thorough(but=2)
def test_a_trial_changes_its_copy_only(cargo):
    values = [1]
    random.seed(0)
    state = random.getstate()
    changed, same = try_on_copies(
        [lambda _, held=cargo: (values.append(2), random.random(), list(values))[2], lambda _, held=cargo: values],
        seconds=10.0,
    )
    assert changed.value == [1, 2] and same.value == values == [1] and random.getstate() == state


def test_a_trial_sees_no_gpu(monkeypatch):
    for module in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(module, "is_available", lambda: True)
        monkeypatch.setattr(module, "device_count", lambda: 8)

    def gpus(folder: Path) -> list[object]:
        return [(module.is_available(), module.device_count()) for module in (torch.cuda, torch.accelerator)]

    assert try_on_copies([gpus], seconds=10.0)[0].value == [(False, 0), (False, 0)]
    assert gpus(Path()) == [(True, 8), (True, 8)]


@pytest.mark.thorough
def test_a_trial_does_not_outlive_its_process():
    script = """
import os, sys, time
from rehearse.runs import copies
from rehearse.runs.copies import try_on_copies

def hangs(folder):
    os.write(int(sys.argv[1]), b"it hangs")
    time.sleep(120)

try_on_copies([hangs], seconds=120.0)
"""
    reading, writing = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", script, str(writing)], pass_fds=[writing])
    os.close(writing)
    assert os.read(reading, 10) == b"it hangs"
    process.kill()
    process.wait()
    ended, _, _ = select.select([reading], [], [], 30)
    assert ended and os.read(reading, 10) == b""  # nobody holds the pipe's other end
    os.close(reading)


class Hangs(Net):
    begun = -1

    def training_step(self, batch, batch_idx):
        os.write(self.begun, b".")
        time.sleep(60)


@pytest.mark.thorough
def test_a_run_that_hangs_in_a_check_is_judged_in_the_others():
    reading, writing = os.pipe()
    hangs = Hangs()
    hangs.begun = writing
    report = rehearse(quiet_trainer(), hangs, loader(), seconds=2)
    assert report.not_judged["setup"] == report.not_judged["bad_step"] == "it did nothing for 2 s"
    assert {"length", "horizon", "dealing", "order"} <= set(report.passed)
    assert len(os.read(reading, 100)) == 2, "its last batch and its validation would hang as well: they are not tried"
    os.close(reading)
    os.close(writing)


class OfAGpu(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).to("cuda:7")


class Huge(Points):
    def __len__(self):
        return 10**9


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "data", "unjudged"),
    [
        (OfAGpu(), loader(), {"setup"}),
        (Net(), DataLoader(Huge(), 8), {"dealing", "order", "changes"}),
        (Net(), [torch.zeros(2)], {"dealing", "order", "changes", "setup"}),
    ],
    ids=["a step for a GPU", "a billion samples", "a list"],
)
def test_what_cannot_be_tried_is_listed_with_its_reason(model, data, unjudged):
    report = rehearse(quiet_trainer(), model, data, seconds=10)
    assert report.ok is (None if report.failed else True), str(report)
    assert unjudged <= set(report.not_judged) and all(report.not_judged.values())
    assert json.loads(json.dumps(report.to_dict()))["ok"] is report.ok


class OneOrder(Sampler):
    """``drawn_by(n)`` gives the same order whenever the sampler is asked."""

    def __init__(self, drawn_by):
        self.drawn_by = drawn_by

    def __iter__(self):
        return iter(self.drawn_by(64))

    def __len__(self):
        return 64


def by_name(n):
    return randperm(n, generator=torch.Generator().manual_seed(0)).tolist()


def by_a_generator_of_its_own(n):
    order = list(range(n))
    random.Random(0).shuffle(order)
    return order


def by_hand(n):
    return [*range(1, n, 2), *range(0, n, 2)]


@pytest.mark.thorough
@pytest.mark.parametrize(("drawn_by", "found"), [(by_name, 1), (by_a_generator_of_its_own, 1), (by_hand, 0)])
def test_one_order_for_all_epochs_is_a_fault_only_where_it_was_drawn(drawn_by, found):
    report = rehearse(quiet_trainer(), Net(), loader(shuffle=None, sampler=OneOrder(drawn_by)))
    assert [finding.check for finding in report.findings] == ["order"] * found


def test_draws_are_counted_the_same_where_they_were_looked_for_before():
    def counted():
        with draws_counted() as draws:
            randperm(4)  # a name of this module's own
            random.Random(0).shuffle([1, 2])
            np.random.default_rng(0)
            return draws()

    with draws_found():
        found_before = counted()
    assert found_before == counted() == 3


# ------------------------------------------------------------------------------------- the ways in


def wrong_run():
    model = Scheduled(lambda optimizer: CosineAnnealingLR(optimizer, 24))
    return quiet_trainer(accumulate_grad_batches=4), model, loader()


def right_run():
    return quiet_trainer(), Net(), loader()


@pytest.mark.thorough
def test_assert_ready_raises_the_report():
    assert_ready(*right_run())
    with pytest.raises(NotReady, match="24 is the number of micro-batches of the run") as raised:
        assert_ready(*wrong_run())
    assert raised.value.report.findings[0].check == "horizon"


def test_the_callback_raises_before_the_first_batch_or_warns():
    trainer, model, data = wrong_run()
    trainer.callbacks.append(Rehearsal())
    before = weights(model)
    with pytest.raises(NotReady):
        trainer.fit(model, data)
    assert weights(model) == before and trainer.global_step == 0
    trainer, model, data = wrong_run()
    trainer.callbacks.append(Rehearsal(strict=False))
    with pytest.warns(UserWarning, match="Not ready: 1 finding"):
        trainer.fit(model, data)
    assert trainer.global_step == 6


def unknown_run():
    return quiet_trainer(), OfAGpu(), loader()


def nothing_left_to_do():
    sys.exit(0)


def no_data():
    sys.exit("train.npz is missing")


SAID = {
    "right_run": (0, "Ready."),
    "wrong_run": (1, "Not ready: 1 finding."),
    "unknown_run": (2, "Ready, but nobody judged: setup, bad_step."),
    "no_run": (2, "Could not judge"),
    "nothing_left_to_do": (2, "nothing_left_to_do ends by itself (exit code 0) and makes no run"),
    "no_data": (2, "no_data ends by itself (train.npz is missing) and makes no run"),
}


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("function", SAID)
def test_the_shell_command_says_it_by_its_exit_code(function, capsys):
    code, says = SAID[function]
    assert main([f"tests.rehearse.fits.test_rehearse:{function}"]) == code
    captured = capsys.readouterr()
    assert says in captured.out + captured.err


ACCEPTED = ["setup", "bad_step"]


@pytest.mark.thorough
def test_what_failed_to_be_judged_is_not_ready_unless_it_is_accepted_by_name(capsys):
    report = rehearse(*unknown_run())
    assert report.ok is None and report.failed == report.unknown == tuple(ACCEPTED)
    assert set(report.left_out) == {"growth"} and "resume" in report.not_judged
    with pytest.raises(NotReady, match="Ready, but nobody judged: setup, bad_step"):
        assert_ready(*unknown_run())
    with pytest.raises(NotReady, match="Ready, but nobody judged: bad_step"):
        assert_ready(*unknown_run(), allow_unjudged={"setup"})
    assert_ready(*unknown_run(), allow_unjudged={*ACCEPTED})
    accepted = rehearse(*unknown_run(), allow_unjudged=ACCEPTED)
    assert accepted.ok is True
    assert re.search(r"setup \(accepted\), bad_step \(accepted\): \w+Error", str(accepted)), str(accepted)
    command = ["tests.rehearse.fits.test_rehearse:unknown_run", "--allow-unjudged", "setup"]
    assert main(command) == 2 and main([*command, "--allow-unjudged", "bad_step"]) == 0


@pytest.mark.thorough
def test_a_run_whose_data_were_not_prepared_says_what_to_call(tmp_path):
    class Downloads(LightningDataModule):
        def prepare_data(self):
            (tmp_path / "samples").write_text("40")

        def setup(self, stage):
            self.samples = int((tmp_path / "samples").read_text())

        def train_dataloader(self):
            return loader(self.samples)

    report = rehearse(quiet_trainer(), Net(), data := Downloads())
    assert report.ok is None and "prepare_data() was not called; call it before the rehearsal" in str(report)
    data.prepare_data()
    assert rehearse(quiet_trainer(), Net(), data).ok


@pytest.mark.thorough
def test_a_run_that_cannot_be_tried_says_so_in_one_sentence():
    class Refuses(Net):
        def configure_optimizers(self):
            raise KeyError("no such setting")

    report = rehearse(quiet_trainer(), Refuses(), loader())
    assert report.ok is None and set(report.failed) == set(CHECKS)
    assert str(report).startswith("Not known: the run could not be tried.")
    assert str(report).count("no such setting") == 1


@pytest.mark.thorough
def test_the_callback_only_warns_of_what_failed_to_be_judged():
    class FailsInATrial(Net):
        def training_step(self, batch, batch_idx):
            if os.getpid() != own:
                raise ValueError("a fault of the trial's own")
            return super().training_step(batch, batch_idx)

    own = os.getpid()
    trainer = quiet_trainer(callbacks=[Rehearsal()])
    with pytest.warns(UserWarning, match="Ready, but nobody judged: setup, bad_step"):
        trainer.fit(FailsInATrial(), loader())
    assert trainer.global_step == 24


@pytest.mark.thorough
def test_an_error_without_a_text_is_told_by_its_place():
    class Asserts(Net):
        def training_step(self, batch, batch_idx):
            raise AssertionError

    report = rehearse(quiet_trainer(), Asserts(), loader())
    line = inspect.getsourcelines(Asserts)[1] + 2
    assert report.not_judged["setup"] == f"AssertionError (test_rehearse.py, line {line}, in training_step)"


@pytest.mark.thorough
def test_the_shell_command_starts_in_a_shell():
    command = [sys.executable, "-m", "rehearse", "tests.rehearse.fits.test_rehearse:wrong_run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "Not ready" in done.stdout, done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(("asked", "trials"), [([], 0), (["length"], 3), (["resume"], 1), (["setup"], 3)])
def test_what_is_skipped_is_not_tried(asked: list[str], trials: int, monkeypatch):
    tried = []

    def counted(those, **options):
        tried.extend(those)
        return try_on_copies(those, **options)

    for module in (judge, few_samples):
        monkeypatch.setattr(module, "try_on_copies", counted)
    report = rehearse(quiet_trainer(max_epochs=1), Net(), loader(40), skip={*CHECKS} - {*asked})
    assert (len(tried), [*report.passed, *report.not_judged], report.failed) == (trials, asked, ())


def test_what_is_skipped_is_printed_and_not_found():
    report = rehearse(*wrong_run(), skip=["horizon"])
    assert report.ok and "Left out, as asked: horizon." in str(report) and "horizon" not in report.passed
    assert "optimizer steps" in report.facts and report.facts["optimizer steps"] == 6


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("schedule", "interval", "found"),
    [
        (lambda optimizer: CosineAnnealingLR(optimizer, 8), "epoch", ["horizon"]),
        (lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=8), "epoch", ["horizon"]),
        (lambda optimizer: CosineAnnealingLR(optimizer, 8), "step", []),
        (lambda optimizer: CosineAnnealingLR(optimizer, 1), "epoch", []),
        (lambda optimizer: CosineAnnealingLR(optimizer, 30), "epoch", []),  # that of a longer run, tried for one epoch
    ],
)
def test_a_schedule_of_steps_that_is_stepped_by_epochs_is_found_in_a_run_of_one_epoch(schedule, interval, found):
    report = rehearse(quiet_trainer(max_epochs=1), Scheduled(schedule, interval), loader())
    assert [finding.check for finding in report.findings] == found
    assert not found or "The rate never changes" in report.findings[0].says


@pytest.mark.thorough
def test_expectations_become_checks():
    schedule = Scheduled(lambda optimizer: CosineAnnealingLR(optimizer, 24, eta_min=0.01))
    assert rehearse(quiet_trainer(), schedule, loader(), expect={"final_lr": 0.01}).ok
    # A decay that comes to 0 with the run makes its last step above 0: here with a 24th of the peak.
    to_zero = Scheduled(lambda optimizer: LinearLR(optimizer, 1.0, 0.0, 24))
    assert rehearse(quiet_trainer(), to_zero, loader(), expect={"final_lr": 0}).ok
    [finding] = rehearse(quiet_trainer(), schedule, loader(), expect={"final_lr": 0}).findings
    assert finding.check == "horizon" and "0 was expected" in finding.says
    [finding] = rehearse(quiet_trainer(), Net(), loader(), expect={"frozen": ["body"]}).findings
    assert finding.check == "setup" and "body.0.weight" in finding.says
    [finding] = rehearse(quiet_trainer(), Net(), loader(), expect={"frozen": ["bdy"]}).findings
    assert "No parameter's name begins with bdy" in finding.says and "body.0.weight" in finding.cure


@pytest.mark.parametrize(
    "arguments",
    [
        {"skip": ["lenght"]},
        {"allow_unjudged": ["lenght"]},
        {"skip": "setup"},
        {"expect": {"final_rate": 0}},
        {"expect": {"frozen": "body"}},
        {"seconds": 0},
        {"trainer": None},
    ],
)
def test_bad_arguments_are_named(arguments):
    trainer, model, data = right_run()
    with pytest.raises(ValueError, match="got"):
        rehearse(arguments.pop("trainer", trainer), model, data, **arguments)


# ------------------------------------------------------------------------------------- oracle: what a fit does


@pytest.mark.thorough
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: CosineAnnealingLR(optimizer, 12),
        lambda optimizer: ExponentialLR(optimizer, 0.9),
        lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=40),
        lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, 9)], [3]),
    ],
)
def test_the_walked_rates_are_those_of_a_fit(schedule, interval):
    def run():
        return quiet_trainer(accumulate_grad_batches=3), Scheduled(schedule, interval), loader(52)

    record = fitted(*run())
    report = rehearse(*run())
    assert report.facts["optimizer steps"] == record.updates == 9
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.05)
    [rates], _ = walk(schedule(optimizer), 9)
    last = rates[8 if interval == "step" else 2]
    assert report.facts["rate of the first, the last step"].startswith(f"{rates[0]:.3g}, {last:.3g} ")
    assert record.rates[-2] == pytest.approx(last)  # the last micro-batch alone makes the last step


@pytest.mark.thorough
@pytest.mark.parametrize("flags", [dict(limit_val_batches=1), dict(limit_test_batches=2), dict(fast_dev_run=True)])
def test_one_batch_of_everything_is_a_choice(flags):
    report = rehearse(quiet_trainer(**{"limit_train_batches": 1} | flags), Net(), loader())
    assert report.ok and any(note.startswith("length: limit_train_batches=1 trains 1 of") for note in report.notes)
