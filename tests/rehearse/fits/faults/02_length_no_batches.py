"""``drop_last`` leaves nothing of 6 samples in batches of 8: the fit returns at once and has trained nothing."""

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "length"
WRONG, RIGHT = 0, 3  # updates


def build(batch_size):
    return quiet_trainer(), Net(), loader(6, batch_size=batch_size, drop_last=True)


def make_run():
    return build(8)


def make_twin():
    return build(6)


def seen(*run):
    return fitted(*run).updates
