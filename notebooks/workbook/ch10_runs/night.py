"""The run of chapter 10: 512 digits, windows of 4 micro-batches, AdamW, a cosine to 0, an order that repeats."""

from lightning.pytorch import LightningModule
from torch import Generator, nn, optim, randperm
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Sampler, TensorDataset

from course_lib.datasets import load_digits
from workbook.trainers import quiet_trainer

SAMPLES, BATCH, WINDOW, EPOCHS = 512, 16, 4, 6


class Shuffled(Sampler):
    """A random order, the same whenever the script is started."""

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        generator = Generator().manual_seed(2026)
        return iter(randperm(SAMPLES, generator=generator).tolist())


class Digits(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def parameter_groups(self):
        """Weights decay, biases do not."""
        weights = [p for p in self.parameters() if p.ndim == 2]
        biases = [p for p in self.parameters() if p.ndim == 1]
        return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]

    def horizon(self):
        """The cosine reaches 0 at the end of the last epoch."""
        return EPOCHS * SAMPLES // BATCH

    def configure_optimizers(self):
        optimizer = optim.AdamW(self.parameter_groups(), lr=0.01)
        schedule = CosineAnnealingLR(optimizer, self.horizon())
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def make_run(module=Digits, sampler=Shuffled, **flags):
    images, labels = load_digits()
    dataset = TensorDataset(images[:SAMPLES], labels[:SAMPLES])
    trainer = quiet_trainer(max_epochs=EPOCHS, accumulate_grad_batches=WINDOW, accelerator="cpu", **flags)
    return trainer, module(), DataLoader(dataset, BATCH, sampler=sampler())
