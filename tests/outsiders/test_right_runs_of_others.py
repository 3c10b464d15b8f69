"""Right runs with models of transformers and timm in Lightning modules, in which a rehearsal finds nothing.

The runs are functions of this module, so that ``python -m rehearse`` can be pointed at them as well.
"""

import pytest
import timm
import torch
import transformers
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rehearse import rehearse

QUIET = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)


class HuggingFace(LightningModule):
    """A model that returns its own loss, with the warm-up and the decay that its library gives."""

    def __init__(self, model, steps):
        super().__init__()
        self.model, self.steps = model, steps

    def training_step(self, batch, batch_idx):
        ids, labels = batch
        return self.model(input_ids=ids, labels=labels).loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Images(LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def texts():
    return torch.arange(32 * 8).remainder(31).view(32, 8)


def trainer(**flags):
    return Trainer(accelerator="cpu", max_epochs=2, **QUIET, **flags)


def gpt2():
    config = transformers.GPT2Config(vocab_size=31, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    data = DataLoader(TensorDataset(texts(), texts()), 4, shuffle=True)
    return trainer(accumulate_grad_batches=2), HuggingFace(transformers.GPT2LMHeadModel(config), 2 * 4), data


def bert_with_a_frozen_embedding():
    config = transformers.BertConfig(
        vocab_size=31, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = transformers.BertForSequenceClassification(config)
    model.bert.embeddings.requires_grad_(False)
    data = DataLoader(TensorDataset(texts(), texts()[:, 0] % 2), 4, shuffle=True)
    return trainer(gradient_clip_val=1.0), HuggingFace(model, 2 * 8), data


def pictures():
    images = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(images, torch.arange(16) % 10), 4, shuffle=True)


def resnet():
    return trainer(), Images(timm.create_model("test_resnet", num_classes=10)), pictures()


def vit_on_two_ranks():
    model = timm.create_model("test_vit", num_classes=10, img_size=32)
    return trainer(strategy="ddp", devices=2), Images(model), pictures()


def efficientnet_head():
    model = timm.create_model("test_efficientnet", num_classes=10)
    model.requires_grad_(False)
    model.get_classifier().requires_grad_(True)
    return trainer(), Images(model), pictures()


@pytest.mark.parametrize("make_run", [gpt2, bert_with_a_frozen_embedding, resnet, vit_on_two_ranks, efficientnet_head])
def test_nothing_is_found_in_a_right_run(make_run):
    report = rehearse(*make_run())
    assert report.ok, str(report)
    assert report.facts
