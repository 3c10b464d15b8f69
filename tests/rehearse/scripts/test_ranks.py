"""Whether ranks train together: what a rehearsal says of a script, against two real ranks that run it."""

import contextlib
import io
import math
from pathlib import Path

import pytest

from course_lib.launch import run_ranks
from rehearse.report import RehearsalReport
from rehearse.script import rehearse_script

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

if not dist.is_initialized():
    dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, 4, sampler=sampler)
inner = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
model = DistributedDataParallel(inner)
head = nn.Sequential(nn.Linear(1, 99), nn.Linear(99, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
error = nn.functional.mse_loss
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = error(model(x), y)
        loss.backward()
        optimizer.step()
"""
FORWARD = "        loss = error(model(x), y)\n"
BACKWARD = "        loss.backward()\n"
STEP = "        optimizer.step()\n"
MADE = "model = DistributedDataParallel(inner)\n"
AVERAGED = """\
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
"""
HELD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
BOTH_HELD = "optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)\n"
BOTH_CALLED = "        loss = error(head(model(x)), y)\n"
OF_THE_SECOND = "one = torch.ones(1)\ndist.all_reduce(one, group=dist.new_group([1]))\nassert one == 1\n"
TOGETHER = {
    "as it is": {},
    "beside the wrapper as well": {BACKWARD: "        loss += inner(x).square().mean()\n" + BACKWARD},
    "beside the wrapper first": {
        FORWARD: "        aside = inner(x).mean()\n" + FORWARD,
        BACKWARD: "        (loss + aside).backward()\n",
    },
    "looked at beside the wrapper": {BACKWARD: "        with torch.no_grad():\n            inner(x)\n" + BACKWARD},
    "in evaluation mode": {MADE: MADE + "model.eval()\n"},
    "compiled": {MADE: MADE + "model = torch.compile(model, backend='eager')\n"},
    "averaged by hand": {MADE: "model = inner\n", BACKWARD: BACKWARD + AVERAGED},
    "weights averaged": {MADE: "model = inner\n", STEP: STEP + AVERAGED.replace("grad", "data")},
    "a head that no optimizer holds": {FORWARD: BOTH_CALLED},
    "a group without the first rank": {HELD: OF_THE_SECOND + HELD},
    "two wrappers": {HELD: "head = DistributedDataParallel(head)\n" + BOTH_HELD, FORWARD: BOTH_CALLED},
}
APART = {
    "beside the wrapper": ({"model(x)": "inner(x)"}, "calls the module that DistributedDataParallel wraps"),
    "a second loss beside the wrapper": (
        {BACKWARD: BACKWARD + "        inner(x).mean().backward()\n"},
        "averaged over the 2 ranks in 1 and not in the last",
    ),
    "a second loss of one forward": (
        {
            FORWARD: "        out = model(x)\n        loss = error(out, y)\n",
            BACKWARD: "        loss.backward(retain_graph=True)\n        out.mean().backward()\n",
        },
        "averaged over the 2 ranks in 1 and not in the last",
    ),
    "no wrapper": ({MADE: "model = inner\n"}, "of their 193 numbers the script itself exchanges 0"),
    "a head in no wrapper": ({HELD: BOTH_HELD, FORWARD: BOTH_CALLED}, "of their 298 numbers the script"),
    "a part replaced behind the wrapper": (
        {MADE: MADE.replace("inner", "inner, find_unused_parameters=True") + "inner[2] = nn.Linear(32, 1)\n"},
        "of 2 parameters",
    ),
}


def written(changes: dict[str, str]) -> str:
    text = SCRIPT
    for right, other in changes.items():
        assert right in text
        text = text.replace(right, other)
    return text


def are_the_same_afterwards(script: str) -> bool:
    def train(rank: int) -> list[float]:
        names: dict = {}
        exec(compile(script, "train.py", "exec"), names)
        held = [*names["inner"].parameters(), *names["head"].parameters()]
        return [float(parameter.detach().double().square().sum()) for parameter in held]

    first, second = (result.value for result in run_ranks(train, 2))
    assert all(map(math.isfinite, first + second))
    return first == pytest.approx(second, rel=1e-6)


def report_of(script: str, folder: Path) -> RehearsalReport:
    (folder / "train.py").write_text(script)
    with contextlib.redirect_stdout(io.StringIO()):
        return rehearse_script(folder / "train.py", ranks=2)


@pytest.mark.thorough
@pytest.mark.parametrize("how", TOGETHER)
def test_ranks_that_train_together(how: str, tmp_path: Path):
    script = written(TOGETHER[how])
    assert are_the_same_afterwards(script)
    report = report_of(script, tmp_path)
    assert "no_sync" not in report.failed and report.ok is not None, str(report)


@pytest.mark.thorough
@pytest.mark.parametrize("how", APART)
def test_ranks_that_train_apart(how: str, tmp_path: Path):
    changes, says = APART[how]
    script = written(changes)
    assert not are_the_same_afterwards(script)
    [finding] = report_of(script, tmp_path).findings
    assert finding.check == "no_sync" and says in finding.says, finding.says
