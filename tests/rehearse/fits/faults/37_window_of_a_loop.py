"""A plain loop averages each batch over its own labels; a batch with one label then counts as one with four."""

import torch
from torch import nn

from tests.rehearse.fits.parts import loader, looped

CHECK = "window"
LOOP = True
WRONG, RIGHT = [0.25, 0.0625], [0.1, 0.1]  # what the first and the last of a window's 10 labels contribute


class Weighing(nn.Module):
    """One weight for each sample: its gradient is what the sample weighs in an update."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(16))

    def forward(self, indices):
        return self.weights[indices]


def mean_of_labels(model, batch):
    labels = labelled(batch[2])
    return model(labels).mean()


def mean_of_window(model, batch):
    return model(labelled(batch[2])).sum() * 4 / 10


def labelled(indices):
    return indices[indices % 4 <= indices // 4]


def build(loss_fn):
    model = Weighing()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = loader(16, batch_size=4, shuffle=False)
    return dict(model=model, loader=data, loss_fn=loss_fn, optimizer=optimizer, accumulate_grad_batches=4)


def make_run():
    return build(mean_of_labels)


def make_twin():
    return build(mean_of_window)


def seen(**run):
    looped(**run)
    weights = -run["model"].weights.detach()
    return [round(weights[index].item(), 6) for index in (0, 15)]
