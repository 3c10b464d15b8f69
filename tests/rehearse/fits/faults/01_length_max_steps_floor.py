"""``max_steps`` comes from a floor division, so 10 epochs end with the 8th: each has a 5th, short batch."""

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "length"
WRONG, RIGHT = 8, 10  # epochs of which all 5 batches were run


def build(batches):
    return quiet_trainer(max_epochs=10, max_steps=10 * batches), Net(), loader(36, batch_size=8)


def make_run():
    return build(36 // 8)


def make_twin():
    return build(-(-36 // 8))


def seen(*run):
    return fitted(*run).batches.count(5)
