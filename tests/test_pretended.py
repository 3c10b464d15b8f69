"""What another machine would find, without it: a GPU that is pretended, and rounding that is off by the last bits."""

import copy
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from course_lib import devices
from course_lib.accumulation import accumulate, windows
from course_lib.devices import explain_device, usable_device
from course_lib.launch import run_ranks
from course_lib.launch.server import PRELOAD
from course_lib.leaks import watch_growth
from course_lib.loader import MiniDataLoader
from course_lib.memory import find_batch_size, measure_peak, predict_peak
from course_lib.skipping import StepGuard
from course_lib.skipping.nan_signal import NanSignal
from tests import effort
from tests.notebook_rules import ROOT, code_cells, source
from tests.pretended.cells import (
    cells_that_use_the_device,
    cells_to_run,
    cells_without,
    names_the_device,
    send_pretended,
)
from tests.pretended.pretend_cuda import Generator, pretend_cuda
from tests.pretended.rounding import RoundingNoise

NOTEBOOKS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "notebooks").glob("*.ipynb")}
ON_THE_DEVICE = sorted(name for name, notebook in NOTEBOOKS.items() if names_the_device(notebook))


SLOW = {
    "00_start_here": {"ranks"},
    # "fix-loader" trains, too
    "01_batching": {
        *("symptom-between", "length", "winners", "right-end"),
        *("seeds", "three-rates", "yardstick", "optimizers"),
    },
    "03_memory": {"trades", "too-small"},  # "lines" predicts, too
    "07_skipping_steps": {"job"},
}
"""Cells that take seconds under the modes, and do there what another one of their notebook does; or that start ranks,
which are outside of the modes, from a server that takes seconds to start. They and the cells that need their results
are tried by `pytest --thorough`; the functions that they define are always there."""


def run_pretended(path: Path, *pretences: str, left_out: Collection[str] = ()) -> dict:
    """In a process of its own: a fork of a server that has torch and Lightning loaded."""
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload(list(PRELOAD))
    here, there = context.Pipe()
    process = context.Process(target=send_pretended, args=(there, path, list(pretences), left_out))
    process.start()
    there.close()
    found = here.recv()
    process.join()
    assert isinstance(found, dict), found
    return found


# --------------------------------------------------------------------------------------------- cells of the notebooks


@pytest.mark.thorough
def test_every_cell_that_names_the_device_is_tried():
    named, tried = 0, 0
    for notebook in NOTEBOOKS.values():
        wanted = cells_that_use_the_device(notebook)
        tried += len(wanted)
        for cell in code_cells(notebook):
            code = re.sub(r"#.*|\"[^\"\n]*\"", "", source(cell))  # neither comments nor what is printed
            if re.search(r"\bdevice\b|\bcuda\b|_device\(", code):
                named += 1
                assert cell in wanted, cell["id"]
    print(f"\n{named} cells name the device; {tried} are tried, in {len(ON_THE_DEVICE)} notebooks")
    assert named >= 25 and tried >= named
    assert len(ON_THE_DEVICE) >= 7


@pytest.mark.thorough
@pytest.mark.timeout(600 * effort.cases(1, 7))  # 10 minutes for each of the pretences
@pytest.mark.parametrize("name", ON_THE_DEVICE)
def test_cells_print_on_a_pretended_gpu_with_other_rounding_what_is_stored(name):
    pretences = ["cuda+noise:1", "cuda", *(f"noise:{seed}" for seed in range(1, 6))][: effort.cases(1, 7)]
    left_out = [*SLOW.get(name, [])][: effort.cases(9, 0)]
    found = run_pretended(ROOT / "notebooks" / f"{name}.ipynb", *pretences, left_out=left_out)
    assert found["differences"] == {pretence: [] for pretence in pretences}


@pytest.mark.parametrize("name", SLOW)
def test_the_slow_cells_are_cells_and_others_are_tried_without_them(name):
    wanted = cells_that_use_the_device(NOTEBOOKS[name])
    quick = cells_without(SLOW[name], NOTEBOOKS[name], wanted)
    assert SLOW[name] <= {cell["id"] for cell in wanted} and wanted[0] in quick
    assert len(wanted) - len(SLOW[name]) >= len(quick) > len(wanted) / 3


def test_what_a_slow_cell_defines_is_there_without_it():
    def cell(name, code):
        return {"cell_type": "code", "id": name, "source": code, "metadata": {}, "outputs": []}

    cells = [
        cell("slow", "def learn(size):\n    return net(size).to(device)\n\n\nlearned = learn(1000)"),
        cell("a result of it", "print(learned.to(device))"),
        cell("quick", "print(learn(1))"),
    ]
    notebook = {"cells": cells}
    quick = cells_without({"slow"}, notebook, cells_that_use_the_device(notebook))
    assert [cell["id"] for cell in quick] == ["quick"]
    definitions, last = cells_to_run(notebook, quick)
    assert source(definitions) == "def learn(size):\n    return net(size).to(device)" and last == cells[2]


