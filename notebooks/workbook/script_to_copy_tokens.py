"""The first half of `script_to_copy.py` for a language model: a dataset of token sequences, and a `Task`.

    python train_tokens.py runs/words                       # beside train.py, which is script_to_copy.py
    python -m rehearse train_tokens:make_run    # is the run right?

The loss counts tokens and not sequences: padding is left out, and every token of an optimizer step weighs the same, in
whichever micro-batch it is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from course_lib.datasets import load_words
from workbook.script_to_copy import Task, Training, main  # in your project: from train import …
from workbook.script_to_copy import make_run as make_run_of

BLANK, LETTERS, LONGEST = 0, 27, 16
"""The letters are 1 to 26; what pads a word is blank."""


class Words(Dataset[Tensor]):
    """Words as letters, padded to one length; from those that are trained on a letter may be blanked."""

    def __init__(self, words: list[str], *, augmented: bool) -> None:
        self.words, self.augmented = words, augmented

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> Tensor:
        letters = torch.tensor([ord(letter) - ord("a") + 1 for letter in self.words[index][:LONGEST]])
        if self.augmented and torch.rand(()) < 0.1:
            letters[int(torch.randint(len(letters), ()))] = BLANK
        return F.pad(letters, (0, LONGEST - len(letters)), value=BLANK)


class NextLetter(nn.Module):
    """The logits of each next letter, of shape (words, letters, 27), from the letters before it."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, 32), nn.Embedding(LONGEST, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, LETTERS)

    def forward(self, letters: Tensor) -> Tensor:
        length = letters.shape[1]
        later = nn.Transformer.generate_square_subsequent_mask(length, device=letters.device)
        places = self.places(torch.arange(length, device=letters.device))
        logits: Tensor = self.head(self.block(self.letters(letters) + places, src_mask=later, is_causal=True))
        return logits


class Tokens(Task):
    epochs, batch_size, learning_rate = 2, 32, 0.003

    @staticmethod
    def datasets() -> tuple[Any, Any]:
        words = load_words()
        return Words(words[200:1000], augmented=True), Words(words[:200], augmented=False)

    @staticmethod
    def net() -> nn.Module:
        return NextLetter()

    @staticmethod
    def loss_sum_and_count(net: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        logits, targets = net(batch[:, :-1]), batch[:, 1:]
        loss_sum = F.cross_entropy(logits.transpose(1, 2), targets, reduction="sum", ignore_index=BLANK)
        return loss_sum, (targets != BLANK).sum()


def make_run() -> tuple[Any, Training, Any]:
    """What a rehearsal judges."""
    return make_run_of(task=Tokens)


if __name__ == "__main__":
    main(Tokens)
