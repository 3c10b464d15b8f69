"""Right scripts in other styles than ours: nothing is found in them, and a fault of each style is."""

from pathlib import Path

import pytest

from rehearse.report import RehearsalReport
from rehearse.script import rehearse_script

HEAD = """
import os
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(96, 8)
targets = [torch.randint(0, classes, (96,)) for classes in (2, 3)]
loader = DataLoader(TensorDataset(x, *targets), 8, shuffle=True)
body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
heads = nn.ModuleList([nn.Linear(16, 2), nn.Linear(16, 3)])
optimizer = torch.optim.SGD([*body.parameters(), *heads.parameters()], lr=0.1)


def loss_of(task, batch):
    return nn.functional.cross_entropy(heads[task](body(batch[0])), batch[1 + task])

"""
TRAINED = """
for epoch in range(3):
    body.train()
    for batch in loader:
        optimizer.zero_grad()
        loss_of(0, batch).backward()
        optimizer.step()
"""
IN_TURNS = """
for epoch in range(3):
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        loss_of(number % 2, batch).backward()
        optimizer.step()
"""
ONE_BY_ONE = """
for epoch in range(3):
    for batch in loader:
        optimizer.zero_grad()
        for task in (0, 1):
            loss_of(task, batch).backward()
        optimizer.step()
"""
STATISTICS_FROZEN = """
for epoch in range(4):
    body.train()
    if epoch >= 2:
        body[1].eval()
    for batch in loader:
        optimizer.zero_grad()
        loss_of(0, batch).backward()
        optimizer.step()
    body.eval()
    with torch.no_grad():
        loss_of(0, next(iter(loader)))
"""
EVALUATED_WITH_A_GRAPH = (
    TRAINED
    + """\
    body.eval()
    scores = [loss_of(0, batch).item() for batch in DataLoader(loader.dataset, 32)]
"""
)
COMPILED = """
compiled = torch.compile(body, backend="eager")
for epoch in range(3):
    body.train()
    for batch in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(heads[0](compiled(batch[0])), batch[1]).backward()
        optimizer.step()
    body.eval()
    with torch.no_grad():
        loss_of(0, next(iter(loader)))
"""
BY_NAMES = """
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
stateful = {"schedule": schedule}
if os.path.exists("last.pt"):
    checkpoint = torch.load("last.pt")
    optimizer.load_state_dict(checkpoint["optimizer"])
    for name, part in stateful.items():
        part.load_state_dict(checkpoint[name])
for epoch in range(schedule.last_epoch, 3):
    for batch in loader:
        optimizer.zero_grad()
        loss_of(0, batch).backward()
        optimizer.step()
    schedule.step()
    states = {name: part.state_dict() for name, part in stateful.items()}
    torch.save({"optimizer": optimizer.state_dict(), **states}, "last.pt")
"""
GENERATOR = """
net, critic = nn.Linear(4, 8), nn.Linear(8, 1)
rate, critics_rate = (torch.optim.Adam(one.parameters()) for one in (net, critic))
for epoch in range(4):
    for number, (real, *_) in enumerate(loader):
        critics_rate.zero_grad()
        (critic(net(torch.randn(8, 4)).detach()).mean() - critic(real).mean()).backward()
        critics_rate.step()
        if number % 3 == 2:
            rate.zero_grad()
            (-critic(net(torch.randn(8, 4))).mean()).backward()
            rate.step()
"""
SPLITS = """
for split in range(3):
    held_out = torch.randperm(96, generator=torch.Generator().manual_seed(split))[:32].tolist()
    kept = [index for index in range(96) if index not in held_out]
    train = DataLoader(torch.utils.data.Subset(loader.dataset, kept), 8, shuffle=True)
    valid = DataLoader(torch.utils.data.Subset(loader.dataset, held_out), 32)
    torch.manual_seed(0)
    body, heads = nn.Sequential(nn.Linear(8, 16), nn.Dropout()), nn.ModuleList([nn.Linear(16, 2)])
    optimizer = torch.optim.SGD([*body.parameters(), *heads.parameters()], lr=0.1)
    for epoch in range(2):
        body.train()
        for batch in train:
            optimizer.zero_grad()
            loss_of(0, batch).backward()
            optimizer.step()
        body.eval()
        with torch.no_grad():
            for batch in valid:
                loss_of(0, batch)
"""
RATES_COMPARED = """
for rate in (0.1, 0.01):
    torch.manual_seed(0)
    body, heads = nn.Sequential(nn.Linear(8, 16), nn.Dropout()), nn.ModuleList([nn.Linear(16, 2)])
    optimizer = torch.optim.SGD([*body.parameters(), *heads.parameters()], lr=rate)
    for epoch in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(0, batch).backward()
            optimizer.step()
"""
ZIPPED = """
half = DataLoader(torch.utils.data.Subset(loader.dataset, range(0, 96, 2)), 4, shuffle=True)
for epoch in range(3):
    for other, batch in zip(loader, half):
        optimizer.zero_grad()
        (loss_of(0, batch) + loss_of(1, other)).backward()
        optimizer.step()
"""
TWO_OBJECTS = """
held_by_two = [TensorDataset(x.clone(), *targets) for _ in range(2)]
order = torch.randperm(96).tolist()
other_order = torch.randperm(96).tolist()
train = DataLoader(torch.utils.data.Subset(held_by_two[0], order[:64]), 8, shuffle=True)
valid = DataLoader(torch.utils.data.Subset(held_by_two[1], order[64:]), 32)
for epoch in range(2):
    body.train()
    for batch in train:
        optimizer.zero_grad()
        loss_of(0, batch).backward()
        optimizer.step()
    body.eval()
    with torch.no_grad():
        for batch in valid:
            loss_of(0, batch)
"""

