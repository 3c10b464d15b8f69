"""Windows of four full batches, clipping by norm, AdamW without weight decay on biases, and no schedule."""

import torch

from tests.rehearse.fits.parts import Net, loader, quiet_trainer


class Run(Net):
    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-3)


def make_run():
    return quiet_trainer(accumulate_grad_batches=4, gradient_clip_val=1.0), Run(), loader()
