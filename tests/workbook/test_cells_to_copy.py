"""Functions that stand in a chapter's cell, and that a reader copies into other code than the chapter's."""

import contextlib
import copy
import json
import math
import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from workbook import ch04_accumulation_lab as lab
from workbook import ch09_training_script as script

from course_lib.accumulation import accumulate
from course_lib.launch import run_ranks

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def defined_in(notebook, cell_id, **names):
    cells = json.loads((NOTEBOOKS / notebook).read_text())["cells"]
    [source] = ["".join(cell["source"]) for cell in cells if cell["id"] == cell_id]
    exec(source, names)
    return names


def test_the_first_bad_module_is_found_among_layers_that_return_tuples_and_dicts():
    first_bad_module = defined_in("07_skipping_steps.ipynb", "cause", torch=torch, nn=nn)["first_bad_module"]

    class AsDict(nn.LSTM):
        def forward(self, x):
            return {"output": super().forward(x)[0]}

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.good, self.bad = nn.LSTM(4, 4), AsDict(4, 4)
            self.scale = 1.0

        def forward(self, x):
            hidden, _ = self.good(x)
            return self.scale * self.bad(hidden)["output"]

    model = Recurrent()
    assert first_bad_module(model, torch.ones(2, 3, 4)) is None
    model.scale = math.inf
    assert first_bad_module(model, torch.ones(2, 3, 4)) == "the model itself"
    model.bad.weight_ih_l0.data[0, 0] = math.nan
    assert first_bad_module(model, torch.ones(2, 3, 4)) == "bad"
    assert not any(module._forward_hooks for module in model.modules())


THREE_RANKS = [
    torch.arange(0, 40).split([20, 10, 6, 3, 1]),
    torch.arange(40, 56).split([15, 1]),
    torch.arange(56, 64).split(8),
]


def weights_by_hand(rank):
    names = dict(torch=torch, dist=dist, nullcontext=contextlib.nullcontext)
    by_hand = defined_in("04_gradient_accumulation.ipynb", "by-hand", **names)["accumulate_by_hand"]
    return lab.sample_weights(rank, by_hand, THREE_RANKS)


def test_accumulation_by_hand_is_right_on_three_ranks_with_unequal_numbers_of_micro_batches():
    for result in run_ranks(weights_by_hand, world_size=3, backend="gloo"):
        assert result.value == [1.0] * 64


def test_the_loop_of_chapter_04_runs_with_a_gradient_scaler():
    cells = json.loads((NOTEBOOKS / "04_gradient_accumulation.ipynb").read_text())["cells"]
    sources = {cell["id"]: "".join(cell["source"]) for cell in cells}
    scaled, causal = re.findall(r"```python\n(.*?)```", sources["project-trainer"], re.DOTALL)
    assert "num_items_in_batch=1" in causal  # tests/outsiders runs it with transformers
    model = lab.gpt().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    window = [lab.collate(lab.passages()[start : start + 4]) for start in (0, 4, 8)]
    names = dict(torch=torch, nn=nn, F=F, accumulate=accumulate, device=torch.device("cpu"), model=model)
    exec(sources["project"], names)
    start = lab.weights_of(model)
    exec(scaled, {**names, "optimizer": optimizer, "window": window})
    moved = lab.weights_of(model) - start
    net = lab.gpt().eval()
    accumulate(net, window, lab.loss_sum, lab.count)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    assert lab.distance(moved, -lab.gradient(net)) < 0.05  # bfloat16


def test_what_was_kept_by_hand_can_be_gone_on_with_twice():
    samples = script.load_samples(bad=False)[:160]
    names = dict(torch=torch, F=F, copy=copy, script=script)
    names["images"] = torch.stack([image for image, _, _ in samples])
    names["labels"] = torch.tensor([label for _, label, _ in samples])
    train_by_hand = defined_in("09_all_at_once.ipynb", "by-hand", **names)["train_by_hand"]
    net = script.digit_net()
    kept = train_by_hand((net.state_dict(), torch.optim.AdamW(net.parameters()).state_dict(), 0), until=2)
    once, again = (train_by_hand(kept, until=4)[0] for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)