SCALED_BY_LABELS = """
short, labels = DataLoader(TensorDataset(x[:90], targets[0][:90]), 8, shuffle=True), 0
for epoch in range(3):
    for number, (inputs, classes) in enumerate(short, start=1):
        count = (classes > 0).sum()
        labels = labels + count
        loss = nn.functional.cross_entropy(heads[0](body(inputs)), torch.where(classes > 0, classes, -100))
        (loss * count).backward()
        if number % 4 == 0 or number == len(short):
            for parameter in [*body.parameters(), *heads[0].parameters()]:
                parameter.grad /= labels
            optimizer.step()
            optimizer.zero_grad()
            labels = 0
"""
ATTACKED = (
    """
held_out = DataLoader(torch.utils.data.Subset(loader.dataset, range(64, 96)), 8)
loader = DataLoader(torch.utils.data.Subset(loader.dataset, range(64)), 8, shuffle=True)
"""
    + TRAINED
    + """\
    body.eval()
    for inputs, *labels in held_out:
        inputs.requires_grad_(True)
        loss_of(0, (inputs, *labels)).backward()
        with torch.no_grad():
            loss_of(0, (inputs + 0.1 * inputs.grad.sign(), *labels))
"""
)
PROMPTED = """
body.requires_grad_(False).eval()
prompt = torch.zeros(8, requires_grad=True)
optimizer = torch.optim.Adam([prompt], lr=0.1)
for epoch in range(3):
    for inputs, *labels in loader:
        optimizer.zero_grad()
        loss_of(0, (inputs + prompt, *labels)).backward()
        optimizer.step()
"""
STEPS_IN_BACKWARD = """
each = {one: torch.optim.SGD([one], lr=0.1) for one in [*body.parameters(), *heads[0].parameters()]}


def step(parameter):
    each[parameter].step()
    each[parameter].zero_grad()


for parameter in each:
    parameter.register_post_accumulate_grad_hook(step)
for epoch in range(3):
    for batch in loader:
        loss_of(0, batch).backward()
"""
CLOSURES = """
optimizer = torch.optim.LBFGS([*body.parameters(), *heads[0].parameters()], max_iter=5)
for epoch in range(3):
    for batch in loader:
        def closure():
            optimizer.zero_grad()
            loss = loss_of(0, batch)
            loss.backward()
            return loss
        optimizer.step(closure)
        closure().item()
"""
ASKED_FOR = """
pool, labelled = list(range(24, 96)), list(range(24))
for turn in range(3):
    train = DataLoader(torch.utils.data.Subset(loader.dataset, labelled), 8, shuffle=True)
    body.train()
    for batch in train:
        optimizer.zero_grad()
        loss_of(0, batch).backward()
        optimizer.step()
    body.eval()
    with torch.no_grad():
        for batch in DataLoader(torch.utils.data.Subset(loader.dataset, pool), 32):
            loss_of(0, batch)
    labelled, pool = labelled + pool[:8], pool[8:]
"""
RATES_TRIED = """
for gamma, turns in ((1.3, 2), (0.9, 3)):
    optimizer = torch.optim.SGD([*body.parameters(), *heads[0].parameters()], lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    for epoch in range(turns):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(0, batch).backward()
            optimizer.step()
            schedule.step()
"""
A_LOADER_A_TASK = """
loaders = [DataLoader(TensorDataset(x, *targets), 8, shuffle=True) for task in (0, 1)]
for epoch in range(3):
    for batches in zip(*loaders):
        optimizer.zero_grad()
        for task, batch in enumerate(batches):
            loss_of(task, batch).backward()
        optimizer.step()
"""
ANOTHER_OPTIMIZER = """
adam = torch.optim.Adam([*body.parameters(), *heads[0].parameters()])
schedule = torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)
for epoch in range(6):
    for batch in loader:
        used = adam if epoch < 3 else optimizer
        used.zero_grad()
        loss_of(0, batch).backward()
        used.step()
    if epoch < 3:
        schedule.step()
"""
PROJECTED = """
parameters = [*body.parameters()]
for epoch in range(3):
    for batch in loader:
        of_tasks = []
        for task in (0, 1):
            optimizer.zero_grad()
            loss_of(task, batch).backward()
            of_tasks.append([parameter.grad.clone() for parameter in parameters])
        optimizer.zero_grad()
        flat = [torch.cat([one.flatten() for one in of_one]) for of_one in of_tasks]
        dot = (flat[0] * flat[1]).sum()
        if dot < 0:
            flat[0] = flat[0] - dot / flat[1].square().sum() * flat[1]
        for parameter, one in zip(parameters, sum(flat).split([p.numel() for p in parameters])):
            parameter.grad = one.view_as(parameter)
        optimizer.step()
"""
CLIPPED_BY_SAMPLE = """
parameters = [*body.parameters(), *heads[0].parameters()]
body.eval()
for epoch in range(3):
    for batch in loader:
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for number in range(len(batch[0])):
            optimizer.zero_grad()
            loss_of(0, [part[number : number + 1] for part in batch]).backward()
            for total, parameter in zip(sums, parameters):
                total += parameter.grad.clamp(-1, 1)
        for total, parameter in zip(sums, parameters):
            parameter.grad = (total + 0.1 * torch.randn_like(total)) / len(batch[0])
        optimizer.step()
"""
SPARSE = """
table = nn.EmbeddingBag(3, 8, sparse=True)
sparse = torch.optim.SparseAdam(table.parameters())
for epoch in range(3):
    for batch in loader:
        optimizer.zero_grad()
        sparse.zero_grad(set_to_none=False)
        loss_of(0, [batch[0] + table(batch[2][:, None]), *batch[1:]]).backward()
        optimizer.step()
        sparse.step()
"""
COPIED = """
import copy
body, heads, optimizer = copy.deepcopy((body, heads, optimizer))
"""
WRITTEN_AS_YAML = (
    TRAINED
    + """
import yaml
with open("history.yaml", "w") as file:
    yaml.safe_dump([{"loss": loss_of(0, batch).item(), "right": batch[1].sum().item()}], file)
"""
)
A_LINE_TO_ZERO = """
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda call: 1 - call / 36)
for epoch in range(3):
    for batch in loader:
        optimizer.zero_grad()
        loss_of(0, batch).backward()
        optimizer.step()
        schedule.step()
"""
BY_EPOCHS = """
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
for epoch in range(3):
    for batch in loader:
        optimizer.zero_grad()
        loss_of(0, batch).backward()
        optimizer.step()
    schedule.step()
"""
AN_OPTIMIZER_EACH = """
other = nn.Linear(8, 2)
its = torch.optim.Adam(other.parameters())
for epoch in range(3):
    for batch in loader:
        optimizer.zero_grad()
        loss_of(0, batch).backward()
        optimizer.step()
        its.zero_grad()
        nn.functional.cross_entropy(other(batch[0]), batch[1]).backward()
        its.step()
"""


