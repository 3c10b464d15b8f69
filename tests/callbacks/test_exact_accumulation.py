"""ExactAccumulation in real fits, against the updates of a plain loop over big batches."""

import functools
import json
import re

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from workbook.ch04_accumulation_lab import count, gradient, loss_sum, random_tokens

from course_lib.accumulation import windows
from course_lib.callbacks import ExactAccumulation, SkipBadSteps, StepAudit
from course_lib.launch import run_ranks
from course_lib.resume import ResumableDataLoader
from tests.trainer_oracle import quiet_trainer

K = 3


def ragged(number, seed=0):
    """Micro-batches of 1 … 9 tokens, some masked; the last one of each three by all its tokens."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 10, (number,), generator=generator).tolist()
    return [random_tokens(generator, n, n if i % 3 == 2 else n // 3) for i, n in enumerate(sizes)]


class Classifier(LightningModule):
    """Returns a sum and its count; keeps each window's gradient, and what on_train_batch_end was given."""

    def __init__(self, lr=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        self.lr, self.gradients, self.outputs = lr, [], []

    def training_step(self, batch):
        return loss_sum(self.net, batch), count(batch)

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(gradient(self.net))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.outputs.append(outputs)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fit(model, loader, *callbacks, **flags):
    """Fit with ExactAccumulation; `loader` may be a list of micro-batches."""
    loader = DataLoader(loader, batch_size=None) if isinstance(loader, list) else loader
    flags = {"max_epochs": 1, "accumulate_grad_batches": K} | flags
    trainer = quiet_trainer(callbacks=[ExactAccumulation(), *callbacks], **flags)
    trainer.fit(model, loader)
    return trainer


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.net.parameters()])


def fit_big_batches(epochs, clip=lambda parameters: None, lr=0.1):
    """The oracle: a loop that makes one update for each list of micro-batches, as one batch."""
    model = Classifier(lr)
    optimizer = model.configure_optimizers()
    for window in epochs:
        features, classes = map(torch.cat, zip(*window, strict=True))
        optimizer.zero_grad()
        F.cross_entropy(model.net(features), classes, ignore_index=-100).backward()
        model.on_before_optimizer_step(optimizer)
        clip(model.net.parameters())
        optimizer.step()
    return model


def assert_same_training(model, oracle):
    for mine, of_big_batch in zip(model.gradients, oracle.gradients, strict=True):
        assert (mine - of_big_batch).norm() <= 1e-12 * of_big_batch.norm()
    torch.testing.assert_close(weights(model), weights(oracle), rtol=0, atol=1e-12)


def by_k(batches, k=K):
    return list(windows(batches, k))


# --------------------------------------------------------------------------------------------- what a fit may have


@pytest.mark.parametrize("schedule", [1, 2, 3, 5, 20, {0: 1, 1: 3, 2: 2}], ids=str)
def test_updates_are_those_of_the_big_batches(schedule):
    # Seven micro-batches: the last window is short, also where k changes from epoch to epoch.
    batches = [batch for batch in ragged(10) if count(batch)]
    assert len(batches) == 7
    in_epoch = schedule if isinstance(schedule, dict) else dict.fromkeys(range(3), schedule)
    model = Classifier()
    if isinstance(schedule, dict):
        fit(model, batches, GradientAccumulationScheduler(schedule), max_epochs=3, accumulate_grad_batches=1)
    else:
        fit(model, batches, max_epochs=3, accumulate_grad_batches=schedule)
    assert_same_training(model, fit_big_batches(w for epoch in range(3) for w in by_k(batches, in_epoch[epoch])))


def test_global_count_is_what_the_last_gradient_was_divided_by():
    exact, batches = ExactAccumulation(), ragged(7)
    trainer = quiet_trainer(callbacks=[exact], max_epochs=1, accumulate_grad_batches=K)
    trainer.fit(Classifier(), DataLoader(batches, batch_size=None))
    assert exact.global_count == count(batches[6]) > 0


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_acts_on_the_exact_gradient(algorithm):
    batches, limit = ragged(7), 0.05
    clip = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}[algorithm]
    model = Classifier()
    fit(model, batches, gradient_clip_val=limit, gradient_clip_algorithm=algorithm)
    assert_same_training(model, fit_big_batches(by_k(batches), lambda parameters: clip(parameters, limit)))
    unclipped = fit_big_batches(by_k(batches))
    assert (weights(model) - weights(unclipped)).norm() > 0.01


