"""Kinds of fault that scripts were seen with, each as a small script and as its right twin."""

from pathlib import Path

import pytest

from rehearse.report import RehearsalReport
from rehearse.script import rehearse_script

HEAD = """
import copy, math, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset, TensorDataset, get_worker_info, random_split

torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(256))
loader = DataLoader(data, batch_size=16, shuffle=True)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
K = 4


def loss_of(batch, model=net):
    return nn.functional.mse_loss(model(batch[0]), batch[1])
"""
SCALED = """
scaler = torch.amp.GradScaler("cpu")
for epoch in range(3):
    for batch in loader:
        optimizer.zero_grad()
        scaler.scale(loss_of(batch)).backward()
        UNSCALE
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""
WINDOWS = """
averaged = torch.optim.swa_utils.AveragedModel(net)
for epoch in range(3):
    for i, batch in enumerate(loader):
        (loss_of(batch) / K).backward()
        EACH
        if STEPS:
            LAST
            optimizer.step()
            optimizer.zero_grad()
"""
WHOLE = WINDOWS.replace("STEPS", "(i + 1) % K == 0")
CLIP, AVERAGE = "nn.utils.clip_grad_norm_(net.parameters(), 1.0)", "averaged.update_parameters(net)"
BY_HAND = """
for number in range(160):
    batch = next(iter(loader))
    for group in optimizer.param_groups:
        group["lr"] = 0.05 * (1 + math.cos(math.pi * number / STEPS)) / 2
    optimizer.zero_grad()
    loss_of(batch).backward()
    optimizer.step()
