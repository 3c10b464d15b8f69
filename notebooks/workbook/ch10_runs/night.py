"""The run of the chapter: 512 digits, windows of 4 micro-batches, AdamW, a cosine to 0, and a repeatable order."""

from lightning.pytorch import LightningModule
from torch import Generator, nn, optim, randperm
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Sampler, TensorDataset

from course_lib.datasets import load_digits
from workbook.trainers import quiet_trainer

EPOCHS, BATCH, WINDOW, SAMPLES = 6, 16, 4, 512


class Shuffled(Sampler):
    """A random order that is the same whenever the script is started."""

    def __iter__(self):
        generator = Generator().manual_seed(2026)
        return iter(randperm(SAMPLES, generator=generator).tolist())

    def __len__(self):
        return SAMPLES


class Digits(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        weights = [p for p in self.parameters() if p.ndim == 2]
        biases = [p for p in self.parameters() if p.ndim == 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
        optimizer = optim.AdamW(groups, lr=0.01)
        schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * SAMPLES // BATCH)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def make_run(module=Digits, sampler=Shuffled):
    images, labels = load_digits()
    dataset = TensorDataset(images[:SAMPLES], labels[:SAMPLES])
    trainer = quiet_trainer(max_epochs=EPOCHS, accumulate_grad_batches=WINDOW)
    return trainer, module(), DataLoader(dataset, BATCH, sampler=sampler())