def test_a_dict_is_taken_as_a_tuple_is_and_its_other_keys_go_on():
    class ReturnsDict(Classifier):
        def training_step(self, batch, batch_idx):
            loss, n = super().training_step(batch)
            return {"count": n, "loss": loss, "note": batch_idx}

    batches = ragged(7)
    of_dict, of_tuple = ReturnsDict(), Classifier()
    fit(of_dict, batches), fit(of_tuple, batches)
    assert torch.equal(weights(of_dict), weights(of_tuple))
    assert [outputs["note"] for outputs in of_dict.outputs] == list(range(7))
    fresh = Classifier().net
    for model in (of_dict, of_tuple):
        assert [outputs["count"] for outputs in model.outputs] == [count(batch) for batch in batches]
        torch.testing.assert_close(model.outputs[0]["loss"], loss_sum(fresh, batches[0]).detach() / K)


class MaskedMean(Classifier):
    def training_step(self, batch):
        x, y = batch
        labelled = (y != -100).sum()
        return nn.functional.cross_entropy(self.net(x), y, ignore_index=-100) * labelled, labelled


def test_a_mean_of_nothing_adds_nothing():
    batches = ragged(6)
    for _, y in (batches[1], batches[5]):
        y.fill_(-100)
    means, sums = MaskedMean(), Classifier()
    for model in (means, sums):
        fit(model, batches)
    assert weights(means).isfinite().all()
    torch.testing.assert_close(weights(means), weights(sums))


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")  # told once a process
def test_a_micro_batch_that_is_left_out_is_not_counted():
    class LeavesOut(Classifier):
        def training_step(self, batch, batch_idx):
            return None if batch_idx in (1, 2, 3, 4, 5, 6) else super().training_step(batch)

        def on_before_optimizer_step(self, optimizer):
            with_gradient.append(self.net[0].weight.grad is not None)
            if with_gradient[-1]:
                super().on_before_optimizer_step(optimizer)

    batches, with_gradient = ragged(8), []
    model = LeavesOut()
    fit(model, batches)
    assert with_gradient == [True, False, True]  # the second window has no micro-batch left, the third its last
    assert_same_training(model, fit_big_batches([batches[:1], batches[7:]]))


class Stream(IterableDataset):
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@pytest.mark.parametrize(
    ("loader_of", "limit", "used"),
    [
        (lambda batches: DataLoader(Stream(batches), batch_size=None), 1.0, 10),
        (lambda batches: DataLoader(Stream(batches), batch_size=None), 4, 4),
        (list, 4, 4),
        (list, 0.5, 5),
    ],
    ids=["a stream", "a stream to 4", "4 micro-batches", "half of them"],
)
def test_an_epoch_may_have_no_length_or_a_limit(loader_of, limit, used):
    batches = ragged(10)
    model = Classifier()
    fit(model, loader_of(batches), max_epochs=2, limit_train_batches=limit)
    assert_same_training(model, fit_big_batches(by_k(batches[:used]) * 2))


def test_a_scheduler_and_the_audit_count_optimizer_steps():
    class WithScheduler(Classifier):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    audit = StepAudit(strict=True)
    trainer = fit(WithScheduler(), ragged(7), audit, max_epochs=2)
    assert audit.plan.total_steps == audit.updates == trainer.global_step == 6
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 6
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 8)


