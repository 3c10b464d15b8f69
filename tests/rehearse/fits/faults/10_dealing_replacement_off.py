"""With ``use_distributed_sampler=False`` and no sharding of its own, each of two ranks trains on all 64 samples."""

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "dealing"
RANKS = 2
WRONG, RIGHT = 64, 32  # samples of a rank in an epoch


def build(use_distributed_sampler):
    return quiet_trainer(strategy="ddp", devices=2, use_distributed_sampler=use_distributed_sampler), Net(), loader()


def make_run():
    return build(False)


def make_twin():
    return build(True)


def seen(*run):
    return len(fitted(*run).samples[0])
