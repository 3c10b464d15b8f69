"""A batch sampler of somebody else, which several tests wrap."""

import torch


class UnevenBatches:
    """Batches of 1 to 5, drawn from torch's global generator, so that they are others in every epoch."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        order = torch.randperm(self.n).tolist()
        while order:
            size = int(torch.randint(1, 6, ()))
            yield order[:size]
            order = order[size:]