def test_an_optimizer_that_calls_its_closure_again_counts_once():
    class WithLBFGS(Classifier):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0, max_iter=3, tolerance_grad=0, tolerance_change=-1)

    model, batches = WithLBFGS(), ragged(2)
    fit(model, batches, accumulate_grad_batches=1)
    of_big_batch = fit_big_batches(by_k(batches, 1), lr=0).gradients
    assert len(model.gradients) == 6
    for number, mine in enumerate(model.gradients):
        torch.testing.assert_close(mine, of_big_batch[number // 3], rtol=1e-12, atol=1e-15)


def test_bfloat16_runs():
    batches = [(features.float(), classes) for features, classes in ragged(7)]
    model = Classifier(lr=0).float()
    fit(model, batches, precision="bf16-mixed")
    check_low_precision(model, batches)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_gradient_scaler_is_undone_before(device):
    batches = [(features.float(), classes) for features, classes in ragged(7)]
    model = Classifier(lr=0).float()
    scaler = torch.amp.GradScaler(device, init_scale=8.0)  # a larger one would overflow float16 and skip a step
    trainer = Trainer(
        accelerator=device, devices=1, max_epochs=1, accumulate_grad_batches=K, callbacks=[ExactAccumulation()],
        plugins=[MixedPrecision("16-mixed", device, scaler)], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(batches, batch_size=None))
    check_low_precision(model.cpu(), batches)


def check_low_precision(model, batches):
    in_full = fit_big_batches(by_k([(features.double(), classes) for features, classes in batches]), lr=0)
    for mine, exact in zip(model.gradients, in_full.gradients, strict=True):
        assert mine.dtype == torch.float32
        assert 1e-6 < (mine.cpu() - exact).norm() / exact.norm() < 0.02


def test_a_resume_within_an_epoch_changes_nothing(tmp_path):
    # 23 samples in micro-batches of 2: 12 in an epoch, 4 windows; the run stops after the second epoch's first.
    features, classes = random_tokens(torch.Generator().manual_seed(0), 23, masked=9)
    loader = functools.partial(ResumableDataLoader, TensorDataset(features, classes), batch_size=2, shuffle=True)

    def run(folder, checkpoint=None, **flags):
        model = Classifier()
        saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder, callbacks=[ExactAccumulation(), saver], accumulate_grad_batches=K, **flags,
        )  # fmt: skip
        trainer.fit(model, loader(), ckpt_path=checkpoint)
        return model

    whole = run(tmp_path / "whole", max_epochs=2)
    first = run(tmp_path / "first", max_epochs=2, max_steps=5)
    second = run(tmp_path / "second", tmp_path / "first" / "step=5.ckpt", max_epochs=2)
    assert (len(first.gradients), len(second.gradients), len(whole.gradients)) == (5, 3, 8)
    assert all(map(torch.equal, first.gradients + second.gradients, whole.gradients))
    assert torch.equal(weights(second), weights(whole))


# --------------------------------------------------------------------------------------- the module's training_step


def test_the_module_keeps_its_own_training_step():
    class Fails(Callback):
        def on_train_batch_end(self, *_):
            raise RuntimeError("stop here")

    model, batches = Classifier(), ragged(4)
    fit(model, batches)
    assert "training_step" not in vars(model)
    with pytest.raises(RuntimeError, match="stop here"):
        fit(model, batches, Fails())
    assert "training_step" not in vars(model)
    assert isinstance(model.training_step(batches[0]), tuple)


def test_a_training_step_of_the_instance_is_put_back():
    class Validates(Classifier):
        def validation_step(self, batch):
            pass

    model, batches = Validates(), ragged(4)

    def own(batch):
        return loss_sum(model.net, batch), count(batch)

    model.training_step = own
    exact, loader = ExactAccumulation(), DataLoader(batches, batch_size=None)
    quiet_trainer(callbacks=[exact]).validate(model, loader, verbose=False)
    assert model.training_step is own
    quiet_trainer(callbacks=[exact], max_epochs=1, accumulate_grad_batches=K).fit(model, loader)
    assert model.training_step is own
    assert_same_training(model, fit_big_batches(by_k(batches)))


def test_a_decorated_training_step_is_called_as_without_the_callback():
    def decorated(training_step):
        @functools.wraps(training_step)
        def call(*args, **kwargs):
            return training_step(*args, **kwargs)

        return call

    class WithoutIndex(Classifier):
        training_step = decorated(Classifier.training_step)

    class WithIndex(Classifier):
        @decorated
        def training_step(self, batch, batch_idx):
            return Classifier.training_step(self, batch)

    batches = ragged(4)
    for model in (WithoutIndex(), WithIndex()):
        fit(model, batches)
        assert_same_training(model, fit_big_batches(by_k(batches)))


def test_one_callback_serves_two_fits():
    exact, batches = ExactAccumulation(), ragged(7)
    for _ in range(2):
        model = Classifier()
        trainer = quiet_trainer(callbacks=[exact], max_epochs=1, accumulate_grad_batches=K)
        trainer.fit(model, DataLoader(batches, batch_size=None))
        assert_same_training(model, fit_big_batches(by_k(batches)))


# ------------------------------------------------------------------------------------------------------ two ranks


def test_one_reduction_a_window_on_two_ranks():
    ranks = [ragged(7), ragged(7, seed=1)]

    class Counting(Classifier):
        def on_train_start(self):
            self.reductions, self.after_window = [], []

            def reduce(state, bucket):
                self.reductions.append(bucket.index())
                return allreduce_hook(state, bucket)

            self.trainer.strategy.model.register_comm_hook(None, reduce)

        def on_before_optimizer_step(self, optimizer):
            super().on_before_optimizer_step(optimizer)
            self.after_window.append(len(self.reductions))

    def fit_rank(rank):
        model = Counting()
        fit(model, ranks[rank], devices=2, strategy="ddp", use_distributed_sampler=False)
        return model.after_window, model.gradients, weights(model)

    pairs = [first + second for first, second in zip(*map(by_k, ranks), strict=True)]
    oracle = fit_big_batches(pairs)
    for result in run_ranks(fit_rank):
        after_window, gradients, found = result.value
        assert after_window == [1, 2, 3]
        for mine, of_big_batch in zip(gradients, oracle.gradients, strict=True):
            assert (mine - of_big_batch).norm() <= 1e-12 * of_big_batch.norm()
        torch.testing.assert_close(found, weights(oracle), rtol=0, atol=1e-12)


def masked(batches):
    return [(features, torch.full_like(classes, -100)) for features, classes in batches]


class ReturnsLoss(Classifier):
    def training_step(self, batch):
        return loss_sum(self.net, batch)


class ReturnsMean(Classifier):
    def training_step(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1], ignore_index=-100), count(batch)


