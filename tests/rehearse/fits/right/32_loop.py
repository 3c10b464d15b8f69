"""A plain loop with windows of four and a cosine that ends with the run."""

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.rehearse.fits.parts import loader, mean_squared_error, plain_net

LOOP = True


def make_run():
    model = plain_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return dict(
        model=model,
        loader=loader(),
        loss_fn=mean_squared_error,
        optimizer=optimizer,
        scheduler=CosineAnnealingLR(optimizer, 3 * 2),
        accumulate_grad_batches=4,
        max_epochs=3,
    )