CELLS = {
    "setup": "import torch\nfrom torch import nn\ndevice = 'cuda'\nx, y = torch.ones(4, 2), torch.zeros(4)",
    "right": "net = nn.Linear(2, 1).to(device)\nprint(net(x.to(device)).shape, y.to(device).sum().item())",
    "forgotten to": "print(net(x).shape)",
    "forgotten cpu": "print((net(x.to(device)) > 0).detach().numpy().shape)",
    "forgotten cpu, compared": "print((y == y.to(device)).all().item())",
    "generator": "print(torch.randn(3, device=device, generator=torch.Generator().manual_seed(0)).shape)",
    "index": "print(y[torch.zeros(2, dtype=torch.long, device=device)].tolist())",
    "depends on the stream": "torch.manual_seed(0)\nprint(round(torch.rand(1, device=device).item(), 3))",
}


def test_a_planted_fault_in_a_cell_is_named(tmp_path):
    outputs = {"right": "torch.Size([4, 1]) 0.0\n", "depends on the stream": "0.496\n"}
    cells = [
        {
            "cell_type": "code", "id": name, "source": code, "metadata": {},
            "outputs": [{"output_type": "stream", "name": "stdout", "text": outputs.get(name, "")}],
        }
        for name, code in CELLS.items()
    ]  # fmt: skip
    path = tmp_path / "planted.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    found = run_pretended(path, "plain", "cuda")["differences"]
    told = dict(re.match(r"(?s)cell ([\w ,]+) printed\n(.*)\nstored is", line).groups() for line in found["cuda"])
    two_devices = "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0"
    assert {name: text.partition(" and cpu!")[0] for name, text in told.items()} == {
        "forgotten to": two_devices,
        "forgotten cpu": "TypeError: can't convert cuda:0 device type tensor to numpy. "
        "Use Tensor.cpu() to copy it first.",
        "forgotten cpu, compared": two_devices,
        "generator": "RuntimeError: Expected a 'cuda' device type for generator but found 'cpu'",
        "index": "RuntimeError: indices should be either on cpu or on the same device as the indexed tensor (cpu)",
        "depends on the stream": told["depends on the stream"],
    }
    assert told["depends on the stream"] != "0.496\n"


def test_cells_are_followed_through_what_they_make():
    def cell(name, code):
        return {"cell_type": "code", "id": name, "source": code, "metadata": {}, "outputs": []}

    notebook = {
        "cells": [
            cell("a", "kept = []\nunused = 1"),
            cell("b", "def learn(size):\n    return net(size).to(device)"),
            cell("c", "kept.append(2)"),
            cell("d", "for size in range(3):\n    learned = learn(size)"),
            cell("e", "for size in range(3):\n    print(size)"),
            cell("f", "print(learned, kept)"),
            cell("g", "try:\n    learned = 0\n    print(learned)\nexcept ValueError as error:\n    print(error)"),
            cell("h", "print(learned)"),
        ]
    }
    wanted = cells_that_use_the_device(notebook)
    assert [cell["id"] for cell in wanted] == ["b", "d", "f"]
    run = cells_to_run(notebook, wanted)
    assert [cell["id"] for cell in run] == ["a", "b", "c", "d", "f"]
    assert source(run[0]) == "kept = []"  # what nothing needs is left out


def test_rounding_noise_is_small_and_seen_by_what_depends_on_rounding():
    x, net = torch.randn(8, 16), nn.Linear(16, 4)
    plain = net(x)
    with RoundingNoise(1) as noise:
        noisy = net(x)
    assert noise.calls == 1 and 0 < (noisy - plain).abs().max() < 1e-5
    with RoundingNoise(1), pytest.raises(AssertionError):
        assert torch.equal(net(x), plain)


# --------------------------------------------------------------------------------------- device paths of the library


def on_both(run):
    """What `run(device)` returns on the CPU and on a pretended GPU."""
    here = run("cpu")
    with pretend_cuda():
        return here, run("cuda")


def make_net(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).to(device)


def batches(device):
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        x, y = torch.randn(6, 8, generator=generator), torch.randint(0, 3, (6,), generator=generator)
        yield x.to(device), y.to(device)


def weights_of(net):
    return [value.detach().cpu().tolist() for value in net.state_dict().values()]