CLEARED, STEPPED = "        optimizer.zero_grad()\n", "        optimizer.step()\n"
HOOKED = (
    """
asked = []


def seen(module, given, came):
    asked.append([one.shape for one in given])


def judged(module, given, came):
    assert [one.shape for one in came] == [(8, 16)] and asked.pop() == [(8, 8)]
    assert came[0].norm().item() > 0 and given[0] is None


body.register_forward_hook(seen)
body.register_full_backward_hook(judged)
"""
    + TRAINED
    + "assert not asked\n"
)
ZIPPED_AND_SCORED = """
first = DataLoader(torch.utils.data.Subset(loader.dataset, range(48)), 8, shuffle=True)
second = DataLoader(torch.utils.data.Subset(loader.dataset, range(48, 64)), 2, shuffle=True)
held_out = DataLoader(torch.utils.data.Subset(loader.dataset, range(64, 96)), 8)
for epoch in range(3):
    for batch, other in zip(first, second):
        optimizer.zero_grad()
        (loss_of(0, batch) + loss_of(1, other)).backward()
        optimizer.step()
    with torch.no_grad():
        for batch in held_out:
            loss_of(0, batch)
"""
FROM_NUMPY = (
    """
loader = DataLoader(
    [(one.numpy(), int(label)) for one, label in zip(x, targets[0])],
    8,
    shuffle=True,
    collate_fn=lambda samples: (
        torch.from_numpy(np.stack([one for one, _ in samples])), torch.tensor([label for _, label in samples])
    ),
)
order = [int(index) for index in torch.randperm(96)]
loader = DataLoader(loader.dataset, 8, sampler=order, collate_fn=loader.collate_fn)
"""
    + TRAINED
    + "    np.random.shuffle(order)\n"
)
HOOKED_LATER = (
    """
sizes = []


def seen(module, given, came):
    sizes.append(came.norm().item())


handle = None
"""
    + TRAINED.replace("    body.train()\n", "    handle = body.register_forward_hook(seen) if epoch == 1 else handle\n")
    + "assert len(sizes) >= 24\n"
)
FROZEN_BESIDE_A_HEAD = """
encoder = nn.Sequential(nn.Linear(8, 8), nn.Dropout()).eval().requires_grad_(False)
head = nn.Linear(8, 2)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
parts = [DataLoader(torch.utils.data.Subset(loader.dataset, range(at, at + 32)), 8, shuffle=True) for at in (0, 32, 64)]
for epoch in range(4):
    for part in parts:
        for batch in part:
            (nn.functional.cross_entropy(head(encoder(batch[0])), batch[1]) / 12).backward()
    optimizer.step()
    optimizer.zero_grad()
for epoch in range(4):
    for number, batch in enumerate(parts[0]):
        (nn.functional.cross_entropy(head(encoder(batch[0])), batch[1]) / 8).backward()
        if (4 * epoch + number) % 8 == 7:
            optimizer.step()
            optimizer.zero_grad()
"""
TAUGHT = """
teacher = nn.Sequential(nn.Linear(8, 8), nn.Dropout()).eval()
student = nn.Linear(8, 8)
held_out = DataLoader(torch.utils.data.Subset(loader.dataset, range(64, 96)), 8)
loader = DataLoader(torch.utils.data.Subset(loader.dataset, range(64)), 8, shuffle=True)
for epoch in range(3):
    for batch in loader:
        (student(batch[0]) - teacher(batch[0]).detach()).pow(2).mean().backward()
        with torch.no_grad():
            for parameter in student.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    with torch.no_grad():
        for batch in held_out:
            student(batch[0])
"""
WEIGHTED = (
    """
by_weight = torch.utils.data.WeightedRandomSampler(torch.ones(96), 96)
loader = DataLoader(loader.dataset, 8, sampler=by_weight)
"""
    + TRAINED
)
ATTACKED_IN_TRAINING = """
held_out = DataLoader(torch.utils.data.Subset(loader.dataset, range(64, 96)), 8)
loader = DataLoader(torch.utils.data.Subset(loader.dataset, range(64)), 8, shuffle=True)
linear = nn.Linear(8, 2)
optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)


def attacked(inputs, labels):
    moved = torch.zeros_like(inputs, requires_grad=True)
    nn.functional.cross_entropy(linear(inputs + moved), labels).backward()
    return inputs + 0.1 * moved.grad.sign()


for epoch in range(3):
    for inputs, labels, _ in loader:
        inputs = attacked(inputs, labels)
        optimizer.zero_grad()
        nn.functional.cross_entropy(linear(inputs), labels).backward()
        optimizer.step()
    for inputs, labels, _ in held_out:
        linear(attacked(inputs, labels))
"""


