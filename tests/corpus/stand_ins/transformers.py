"""The part of transformers that scripts ask for: a small classifier in place of one whose weights are downloaded."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


def set_seed(seed):
    torch.manual_seed(seed)


def get_linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    """Up in a straight line, and down in another to 0."""

    def factor(step):
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))

    return LambdaLR(optimizer, factor)


class Batch(dict):
    def to(self, device):
        return self


class AutoTokenizer:
    @classmethod
    def from_pretrained(cls, *_, **__):
        return cls()

    def pad(self, examples, **_):
        longest = max(len(example["input_ids"]) for example in examples)
        tokens = torch.zeros(len(examples), longest, dtype=torch.long)
        for row, example in enumerate(examples):
            tokens[row, : len(example["input_ids"])] = torch.tensor(example["input_ids"])
        return Batch(input_ids=tokens, labels=torch.tensor([example["labels"] for example in examples]))


class AutoModelForSequenceClassification(nn.Module):
    @classmethod
    def from_pretrained(cls, *_, **__):
        return cls()

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(1_000, 32), nn.Linear(32, 2)
        self.dropout = nn.Dropout(0.1)

    def forward(self, input_ids, labels):
        logits = self.head(self.dropout(self.words(input_ids).mean(1)))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(name)
    return type(name, (), {"__init__": None})  # can be imported, and not made