def guarded(device, make_optimizer, **options):
    net = make_net(device)
    optimizer = make_optimizer(net.parameters())
    guard = StepGuard(net, optimizer, spike_factor=20, min_history=3, max_norm=1.0, **options)
    kinds = set()
    for number, (x, y) in enumerate(batches(device)):
        optimizer.zero_grad()
        guard.backward(F.cross_entropy(net(x * float("nan") if number in (2, 5) else x), y))
        kinds.add(type(guard.step(batch_indices=number)).__name__)
    guard.flush()
    return weights_of(net), (guard.updates, guard.skipped), kinds


def has_fused_adagrad():
    with pretend_cuda():
        net = nn.Linear(1, 1).to("cuda")
        net(torch.ones(1, 1, device="cuda")).sum().backward()
        try:
            torch.optim.Adagrad(net.parameters(), fused=True).step()
        except RuntimeError as error:
            return "supported devices" not in str(error)
        return True


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("fused", [True, False])
def test_the_guard_on_a_pretended_gpu(name, fused):
    if (name, fused) == ("Adagrad", True) and not has_fused_adagrad():
        pytest.skip("torch 2.11 has a fused Adagrad for the CPU alone")
    (here, counted, kinds), (there, counted_there, kinds_there) = on_both(
        lambda device: guarded(device, lambda p: getattr(torch.optim, name)(p, lr=0.01, fused=fused))
    )
    assert here == there and counted == counted_there == (6, 2)
    # The fused ones leave the decision on the GPU, which a plain subclass of Tensor stands for.
    assert kinds == {"bool"} and (kinds_there != {"bool"}) == fused


def test_averages_on_a_pretended_gpu():
    def run(device):
        net = make_net(device)
        averages = torch.optim.swa_utils.AveragedModel(net)
        guard = StepGuard(net, torch.optim.SGD(net.parameters(), lr=0.1), averages=averages)
        for x, y in batches(device):
            guard.optimizer.zero_grad()
            guard.backward(F.cross_entropy(net(x), y))
            guard.step()
        return weights_of(net), weights_of(averages)

    (here, averaged), (there, averaged_there) = on_both(run)
    assert here == there
    # On a GPU the averages are made by foreach kernels, which round otherwise.
    for ours, its in zip(averaged, averaged_there, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(its))


def test_a_cpu_scalar_in_the_guard_is_caught(monkeypatch):
    monkeypatch.setattr(NanSignal, "beside", lambda signal, norm: torch.stack([norm, torch.tensor(1.0)]))
    guarded("cpu", lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))
    with pytest.raises(RuntimeError, match=r"found at least two devices, cuda:0 and cpu! \(stack\)"), pretend_cuda():
        guarded("cuda", lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))


def test_accumulation_on_a_pretended_gpu():
    def run(device):
        net, gradients = make_net(device).eval(), []
        for window in windows(batches(device), 3):
            net.zero_grad()
            done = accumulate(
                net, window, lambda net, b: F.cross_entropy(net(b[0]), b[1], reduction="sum"), lambda b: len(b[1])
            )
            gradients.append([p.grad.cpu().tolist() for p in net.parameters()])
        return gradients, float(done.global_count)

    here, there = on_both(run)
    assert here == there


def test_pinning_on_a_pretended_gpu():
    def run(device):
        pinned = device == "cuda"
        loader = MiniDataLoader(torch.arange(10), batch_size=4, pin_memory=pinned)
        told = [(batch.is_pinned(), batch.to(device, non_blocking=True).tolist()) for batch in loader]
        assert {is_pinned for is_pinned, _ in told} == {pinned}
        return [values for _, values in told]

    here, there = on_both(run)
    assert here == there == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.thorough
def test_measured_and_found_on_a_pretended_gpu():
    with pretend_cuda() as gpu:
        before = gpu.allocated()
        net = make_net("cuda")
        optimizer = torch.optim.AdamW(net.parameters())
        x, y = next(batches("cuda"))

        def step():
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        peak = measure_peak(step, model=net, optimizer=optimizer)
        assert peak.how == "CUDA allocator" and peak.peak_bytes >= gpu.allocated() - before > 0
        state = copy.deepcopy(weights_of(net))
        found = find_batch_size(
            net, lambda n: (torch.ones(n, 8), torch.zeros(n, dtype=torch.long)), optimizer, max_batch_size=64
        )
        assert found.batch_size == 64 and weights_of(net) == state
        held = []
        (culprit,) = watch_growth(lambda: held.append(net(x).detach())).culprits
        assert "cuda:0" in culprit.what and "held" in culprit.holder