def report_of(folder: Path, text: str) -> RehearsalReport:
    script = folder / "train.py"
    script.write_text(text)
    return rehearse_script(script)


def played(folder: Path, text: str) -> list[str]:
    return [f"{finding.check}: {finding.says}" for finding in report_of(folder, text).findings]


CONSTANT = TRAINED.replace("loss_of(0, batch)", "(loss_of(0, batch) - 100).relu()")
"""A margin that every sample meets, so that all gradients are 0."""
CONSTANT_IN_WINDOWS = """
for epoch in range(3):
    for number, batch in enumerate(loader):
        if number % 4 == 0:
            optimizer.zero_grad(set_to_none=False)
        (0 * loss_of(0, batch)).backward()
        if number % 4 == 3:
            nn.utils.clip_grad_norm_(body.parameters(), 1.0)
            optimizer.step()
"""


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(IN_TURNS, id="two tasks in turns"),
        pytest.param(ONE_BY_ONE, id="the losses of two tasks, one by one"),
        pytest.param(STATISTICS_FROZEN, id="statistics frozen on purpose"),
        pytest.param(EVALUATED_WITH_A_GRAPH, id="evaluated with a graph"),
        pytest.param(COMPILED, id="trained compiled, evaluated as it is"),
        pytest.param(BY_NAMES, id="states taken up in a loop over names"),
        pytest.param(GENERATOR, id="a generator's step behind three of its critic"),
        pytest.param(SPLITS, id="three splits in one script"),
        pytest.param(RATES_COMPARED, id="two runs from one seed"),
        pytest.param(ZIPPED, id="two loaders in one step"),
        pytest.param(TWO_OBJECTS, id="one split of two datasets with the same data"),
        pytest.param(SCALED_BY_LABELS, id="gradients divided by their window's labels"),
        pytest.param(ATTACKED, id="gradients taken in an evaluation"),
        pytest.param(PROMPTED, id="an input is trained"),
        pytest.param(STEPS_IN_BACKWARD, id="steps within the backward pass"),
        pytest.param(CLOSURES, id="closures"),
        pytest.param(ASKED_FOR, id="samples that are asked for when they have been scored"),
        pytest.param(RATES_TRIED, id="a test of rates ahead of the run"),
        pytest.param(A_LOADER_A_TASK, id="a loader for each task"),
        pytest.param(ANOTHER_OPTIMIZER, id="another optimizer from epoch 3 on"),
        pytest.param(PROJECTED, id="gradients of two tasks, projected"),
        pytest.param(CLIPPED_BY_SAMPLE, id="gradients clipped by sample, and noise"),
        pytest.param(SPARSE, id="sparse gradients"),
        pytest.param(COPIED + TRAINED, id="a copied optimizer"),
        pytest.param(WRITTEN_AS_YAML, id="losses written as YAML"),
        pytest.param(A_LINE_TO_ZERO, id="a rate that would fall below zero behind the run"),
        pytest.param(BY_EPOCHS, id="a schedule of epochs"),
        pytest.param(AN_OPTIMIZER_EACH, id="an optimizer for each part"),
        pytest.param(HOOKED, id="hooks of a backward pass"),
        pytest.param(ZIPPED_AND_SCORED, id="two loaders in one step, and a third"),
        pytest.param(ATTACKED_IN_TRAINING, id="attacks in training and evaluation"),
        pytest.param(WEIGHTED, id="samples drawn by weights"),
        pytest.param(FROM_NUMPY, id="batches in NumPy's memory, and an order that it shuffles"),
        pytest.param(HOOKED_LATER, id="a hook from the second epoch on"),
        pytest.param(FROZEN_BESIDE_A_HEAD, id="a frozen encoder, windows over loaders and epochs"),
        pytest.param(CONSTANT, id="gradients of 0"),
        pytest.param(CONSTANT_IN_WINDOWS, id="gradients of 0 in windows"),
    ],
)
def test_it_is_right(loop: str, tmp_path: Path):
    assert played(tmp_path, HEAD + loop) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("loop", "numbers"),
    [
        (ATTACKED, {"epochs": 3, "micro-batches": 24, "backward passes": 36}),
        (STEPS_IN_BACKWARD, {"micro-batches": 36, "optimizer steps": 36 * 6}),
    ],
    ids=["gradients taken in an evaluation", "steps within the backward pass"],
)
def test_its_counts_are_those_of_the_training(loop: str, numbers: dict[str, int], tmp_path: Path):
    facts = report_of(tmp_path, HEAD + loop).facts
    assert {name: facts[name] for name in numbers} == numbers