BAD_ON_BOTH = {
    "no count": (ReturnsLoss, lambda rank: ragged(4), "training_step must return (loss_sum, count)"),
    "a mean": (ReturnsMean, lambda rank: ragged(4), "the loss must be a sum over the micro-batch's count of"),
    "nothing to average": (
        Classifier,
        lambda rank: masked(ragged(4)),
        "the total count of window 1 must be above 0, got 0 over 2 ranks",
    ),
    "other numbers of micro-batches": (
        Classifier,
        lambda rank: ragged(4 + rank),
        "the ranks have different numbers of batches (rank 0: 4, rank 1: 5)",
    ),
}


@pytest.mark.parametrize("name", BAD_ON_BOTH)
def test_both_ranks_raise_at_once(name):
    module, loader_of, message = BAD_ON_BOTH[name]

    def fit_rank(rank):
        try:
            fit(module(), loader_of(rank), devices=2, strategy="ddp", use_distributed_sampler=False)
        except ValueError as error:
            return str(error)

    results = run_ranks(fit_rank, timeout=120)
    assert all(message in result.value for result in results)
    assert max(result.seconds for result in results) < 10


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss, n: loss, "got a Tensor"),
        (lambda loss, n: {"loss": loss, "logits": 1}, "got a dict with the keys ['logits', 'loss']"),
        (lambda loss, n: {"count": n}, "got a dict with the keys ['count']"),
        (lambda loss, n: (loss, n, 1), "got a tuple"),
        (lambda loss, n: (loss.expand(2), n), "the loss must be a 0-dim tensor, the sum over the micro-batch, got a"),
        (lambda loss, n: (loss.item(), n), "the loss must be a 0-dim tensor, the sum over the micro-batch, got 7.9"),
        (lambda loss, n: (loss, -n), "a micro-batch's count must be a finite number of at least 0, got tensor(-"),
        (lambda loss, n: (loss, None), "a micro-batch's count must be a finite number of at least 0, got None"),
        (lambda loss, n: (loss, 0), "the total count of window 1 must be above 0, got 0 over 1 rank: there is"),
    ],
)
def test_a_bad_return_is_named(returned, message):
    class Returns(Classifier):
        def training_step(self, batch):
            return returned(*super().training_step(batch))

    model = Returns()
    with pytest.raises(ValueError, match=re.escape(message)):
        fit(model, ragged(4))
    assert "training_step" not in vars(model)