def test_class_weights_on_the_gpu_can_be_predicted_with():
    def peak(weights):
        def loss(model, batch):
            return F.cross_entropy(model(batch[0]), batch[1], weight=weights)

        return predict_peak(
            lambda: nn.Linear(8, 3), lambda n: (torch.ones(n, 8), torch.zeros(n, dtype=torch.long)),
            torch.optim.SGD, loss_fn=loss, batch_size=4,
        ).peak_bytes  # fmt: skip

    on_cpu = peak(torch.ones(3))
    with pretend_cuda():
        assert peak(torch.ones(3, device="cuda")) == on_cpu


def test_the_mode_leaves_torch_as_it_was():
    with pretend_cuda():
        assert isinstance(torch.Generator("cuda"), Generator) and torch.cuda.is_available()
        moved = nn.Linear(2, 2).cuda()
    assert not torch.cuda.is_available() and torch.Generator is not Generator
    assert type(moved.cpu().weight.detach() + 1) is torch.Tensor


# --------------------------------------------------------------------------------------------- the choice of a device


@pytest.fixture
def device_is_tried_again():
    devices._try_gpu.cache_clear()
    yield
    devices._try_gpu.cache_clear()


@pytest.mark.usefixtures("device_is_tried_again")
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (AssertionError("Torch not compiled with CUDA enabled"), "Torch not compiled with CUDA enabled"),
        (RuntimeError("Found no NVIDIA driver on your system. Please …"), "Found no NVIDIA driver on your system"),
        (RuntimeError("No CUDA GPUs are available"), "No CUDA GPUs are available"),
        (
            RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors might …"),
            "CUDA error: all CUDA-capable devices are busy or unavailable",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), "CUDA out of memory"),
        (
            torch.cuda.DeferredCudaCallError("CUDA call failed lazily at initialization with error: no device\n…"),
            "CUDA call failed lazily at initialization with error: no device",
        ),
        (RuntimeError(""), "RuntimeError"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_not(error, why, monkeypatch):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(torch, "ones", fails)
    assert usable_device() == torch.device("cpu")
    assert explain_device() == f"Computing on the CPU: {why}."


@pytest.mark.usefixtures("device_is_tried_again")
def test_a_gpu_that_can_be_used_is():
    with pretend_cuda():
        assert usable_device() == torch.device("cuda")
        assert explain_device() == "Computing on the GPU: a pretended GPU."


def test_without_a_gpu_the_notebooks_and_their_trainers_agree_on_the_cpu():
    def choose(rank):
        from lightning.pytorch import Trainer
        from workbook.machine import choose_device

        torch.set_float32_matmul_precision("high")
        device = choose_device()
        trainer = Trainer(logger=False, enable_checkpointing=False)
        tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        return str(device), *tf32, type(trainer.accelerator).__name__, torch.cuda.device_count()

    [found] = run_ranks(choose, 1, backend="gloo")  # a process in which nothing is patched
    assert found.value == ("cpu", "highest", False, "CPUAccelerator", 0)


MACHINE = """
import os
import torch
import course_lib.launch.server
course_lib.launch.server.PRELOAD = ("torch", "course_lib.launch")  # these ranks need no Lightning
torch.cuda.device_count = lambda: 0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else {gpus}
torch.distributed.is_nccl_available = lambda: True
"""
RANKS = """
import pytest
import torch
from course_lib.launch import run_ranks

@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks(world_size):
    def see(rank):
        import torch.distributed as dist
        return dist.get_backend(), torch.cuda.device_count()

    assert [result.value for result in run_ranks(see, world_size)] == [("gloo", 0)] * world_size
"""


@pytest.mark.thorough
@pytest.mark.parametrize("gpus", [2, 1][: effort.cases(1, 2)])
def test_ranks_of_tests_see_no_gpu_however_many_there_are(gpus, tmp_path):
    for name in ("ours", "plain"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text(RANKS)
    (tmp_path / "ours" / "conftest.py").write_text((ROOT / "conftest.py").read_text(encoding="utf-8"))
    (tmp_path / "machine.py").write_text(MACHINE.format(gpus=gpus))
    command = [sys.executable, *"-m pytest -q -rA -p no:hypothesispytest -p no:nbval -p machine ours plain".split()]
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    told = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False).stdout
    # Without the repository's conftest.py as many ranks as there are GPUs ask for NCCL, which has no GPU here.
    assert re.findall(r"^(PASSED|FAILED) (\w+)/test_\w+.py::test_ranks\[(\d)\]", told, re.MULTILINE) == [
        ("PASSED", "ours", "1"), ("PASSED", "ours", "2"),
        *[("PASSED", "plain", "2")][gpus - 1 :], ("FAILED", "plain", "1"), *[("FAILED", "plain", "2")][2 - gpus :],
    ], told  # fmt: skip