@pytest.mark.thorough
def test_passes_over_one_batch_may_be_over_its_parts_as_well_and_this_is_said(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(HEAD + ONE_BY_ONE)
    assert any("the 2 backward passes of a batch (train.py:" in note for note in rehearse_script(script).notes)


@pytest.mark.thorough
def test_which_passes_count_is_not_judged_where_the_script_makes_the_gradients(tmp_path: Path):
    reports = [report_of(tmp_path, HEAD + loop) for loop in (PROJECTED, CLIPPED_BY_SAMPLE, AN_OPTIMIZER_EACH)]
    assert ["window" in report.passed for report in reports] == [False, False, True]
    assert all("makes the gradients of SGD itself" in report.not_judged["window"] for report in reports[:2])
    assert not any(report.failed for report in reports)


@pytest.mark.thorough
def test_a_loss_that_teaches_nothing_is_told(tmp_path: Path):
    notes = [
        [note for note in report_of(tmp_path, HEAD + loop).notes if "every gradient that SGD holds is 0" in note]
        for loop in (CONSTANT, CONSTANT_IN_WINDOWS, TRAINED)
    ]
    assert [len(told) for told in notes] == [1, 1, 0]


@pytest.mark.thorough
def test_losses_that_the_script_weighs_do_not_count_alike(tmp_path: Path):
    means = SCALED_BY_LABELS.replace("loss * count", "loss / 4").replace(" /= labels", " /= 1")
    weighed, alike = (
        any("samples count alike" in note for note in report_of(tmp_path, HEAD + loop).notes)
        for loop in (SCALED_BY_LABELS, means)
    )
    assert alike and not weighed


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    ("right", "wrong", "loop", "found"),
    [
        ("        optimizer.zero_grad()\n", "", IN_TURNS, "window: The gradients of SGD are not cleared"),
        ("    body.train()\n", "    pass\n", STATISTICS_FROZEN, "setup: The model is left in evaluation mode"),
        ("    body.train()\n", "    pass\n", EVALUATED_WITH_A_GRAPH, "setup: The model is left in evaluation mode"),
        ("    body.train()\n", "    pass\n", COMPILED, "setup: The model is left in evaluation mode"),
        ("index not in held_out", "index < 80", SPLITS, "validation: "),
        ("order[64:]", "other_order[64:]", TWO_OBJECTS, "validation: "),
        (
            "        for batch in loader",
            "        torch.manual_seed(0)\n        for batch in loader",
            RATES_COMPARED,
            "order: ",
        ),
        (
            "    for batch in loader",
            "    torch.manual_seed(0)\n    for batch in loader",
            WEIGHTED,
            "order: Epochs 0 and 1 have the same shuffled order",
        ),
        ("        optimizer.zero_grad()\n", "", ZIPPED, "window: The gradients of SGD are not cleared"),
        ("range(64, 96)", "range(60, 96)", ATTACKED, "validation: 4 samples of 36"),
        (
            f"{CLEARED}        loss_of(0, batch).backward()\n{STEPPED}",
            f"        loss_of(0, batch).backward()\n{STEPPED}{CLEARED}",
            ATTACKED,
            "window: The gradients of an evaluation are in the step behind it: 2 of 24 steps of SGD are made with them",
        ),
        ("range(64, 96)", "range(60, 96)", ZIPPED_AND_SCORED, "validation: 4 samples of 36"),
        ("range(64, 96)", "range(40, 72)", ZIPPED_AND_SCORED, "validation: 24 samples of 32"),
        ("range(64, 96)", "range(60, 96)", ATTACKED_IN_TRAINING, "validation: 4 samples of 36"),
        (
            "    if epoch < 3:\n",
            "    if True:\n",
            ANOTHER_OPTIMIZER,
            "horizon: ExponentialLR is stepped 3 times behind",
        ),
        ("    schedule.step()\n", "", BY_EPOCHS, "horizon: CosineAnnealingLR is made and never stepped"),
        (
            "for epoch in range(3):\n",
            "optimizer = torch.optim.Adam([*body.parameters(), *heads.parameters()])\nfor epoch in range(3):\n",
            BY_EPOCHS,
            "horizon: The optimizer of CosineAnnealingLR, SGD 0, makes no step; Adam 1 steps",
        ),
        ("        schedule.step()\n", "    schedule.step()\n", A_LINE_TO_ZERO, "horizon: The rate ends at 0.0944"),
        (
            "        loss_of(0, batch).backward()\n",
            "        loss_of(0, batch)\n",
            TRAINED,
            "window: The script makes 36 optimizer steps and no backward pass",
        ),
        (
            ".backward()\n",
            ".backward()\n        optimizer.zero_grad()\n",
            CONSTANT,
            "window: The gradients of SGD are cleared between the backward pass and the step: 36 of 36",
        ),
        (
            "        its.step()",
            "",
            AN_OPTIMIZER_EACH,
            "window: Adam makes no step, and 36 backward passes",
        ),
        ("        sparse.zero_grad(set_to_none=False)\n", "", SPARSE, "window: The gradients of SparseAdam are not"),
    ],
    ids=[
        "not cleared",
        "left in evaluation mode",
        "left in evaluation mode behind an evaluation with a graph",
        "left in evaluation mode by a name of its own",
        "a split's samples are trained on",
        "two splits of two datasets with the same data",
        "each epoch is seeded",
        "each epoch is seeded ahead of draws by weights",
        "not cleared beside two loaders",
        "samples trained on that an attack evaluates",
        "gradients of an attack in an evaluation",
        "samples of the second loader",
        "samples of both loaders",
        "samples trained on that an attack without modes evaluates",
        "the schedule of the optimizer before",
        "a schedule that is never stepped",
        "the optimizer is made again",
        "a line's end in steps, stepped by epochs",
        "no backward pass",
        "gradients of 0 are cleared ahead of the step",
        "one of two optimizers is never stepped",
        "sparse gradients are not cleared",
    ],
)
def test_its_fault_is_found(right: str, wrong: str, loop: str, found: str, tmp_path: Path):
    assert right in loop
    [says] = played(tmp_path, HEAD + loop.replace(right, wrong))
    assert says.startswith(found), says


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("held_out", "found"), [("range(64, 96)", []), ("range(60, 96)", ["validation: 4 samples of 36"])]
)
def test_passes_beside_a_teacher_are_training_where_steps_are_made_by_hand(held_out: str, found: list[str], tmp_path):
    without_optimizer = HEAD.replace(
        "optimizer = torch.optim.SGD([*body.parameters(), *heads.parameters()], lr=0.1)\n", ""
    )
    assert without_optimizer != HEAD
    says = played(tmp_path, without_optimizer + TAUGHT.replace("range(64, 96)", held_out))
    assert [one[: len("validation: 4 samples of 36")] for one in says] == found