"""
STREAM = """
class Stream(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(256, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        me = get_worker_info()
        for i in SHARE:
            yield tuple(part[i] for part in data.tensors)


stream = Stream()
loader = DataLoader(stream, batch_size=16, num_workers=2OPTIONS)
SCHEDULE
for epoch in range(4):
    TOLD
    for i, batch in enumerate(loader):
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
        AFTER
"""


def stream(
    told="stream.set_epoch(epoch)", options="", share="order[me.id :: me.num_workers]", schedule="", after="pass"
):
    text = STREAM.replace("TOLD", told).replace("OPTIONS", options).replace("SHARE", share)
    return text.replace("SCHEDULE", schedule).replace("AFTER", after)


COSINE = "schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 64)"
BEGUN_AGAIN = """
def batches():
    while True:
        yield from loader


loader = DataLoader(Stream(), batch_size=16)
forever = batches()
for epoch in range(3):
    for i, batch in enumerate(WHICH):
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
        if i == 3:
            break
"""
TWICE = """
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, CALLS)
for epoch in range(4):
    for batch in loader:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
        schedule.step()
        schedule.step()
"""
RANKS = """
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(net)


class Part(Sampler):
    def __init__(self, n):
        each = math.ceil(n / world)
        self.indices = SHARE

    def __iter__(self):
        return iter([self.indices[i] for i in torch.randperm(len(self.indices)).tolist()])

    def __len__(self):
        return len(self.indices)


loader = DataLoader(data, batch_size=3, sampler=Part(100), drop_last=True)
for epoch in range(2):
    for batch in loader:
        optimizer.zero_grad()
        loss_of(batch, model).backward()
        optimizer.step()
"""
SPLIT = """
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(net)
trained, held_out = random_split(data, [192, 64], generator=torch.Generator().manual_seed(SEED))
sampler = torch.utils.data.DistributedSampler(trained)
loader, others = DataLoader(trained, 16, sampler=sampler), DataLoader(held_out, 16)
for epoch in range(2):
    sampler.set_epoch(epoch)
    net.train()
    for batch in loader:
        optimizer.zero_grad()
        loss_of(batch, model).backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        print(sum(loss_of(batch).item() for batch in others))
"""
DRAWN_AHEAD = """
for epoch in range(3):
    batches = iter(loader)
    for _ in range(len(loader) // K):
        window = [next(batches) for _ in range(K)]
        for batch in window:
            (loss_of(batch)DIVIDED).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
SLICES = """
class Crops(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, query):
        row, columns = query
        return x[row, columns], x[row].sum().view(1)


class Draws(Sampler):
    def __iter__(self):
        for i in torch.randint(0, 256, (64,)).tolist():
            yield i, slice(0, 8)

    def __len__(self):
        return 64


loader = DataLoader(Crops(), 16, sampler=Draws())
for epoch in range(3):
    for batch in loader:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
"""
MOVED_AT_STEPS = WHOLE.replace("EACH", "pass").replace("LAST", "pass") + f"            {AVERAGE}\n"
WARM_UP = """
for epoch in range(5):
    for i, batch in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, (STEP + 1) / 40)
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
"""
RANKS_OF_A_STREAM = """
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(net)


class Stream(IterableDataset):
    def __iter__(self):
        order = torch.randperm(256, generator=torch.Generator().manual_seed(0)).tolist()
        for i in SHARE:
            yield tuple(part[i] for part in data.tensors)


for epoch in range(2):
    for batch in DataLoader(Stream(), 16):
        optimizer.zero_grad()
        loss_of(batch, model).backward()
        optimizer.step()
"""
FIRST_BATCHES = """
others = DataLoader(TensorDataset(x[:64] + 9, x[:64].sum(1, keepdim=True)), 16)
for epoch in range(3):
    net.train()
    for batch in loader:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        for batch in BATCHES:
            print(loss_of(batch).item())
"""
WRONG: dict[str, tuple[str, int, str, str]] = {
    "clipped while scaled": (SCALED.replace("UNSCALE", "pass"), 1, "window", "ahead of unscale_"),
    "clipped in each": (
        WHOLE.replace("EACH", CLIP).replace("LAST", "pass"),
        1,
        "window",
        "clipped in each micro-batch",
    ),
    "averaged in each": (WHOLE.replace("EACH", AVERAGE).replace("LAST", "pass"), 1, "window", "is moved 48 times"),
    "averaged again at an epoch's end": (
        MOVED_AT_STEPS + f"    {AVERAGE}\n",
        *(1, "window", "is moved 15 times, in 12 optimizer steps: 3 times it takes up the same weights again"),
    ),
    "a warm-up that begins anew": (WARM_UP.replace("STEP", "i"), 1, "horizon", "falls back 4 times and rises again"),
    "a stream that ranks read whole": (
        RANKS_OF_A_STREAM.replace("SHARE", "order"),
        *(2, "dealing", "both given 8 of the first 8 batches of a stream"),
    ),
    "an evaluation of first batches": (
        FIRST_BATCHES.replace("BATCHES", "(next(iter(others)) for _ in range(len(others)))"),
        *(1, "validation", "reads the first batch of its loader 4 times, and none of the other 3"),
    ),
    "one at the start": (
        WINDOWS.replace("STEPS", "i % K == 0 or i == len(loader) - 1").replace("EACH", "").replace("LAST", ""),
        *(1, "window", "The first step of each epoch is made with 1 micro-batch in place of 4"),
    ),
    "a rate by hand": (BY_HAND.replace("STEPS", "640"), 1, "horizon", "ends at 0.0428, 86 % of its peak"),
    "an epoch that nobody tells": (stream(told="pass"), 1, "order", "set_epoch, and nothing calls it"),
    "an epoch that does not arrive": (stream(options=", persistent_workers=True"), 1, "order", "its workers persist"),
    "read whole by each": (stream(share="order"), 1, "workers", "Each of 2 workers reads the whole stream"),
    "read whole under a schedule": (
        stream(share="order", schedule=COSINE, after="schedule.step()"),
        *(1, "workers", "each sample comes 2 times"),
    ),
    "begun again": (
        stream(told="break", share="order") + BEGUN_AGAIN.replace("WHICH", "loader"),
        *(1, "order", "and are left after 4 batches"),
    ),
    "stepped twice": (TWICE.replace("CALLS", "4 * len(loader)"), 1, "horizon", "directly behind another call"),
    "a short last rank": (
        RANKS.replace("SHARE", "list(range(rank * each, min((rank + 1) * each, n)))"),
        *(3, "dealing", "rank 0 is given 11 batches and rank 2 is given 10"),
    ),
    "another split on each rank": (SPLIT.replace("SEED", "rank"), 2, "validation", "are trained by rank 1"),
    "drawn ahead": (DRAWN_AHEAD.replace("DIVIDED", ""), 1, "window", "made with 4 micro-batches, and the loss of each"),
}
RIGHT: dict[str, tuple[str, int]] = {
    "clipped behind unscale_": (SCALED.replace("UNSCALE", "scaler.unscale_(optimizer)"), 1),
    "clipped once": (WHOLE.replace("EACH", "pass").replace("LAST", CLIP), 1),
    "averaged once": (WHOLE.replace("EACH", "pass").replace("LAST", AVERAGE), 1),
    "two averages": (
        "other = torch.optim.swa_utils.AveragedModel(net)\n"
        + MOVED_AT_STEPS
        + "            other.update_parameters(net)\n",
        1,
    ),
    "a warm-up over the run": (WARM_UP.replace("STEP", "epoch * len(loader) + i"), 1),
    "a stream that ranks share": (RANKS_OF_A_STREAM.replace("SHARE", "order[rank::world]"), 2),
    "an evaluation of all batches": (FIRST_BATCHES.replace("BATCHES", "others"), 1),
    "an evaluation of one batch": (FIRST_BATCHES.replace("BATCHES", "[next(iter(others))]"), 1),
    "whole windows": (WHOLE.replace("EACH", "").replace("LAST", ""), 1),
    "a rate by hand": (BY_HAND.replace("STEPS", "160"), 1),
    "an epoch that is told": (stream(), 1),
    "shared under a schedule": (stream(schedule=COSINE, after="schedule.step()"), 1),
    "gone on with": (stream(told="break", share="order") + BEGUN_AGAIN.replace("WHICH", "forever"), 1),
    "planned for two calls": (TWICE.replace("CALLS", "8 * len(loader)"), 1),
    "even ranks": (RANKS.replace("SHARE", "list(range(n))[rank :: world][: n // world]"), 3),
    "one split": (SPLIT.replace("SEED", "7"), 2),
    "drawn ahead and divided": (DRAWN_AHEAD.replace("DIVIDED", " / K"), 1),
    "slices": (SLICES, 1),
}
QUICK = ("a rate by hand",)


def report_of(folder: Path, text: str, **options) -> RehearsalReport:
    script = folder / "train.py"
    script.write_text(HEAD + text)
    return rehearse_script(script, **options)


def marked(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in names]


@pytest.mark.parametrize("name", marked(WRONG))
def test_the_fault_is_found_under_its_own_check(name: str, tmp_path: Path):
    text, ranks, check, says = WRONG[name]
    report = report_of(tmp_path, text, ranks=ranks)
    assert [finding.check for finding in report.findings] == [check], str(report)
    assert says in report.findings[0].says, str(report)


@pytest.mark.parametrize("name", marked(RIGHT))
def test_the_right_twin_is_ready(name: str, tmp_path: Path):
    text, ranks = RIGHT[name]
    report = report_of(tmp_path, text, ranks=ranks)
    assert report.ok, str(report)


@pytest.mark.thorough
def test_a_loader_that_nothing_reads_is_told(tmp_path: Path):
    report = report_of(tmp_path, "others = DataLoader(data, 8)\n" + RIGHT["whole windows"][0])
    assert any(note.startswith("length: nothing reads the loader that is made in train.py:") for note in report.notes)


# ------------------------------------------------------------------------------------------------------- a second life

LIVES = """
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
begin = 0
if RESUMES and os.path.exists("last.pt"):
    state = torch.load("last.pt")
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    begin = state["epoch"]PLUS
    MORE
for epoch in range(begin, 8):
    loader = DataLoader(data, 16, shuffle=True, generator=torch.Generator().manual_seed(SEED))
    for batch in loader:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
    schedule.step()
    states = {"net": net, "optimizer": optimizer, "schedule": schedule}
    torch.save({name: one.state_dict() for name, one in states.items()} | {"epoch": epoch}, "last.pt")
"""


def lives(resumes="True", plus=" + 1", more="pass", seed="epoch"):
    return LIVES.replace("RESUMES", resumes).replace("PLUS", plus).replace("MORE", more).replace("SEED", seed)


def test_a_script_that_goes_on_where_it_was_killed_is_ready(tmp_path: Path):
    report = report_of(tmp_path, lives())
    assert report.ok and "resume" in report.passed, str(report)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (lives(plus=""), "the run makes 80 more: 144 in all, and 128 where it is not stopped"),
        (
            lives(more="optimizer.param_groups[0]['lr'] = 0.05"),
            "step 65 has a rate of 0.05, and 0.025 where it is not stopped",
        ),
        (lives(more="schedule.last_epoch = 0"), "step 81 has a rate of"),
        (lives(seed="epoch - begin"), "the first epoch comes in the order of epoch 0, which was trained already"),
    ],
)
def test_a_second_life_that_goes_on_otherwise_is_found(text: str, says: str, tmp_path: Path):
    report = report_of(tmp_path, text)
    assert [finding.check for finding in report.findings] == ["resume"], str(report)
    assert says in report.findings[0].says, str(report)


