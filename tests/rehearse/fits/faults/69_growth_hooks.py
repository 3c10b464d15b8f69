"""Each training step registers its hook again and none is removed: the 24th step calls 24 of them."""

from tests.rehearse.fits.parts import Net, fitted, loader, quiet_trainer

CHECK = "growth"
WRONG, RIGHT = 24, 1  # hooks at the end


class Run(Net):
    """Looks at the largest activation of each step."""

    def __init__(self, remove):
        super().__init__()
        self.remove = remove
        self.hook = None

    def look(self, module, inputs, output):
        self.largest = output.detach().max().item()

    def training_step(self, batch, batch_idx):
        if self.remove and self.hook is not None:
            self.hook.remove()
        self.hook = self.body.register_forward_hook(self.look)
        return super().training_step(batch, batch_idx)


def make_run():
    return quiet_trainer(), Run(remove=False), loader()


def make_twin():
    return quiet_trainer(), Run(remove=True), loader()


def seen(trainer, model, data):
    fitted(trainer, model, data)
    return len(model.body._forward_hooks)