SCORED_ON_WHAT_IS_TRAINED_ON = (
    """
optimizer = torch.optim.SGD([*body.parameters(), *heads.parameters()], lr=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
first, *_ = next(iter(loader))
"""
    + TRAINED
    + """\
    schedule.step()
    body.eval()
    with torch.no_grad():
        for batch in loader:
            loss_of(0, batch)
with torch.no_grad():
    for batch in loader:
        body.train()(batch[0])
"""
)


@pytest.mark.thorough
def test_a_loop_over_the_training_loader_that_trains_nothing_is_no_epoch(tmp_path: Path):
    """A first batch looked at, a score on the training data, statistics of BatchNorm."""
    report = report_of(tmp_path, HEAD + SCORED_ON_WHAT_IS_TRAINED_ON)
    assert report.ok, str(report)
    numbers = {name: report.facts[name] for name in ("epochs", "micro-batches", "optimizer steps", "validations")}
    assert numbers == {"epochs": 3, "micro-batches": 36, "optimizer steps": 36, "validations": 3}


OUTSIDE = """
scale = nn.Parameter(torch.ones(16))
layers = [nn.Linear(16, 16), nn.Linear(16, 16)]


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.layers = body, {keep}(layers)

    def forward(self, inputs):
        inputs = self.body(inputs) * scale
        for layer in self.layers:
            inputs = layer(inputs).relu()
        return inputs


deep = Deep()
optimizer = torch.optim.SGD([*deep.parameters(), *heads.parameters(){more}], lr=0.1)
for epoch in range(2):
    for batch in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(heads[0](deep(batch[0])), batch[1]).backward()
        optimizer.step(){by_hand}
"""
BY_HAND = """
        with torch.no_grad():
            scale -= 0.1 * scale.grad
            scale.grad = None
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"keep": "nn.ModuleList", "more": ", scale"}, ""),
        ({"keep": "nn.ModuleList", "by_hand": BY_HAND}, ""),
        (
            {"keep": "nn.ModuleList"},
            "a parameter that gets a gradient and is in no module which the script calls; of shape 16.",
        ),
        (
            {"keep": "list", "more": ", scale"},
            "4 parameters that get gradients and are in no module which the script calls; ",
        ),
    ],
    ids=["all held", "moved by hand", "a parameter of its own", "layers in a plain list"],
)
def test_parameters_in_no_module_are_held_by_an_optimizer(parts: dict[str, str], says: str, tmp_path: Path):
    found = played(tmp_path, HEAD + OUTSIDE.format(**{"more": "", "by_hand": "", **parts}))
    assert len(found) == bool(says) and all(f"setup: No optimizer holds {says}" in one for one in found), found


@pytest.mark.thorough
@pytest.mark.parametrize(
    "anew",
    [
        "body, heads = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 2), nn.Linear(16, 3)])\n",
        "for one in (body, heads):\n    one.load_state_dict(dict(one.state_dict()), assign=True)\n"
        "    for part in one.modules():\n        for name, weight in list(part.named_parameters(recurse=False)):\n"
        "            setattr(part, name, nn.Parameter(weight.detach().clone()))\n",
    ],
    ids=["another model", "its parameters replaced"],
)
def test_an_optimizer_of_what_is_not_trained_is_found(anew: str, tmp_path: Path):
    [says] = played(tmp_path, HEAD + anew + IN_TURNS)
    assert says.startswith("window: None of 36 backward passes gives a gradient to a parameter that SGD holds"), says


FOREVER = """
import itertools