def test_a_mean_is_named():
    with pytest.raises(ValueError, match=re.escape("got a mean (by its grad_fn)")):
        fit(ReturnsMean(), ragged(4))


def test_manual_optimization_is_refused():
    class Manual(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(MisconfigurationException, match=re.escape("call course_lib.accumulation.accumulate(")):
        fit(Manual(), ragged(4), accumulate_grad_batches=1)


def test_a_step_that_takes_the_iterator_is_refused():
    class OfIterator(Classifier):
        def training_step(self, dataloader_iter):
            return super().training_step(next(dataloader_iter)[0])

    with pytest.raises(MisconfigurationException, match="got one that takes the loader's iterator"):
        fit(OfIterator(), ragged(4))


def test_a_strategy_that_accumulates_itself_is_refused():
    class Accumulates(SingleDeviceStrategy):
        handles_gradient_accumulation = True

    with pytest.raises(MisconfigurationException, match="ExactAccumulation knows one device and DDP, got Accumulates"):
        quiet_trainer(strategy=Accumulates("cpu"), callbacks=[ExactAccumulation()]).fit(
            Classifier(), DataLoader(ragged(4), batch_size=None)
        )


def test_a_second_one_in_the_same_trainer_is_refused():
    with pytest.raises(MisconfigurationException, match="two ExactAccumulation callbacks: gradients would be scaled"):
        fit(Classifier(), ragged(4), ExactAccumulation())


class MaySkip(Classifier):
    def on_before_optimizer_step(self, optimizer):
        """There is no gradient to keep in a window that is skipped."""


def fit_in_order(batches, callbacks):
    model = MaySkip()
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=2, callbacks=callbacks)
    trainer.fit(model, DataLoader(batches, batch_size=None))
    return model


@pytest.mark.parametrize("turned", [False, True])
def test_a_window_without_a_label_is_skipped_where_there_is_something_to_skip_it(turned, tmp_path):
    batches = ragged(8)
    for _, y in batches[2:4]:
        y.fill_(-100)
    callbacks = [ExactAccumulation(), SkipBadSteps(journal=tmp_path / "skipped.jsonl")]
    model = fit_in_order(batches, callbacks[::-1] if turned else callbacks)
    without = fit_in_order(batches[:2] + batches[4:], [ExactAccumulation()])
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(without), strict=True))
    assert "no sample of the window has a label" in (tmp_path / "skipped.jsonl").read_text()


def test_the_order_of_the_callbacks_does_not_matter(tmp_path):
    # A norm is judged as it would be applied: in both orders the same window is a spike.
    batches = ragged(40)
    batches[25][0].fill_(80.0)
    skips = []
    for turned in (False, True):
        journal = tmp_path / f"{turned}.jsonl"
        callbacks = [ExactAccumulation(), SkipBadSteps(spike_factor=5, min_history=4, journal=journal)]
        fit_in_order(batches, callbacks[::-1] if turned else callbacks)
        skips.append([json.loads(line) for line in journal.read_text().splitlines()])
    one, other = ([(skip["attempt"], skip["norm"]) for skip in each] for each in skips)
    assert one == other != []
