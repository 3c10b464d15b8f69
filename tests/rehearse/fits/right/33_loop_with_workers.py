"""A plain loop over a loader with a worker and without a schedule."""

import torch

from tests.rehearse.fits.parts import loader, mean_squared_error, plain_net

LOOP = True


def make_run():
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = loader(60, num_workers=1)
    return dict(model=model, loader=data, loss_fn=mean_squared_error, optimizer=optimizer, max_epochs=2)