def forever(batches):
    while True:
        yield from batches


inputs = DataLoader(TensorDataset(x), 4, shuffle=True)
both = {given}
for step in range(60):
    batch, (more,) = next(both)
    optimizer.zero_grad()
    (loss_of(0, batch) + body(more).square().mean()).backward()
    optimizer.step()
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("zip(forever(loader), forever(inputs))", 0),
        ("zip(forever(loader), itertools.cycle(inputs))", 1),
        ("itertools.cycle(zip(loader, inputs))", 1),
    ],
)
def test_batches_that_are_kept_and_given_again_are_found(given: str, found: int, tmp_path: Path):
    says = played(tmp_path, HEAD + FOREVER.replace("{given}", given))
    assert len(says) == found, says
    assert all("the same shuffled order" in one and "itertools.cycle keeps the batches" in one for one in says), says


POLY = """
steps = 3 * len(loader)
optimizer = torch.optim.SGD([*body.parameters(), *heads.parameters()], lr=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 - step / steps) ** 0.9)
for epoch in range(3):
    for batch in loader:
        optimizer.zero_grad()
        (loss_of(0, batch) + loss_of(1, batch)).backward()
        optimizer.step()
        schedule.step()
"""
ADAPTED = """
net = nn.Linear(8, 2)
optimizer = torch.optim.Adam(net.parameters())
for epoch in range(3):
    for batch in loader:
        fast = dict(net.named_parameters())
        for _ in range(2):
            loss = nn.functional.cross_entropy(torch.func.functional_call(net, fast, batch[0]), batch[1])
            gradients = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {name: value - 0.1 * of for (name, value), of in zip(fast.items(), gradients)}
        optimizer.zero_grad()
        nn.functional.cross_entropy(torch.func.functional_call(net, fast, batch[0]), batch[1]).backward()
        optimizer.step()
"""
DISTILLED = """
teacher, student = (nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.3), nn.Linear(4, 2)) for _ in range(2))
for network in (teacher, student):
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for epoch in range(3):
        network.train()
        for batch in loader:
            loss = nn.functional.cross_entropy(network(batch[0]), batch[1])
            if network is student:
                loss = loss + (network(batch[0]) - teacher(batch[0]).detach()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        network.eval()
        with torch.no_grad():
            network(batch[0])
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("loop", "steps"), [(POLY, 36), (ADAPTED, 36), (DISTILLED, 72)], ids=["a poly schedule", "MAML", "distillation"]
)
def test_a_known_recipe_is_right(loop: str, steps: int, tmp_path: Path):
    report = report_of(tmp_path, HEAD + loop)
    assert report.ok, str(report)
    assert report.facts["optimizer steps"] == steps


CRITIC = (Path(__file__).parent / "examples" / "critic_first.py").read_text()
LATE_CLOSURE = """
late = torch.optim.LBFGS(body.parameters(), max_iter=8)


