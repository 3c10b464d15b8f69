"""What a bigram model and a logistic regression say of the same data: ``python -m workbook.prices.baselines``.

Each is chosen with an eye on the validation, which flatters it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workbook.prices.jobs import PADDED, Passages, picture_job, prose_job
from workbook.prices.loop import Reading


def bigram() -> Reading:
    """The next character by the one before it: counted, and smoothed as the validation likes best."""
    job = prose_job()
    assert isinstance(job.samples, Passages)
    characters = len(job.samples.characters)
    counts = torch.zeros(characters, characters)
    for index in job.training:
        piece = job.samples.pieces[index]
        counts.index_put_((piece[:-1], piece[1:]), torch.ones(len(piece) - 1), accumulate=True)
    batch = job.collate([job.samples[index] for index in job.validation], None)
    asked = batch.targets != PADDED
    inputs, targets = batch.inputs[asked], batch.targets[asked]
    readings = []
    for added in (0.01, 0.03, 0.1, 0.3, 1.0):
        shares = (counts + added) / (counts + added).sum(1, keepdim=True)
        readings.append(reading_of(shares[inputs].log(), targets))
    return min(readings)


def logistic_regression() -> Reading:
    """Scores linear in the pixels, fitted to the end, with the weight decay that the validation likes best."""
    job = picture_job()
    parts = [job.collate([job.samples[index] for index in part], None) for part in (job.training, job.validation)]
    (train_x, train_y), (x, y) = [(part.inputs.flatten(1), part.targets) for part in parts]
    readings = []
    for decay in (0.01, 0.03, 0.1, 0.3, 1.0):
        weight, bias = torch.zeros(train_x.shape[1], 6, requires_grad=True), torch.zeros(6, requires_grad=True)
        optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

        def penalised() -> Tensor:
            optimizer.zero_grad()  # noqa: B023
            loss = F.cross_entropy(train_x @ weight + bias, train_y) + decay / 2 * weight.square().sum()  # noqa: B023
            loss.backward()
            return loss

        optimizer.step(penalised)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            readings.append(reading_of(F.log_softmax(x @ weight + bias, dim=1), y))
    return min(readings)


def reading_of(log_shares: Tensor, targets: Tensor) -> Reading:
    return Reading(F.nll_loss(log_shares, targets).item(), (log_shares.argmax(1) == targets).float().mean().item())


if __name__ == "__main__":
    for name, model in (("bigram", bigram), ("logistic regression", logistic_regression)):
        loss, accuracy = model()
        print(f"{name}: validation loss {loss:.3f}, accuracy {accuracy:.3f}")
