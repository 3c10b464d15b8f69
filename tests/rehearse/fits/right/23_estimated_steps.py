"""A linear decay to 0 whose horizon Lightning estimates, which is right where no loader and no window changes."""

from torch.optim.lr_scheduler import LambdaLR

from tests.rehearse.fits.parts import Scheduled, loader, quiet_trainer


def make_run():
    def decay(optimizer):
        steps = model.trainer.estimated_stepping_batches
        return LambdaLR(optimizer, lambda step: 1 - step / steps)

    model = Scheduled(decay)
    return quiet_trainer(accumulate_grad_batches=2), model, loader()