def closure():
    late.zero_grad()
    loss = loss_of(0, batch)
    loss.backward()
    return loss


for _ in range(3):
    late.step(closure)
"""


@pytest.mark.thorough
def test_a_critic_that_is_trained_ahead_of_its_generator_is_no_finding(tmp_path: Path):
    assert report_of(tmp_path, CRITIC).findings == ()


@pytest.mark.thorough
def test_a_generator_that_its_loss_never_reaches_is_found_behind_its_critic(tmp_path: Path):
    broken = CRITIC.replace("(-critic(generator(torch.randn(16, 4))).mean())", "(-critic(torch.randn(16, 2)).mean())")
    [finding] = report_of(tmp_path, broken).findings
    assert finding.check == "window" and "None of 72 backward passes gives a gradient" in finding.says


@pytest.mark.thorough
def test_a_closure_that_comes_behind_the_real_micro_batches_is_told_of(tmp_path: Path):
    report = report_of(tmp_path, HEAD + TRAINED + LATE_CLOSURE)
    assert any("it first steps behind the real micro-batches" in note for note in report.notes), str(report)
    calls_it_once = LATE_CLOSURE.replace("LBFGS(body.parameters(), max_iter=8)", "SGD(body.parameters(), lr=0.1)")
    report = report_of(tmp_path, HEAD + TRAINED + calls_it_once)
    assert not any("calls its closure" in note for note in report.notes), str(report)