WITHIN = """
begin = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    net.load_state_dict(state["net"])
    begin = state["step"]
for epoch in range(begin // 16, 4):
    order = torch.randperm(256, generator=torch.Generator().manual_seed(SEED)).tolist()
    rest = order[16 * max(0, begin - 16 * epoch) :]
    for i, batch in enumerate(DataLoader(Subset(data, rest), 16), start=(256 - len(rest)) // 16):
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
        if (16 * epoch + i + 1) % 10 == 0:
            torch.save({"net": net.state_dict(), "step": 16 * epoch + i + 1}, "last.pt")
"""


@pytest.mark.thorough
def test_the_rest_of_an_epoch_is_held_against_its_beginning(tmp_path: Path):
    assert report_of(tmp_path, WITHIN.replace("SEED", "epoch")).ok
    [finding] = report_of(tmp_path, WITHIN.replace("SEED", "epoch + 99 * (begin > 0)")).findings
    assert finding.check == "resume" and "samples of that epoch are trained twice" in finding.says


@pytest.mark.thorough
def test_a_second_fit_that_trains_nothing_is_found(tmp_path: Path):
    fits = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

options = dict(max_epochs=1, limit_train_batches=8, limit_val_batches=0, accelerator="cpu", logger=False)
trainer = Trainer(enable_checkpointing=False, **options)
trainer.fit(BoringModel())
SECOND.fit(BoringModel())
"""
    [finding] = report_of(tmp_path, fits.replace("SECOND", "trainer")).findings
    assert finding.check == "length" and finding.says == "Fit 2 of 2 makes no optimizer step."
    assert report_of(tmp_path, fits.replace("SECOND", "Trainer(enable_checkpointing=False, **options)")).ok


@pytest.mark.thorough
def test_a_script_that_loads_nothing_says_how_it_is_to_resume(tmp_path: Path):
    report = report_of(tmp_path, lives(resumes="'--resume' in sys.argv"))
    assert report.ok is None and report.open == ("resume",) and "--resume-with" in report.not_judged["resume"]
    assert str(report).startswith("Ready, but nobody judged: resume. (")
    assert report_of(tmp_path, lives(resumes="'--resume' in sys.argv"), resume_with=["--resume"]).ok
    assert report_of(tmp_path, lives(resumes="False"), allow_unjudged=["resume"]).ok
