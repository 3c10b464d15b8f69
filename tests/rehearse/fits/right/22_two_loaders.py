"""Two loaders at once, the shorter one cycled beside the longer one."""

from lightning.pytorch.utilities import CombinedLoader

from tests.rehearse.fits.parts import Net, loader, quiet_trainer


class Run(Net):
    def training_step(self, batch, batch_idx):
        return sum(super(Run, self).training_step(part, batch_idx) for part in batch.values())


def make_run():
    return quiet_trainer(), Run(), CombinedLoader({"a": loader(), "b": loader(32)}, mode="max_size_cycle")
