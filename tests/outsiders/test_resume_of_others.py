"""ResumableDataLoader in accelerate and in transformers' Trainer: no sample missing or doubled, and an exact resume."""

from collections import Counter

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import nn

from course_lib.launch import run_ranks
from course_lib.resume import ResumableDataLoader

SAMPLES, EPOCHS = 43, 2
"""Neither 4 nor 2 × 4 divides 43: the last batches are ragged."""


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"x": torch.full((1,), float(index)), "labels": torch.tensor(index)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.seen = nn.Linear(1, 1), []

    def forward(self, x, labels):
        self.seen.append(labels.tolist())
        return {"loss": (self.layer(x / SAMPLES) ** 2).mean()}


def loader(workers):
    return ResumableDataLoader(Rows(), batch_size=4, shuffle=True, seed=1, num_workers=workers)


def with_accelerate(rank, folder, stop, resume, accumulate, workers):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model, optimizer, batches = accelerator.prepare(net, optimizer, loader(workers))
    if resume:
        accelerator.load_state(folder)
    updates = 0
    while batches.batch_sampler.epoch < EPOCHS:
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            updates += accelerator.sync_gradients
            if updates == stop and accelerator.sync_gradients:
                accelerator.save_state(folder)
                return net.seen, []
    return net.seen, [parameter.detach().clone() for parameter in net.parameters()]


class StopAt(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = control.should_training_stop = state.global_step == self.step


class Trainer(transformers.Trainer):
    workers = 0

    def get_train_dataloader(self):
        return loader(self.workers)


def with_transformers(rank, folder, stop, resume, accumulate, workers):
    Trainer.workers = workers
    quiet = dict(report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True)
    args = transformers.TrainingArguments(
        folder, num_train_epochs=EPOCHS, gradient_accumulation_steps=accumulate, per_device_train_batch_size=4, **quiet
    )
    net = Net()
    trainer = Trainer(net, args, train_dataset=Rows(), callbacks=[StopAt(stop)] if stop else [])
    trainer.train(resume_from_checkpoint=transformers.trainer_utils.get_last_checkpoint(folder) if resume else None)
    return net.seen, [parameter.detach().clone() for parameter in net.parameters()]


def on_ranks(world_size, *arguments):
    return [result.value for result in run_ranks(arguments[0], world_size, args=arguments[1:], timeout=120)]


@pytest.mark.parametrize("run", [with_accelerate, with_transformers])
@pytest.mark.parametrize(("accumulate", "workers"), [(1, 0), (1, 2), (2, 0)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(world_size, accumulate, workers, run, tmp_path):
    whole = on_ranks(world_size, run, str(tmp_path / "whole"), 0, False, accumulate, workers)
    seen = Counter(index for batches, _ in whole for batch in batches for index in batch)
    assert seen == dict.fromkeys(range(SAMPLES), EPOCHS)
    updates = -(-len(whole[0][0]) // accumulate)
    for stop in (2, updates // 2 + 2):  # within the first epoch and within the second
        folder = str(tmp_path / f"stopped-{stop}")
        first = on_ranks(world_size, run, folder, stop, False, accumulate, workers)
        rest = on_ranks(world_size, run, folder, 0, True, accumulate, workers)
        for (before, _), (after, weights), (all_batches, all_weights) in zip(first, rest, whole, strict=True):
            assert before + after == all_batches
            assert all(map(torch.equal, weights, all_weights))
