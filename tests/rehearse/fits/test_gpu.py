"""A rehearsal of runs on a GPU: right runs are left alone, and faults are found.

A trial is a fork where CUDA is not in use yet, and a copy that is sent where it is; so each test runs in both.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from rehearse import Rehearsal, rehearse, rehearse_loop
from tests import effort
from tests.rehearse.fits import parts
from tests.rehearse.fits.parts import Points, fitted, loader, mean_squared_error, plain_net, script, scripts

pytestmark = pytest.mark.gpu


def first_of_each_check() -> list[str]:
    of_check: dict[str, str] = {}
    for name in scripts("faults"):
        of_check.setdefault(script("faults", name).CHECK, name)
    return sorted(of_check.values())


def asks_for_cuda() -> None:
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)  # Lightning sets it, so that asking does no harm to forks
    assert torch.cuda.is_available()


def uses_cuda() -> None:
    torch.zeros(1, device="cuda")


@pytest.fixture(scope="module", params=[None, asks_for_cuda, uses_cuda], ids=["fresh", "asked for", "in use"])
def in_a_process(request):
    """Call a function in a process in which CUDA is not in use, has been asked for, or is in use."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=request.param) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=300)


def on_the_gpu(folder, name, what="make_run", **options):
    """The report of a script whose Trainer takes the GPU; None where it needs two devices."""
    parts.ACCELERATOR = "gpu"
    module = script(folder, name)
    if getattr(module, "LOOP", False):
        return None
    try:
        run = getattr(module, what)()
    except Exception as error:
        if "your machine only has: [0]" not in str(error):
            raise
        return None
    assert run[0].strategy.root_device.type == "cuda"
    return rehearse(*run, deep=True, expect=getattr(module, "EXPECT", None), **options)


def test_nothing_is_found_in_right_runs(in_a_process):
    judged = {name: in_a_process(on_the_gpu, "right", name) for name in scripts("right")[:: effort.cases(3, 1)]}
    reports = {name: report for name, report in judged.items() if report is not None}
    assert len(reports) >= len(judged) - 4
    for name, report in reports.items():
        assert report.ok, f"{name}: {report}"
        assert not any("Error" in why for why in report.not_judged.values()), f"{name}: {report}"


def test_a_planted_fault_is_found_and_its_twin_is_not(in_a_process):
    found = 0
    for name in first_of_each_check():
        fault, twin = (in_a_process(on_the_gpu, "faults", name, what) for what in ("make_run", "make_twin"))
        if fault is None:
            continue
        found += 1
        assert {finding.check for finding in fault.findings} == {script("faults", name).CHECK}, f"{name}: {fault}"
        assert twin.ok, f"{name}: {twin}"
    assert found >= 9


def states_after(judge: bool):
    torch.manual_seed(3)
    torch.cuda.manual_seed(3)
    parts.ACCELERATOR = "gpu"
    model = parts.Net()
    model.body.append(nn.Dropout(0.5))
    trainer = parts.quiet_trainer(max_epochs=2)
    data = DataLoader(Points(40), 8, shuffle=True)
    if judge:
        assert rehearse(trainer, model, data, deep=True).ok
    record = fitted(trainer, model, data)
    weights = [weight.cpu().tolist() for weight in model.parameters()]
    return weights, record.samples, torch.get_rng_state().tolist(), torch.cuda.get_rng_state().tolist()


def test_a_run_after_it_is_the_run_without_it(in_a_process):
    assert in_a_process(states_after, True) == in_a_process(states_after, False)


def fitted_with_the_callback():
    parts.ACCELERATOR = "gpu"
    callback = Rehearsal()
    record = fitted(parts.quiet_trainer(max_epochs=2, callbacks=[callback]), parts.Net(), loader())
    return record.updates, callback.report


def test_as_a_callback(in_a_process):
    updates, report = in_a_process(fitted_with_the_callback)
    assert updates == report.facts["optimizer steps"] == 16
    assert report.ok and set(report.not_judged) == {"growth", "resume"}, str(report)


def loss_on_the_gpu(model, batch):
    return mean_squared_error(model, [tensor.cuda() for tensor in batch])


def judged_loop(lr_steps):
    model = plain_net().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, lr_steps)
    report = rehearse_loop(model, loader(), loss_on_the_gpu, optimizer, scheduler=scheduler, max_epochs=3)
    here = all(weight.is_cuda for weight in model.parameters())
    return [finding.check for finding in report.findings], here


def test_of_a_plain_loop(in_a_process):
    assert in_a_process(judged_loop, 24) == ([], True)
    assert in_a_process(judged_loop, 6) == (["horizon"], True)
