"""What Lightning's checkpoints do not hold, and a reader's code goes by: put back, told of, or refused."""

import contextlib
import datetime
import enum
import threading
import warnings
from collections import Counter, deque
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    ModelCheckpoint,
    ModelPruning,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, IterableDataset, Sampler

from course_lib.callbacks import (
    CheckpointError,
    ExactAccumulation,
    ExactResume,
    SkipBadSteps,
    StepAudit,
)
from course_lib.loader import MiniDataLoader
from course_lib.resume import ResumableDataLoader
from course_lib.samplers import ShardedBatchSampler, ShuffledBatchSampler
from course_lib.skipping import TooManySkips
from rehearse import Rehearsal
from tests.callbacks.test_own_code import Plain, Samples, held_out, loader, state_of
from tests.callbacks.whole_run import same
from tests.trainer_oracle import quiet_trainer


def fit(folder, *callbacks, checkpoint=None, data=None, validation=None, module=None, saves=None, **flags):
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **saves or dict(every_n_train_steps=1))
    trainer = quiet_trainer(callbacks=[*callbacks, saver], enable_checkpointing=True, **dict(max_epochs=2) | flags)
    module = module or Plain()
    trainer.fit(module, data or loader(), validation, ckpt_path=checkpoint, weights_only=False)
    return module


AT_EPOCHS_ENDS = dict(every_n_epochs=1)


# ------------------------------------------------------------------------------------------------------ put back


class NoBetter(EarlyStopping):
    def __init__(self):
        super().__init__("val", patience=1, min_delta=10.0)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:an EarlyStopping had ended this run")
@pytest.mark.parametrize("flags", [{"min_epochs": 4}, {"min_steps": 10}], ids=str)
def test_a_stop_that_is_put_off_ends_the_run_where_it_would_have_ended(flags, tmp_path):
    flags |= dict(max_epochs=6, accumulate_grad_batches=2, val_check_interval=3)
    whole = fit(tmp_path / "whole", ExactResume(), NoBetter(), validation=held_out(), **flags)
    assert 6 * 6 > len(whole.trained) >= 20  # it is stopped, and put off
    for path in sorted((tmp_path / "whole").glob("*.ckpt"))[:-1]:
        last = fit(tmp_path / "on", ExactResume(), NoBetter(), validation=held_out(), checkpoint=path, **flags)
        assert whole.trained[len(whole.trained) - len(last.trained) :] == last.trained, path.name
        assert same(state_of(whole), state_of(last)), path.name


def test_a_setting_that_training_does_not_move_is_that_of_the_new_run(tmp_path):
    module = Plain()
    module.setting, module.moved = 1, 0
    counted = LambdaCallback(on_train_batch_end=lambda trainer, module, *_: setattr(module, "moved", module.moved + 1))
    fit(tmp_path, ExactResume(), counted, module=module, max_epochs=1)
    again = Plain()
    again.setting, again.moved = 2, 0
    fit(tmp_path, ExactResume(), counted, module=again, checkpoint=tmp_path / "step=4.ckpt")
    assert (again.setting, again.moved) == (2, 12)


def test_what_a_reader_sets_between_two_fits_with_one_module_stays(tmp_path):
    module = Plain()
    module.setting, module.moved = 1, 0

    def moves(trainer, module, *_):
        module.moved += 1
        if module.moved == 3:
            raise KeyError("the fit is over")

    with pytest.raises(KeyError):
        fit(tmp_path, ExactResume(), LambdaCallback(on_train_batch_end=moves), module=module, saves=AT_EPOCHS_ENDS)
    fit(tmp_path / "other", ExactResume(), max_epochs=1)
    module.setting = 2
    counts = LambdaCallback(on_train_batch_end=lambda trainer, module, *_: setattr(module, "moved", module.moved + 1))
    checkpoint = min((tmp_path / "other").glob("*.ckpt"))  # of a module that moves nothing
    fit(tmp_path, ExactResume(), counts, module=module, checkpoint=checkpoint, max_epochs=1)
    assert (module.setting, module.moved) == (2, len(loader()) - 1)


class Stops(LambdaCallback):
    """Raises in this micro-batch of the run, counted from 1."""

    def __init__(self):
        super().__init__()
        self.at = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.at is not None and trainer.fit_loop.epoch_loop.batch_progress.total.ready >= self.at:
            raise KeyError("the fit is over")


def test_what_a_reader_sets_between_two_fits_with_one_trainer_stays(tmp_path):
    data, module, stops = loader(), Plain(), Stops()
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    trainer = quiet_trainer(callbacks=[ExactResume(), stops, saver], enable_checkpointing=True, max_epochs=1)
    for data.dataset.setting, stops.at in ((1, 2), (2, 3), (2, None)):
        newest = max(tmp_path.glob("*.ckpt"), default=None, key=lambda path: path.stat().st_mtime_ns)
        with contextlib.suppress(KeyError):
            trainer.fit(module, data, ckpt_path=newest, weights_only=False)
    assert (data.dataset.setting, trainer.global_step) == (2, len(loader()))


class Phase(enum.Enum):
    FIRST, SECOND = 1, 2


class Parts(enum.IntFlag):
    BODY = 1
    HEAD = 2


class Annealer:
    """As many write one: a helper that is stepped by hand, with a state in a helper of its own."""

    def __init__(self):
        self.beta, self.state = 0.5, SimpleNamespace(steps=0)

    def step(self):
        self.state.steps += 1
        self.beta = min(1.0, self.beta + 0.05 * self.state.steps)


class KeepsMany(Plain):
    """Its loss goes by attributes of many kinds."""

    def __init__(self):
        super().__init__()
        self.rate, self.single, self.phase, self.name = np.float64(0.5), np.float32(0.5), Phase.FIRST, "first"
        self.bounds, self.counts, self.annealer = (0.0, 1.0), np.zeros(3), Annealer()
        self.parts, self.day, self.lock = Parts.BODY, np.datetime64("2020-01-01"), threading.Lock()

    def loss(self, x, y):
        self.rate, self.single = self.rate * 1.1, self.single * np.float32(1.1)
        self.bounds = (self.bounds[0] + 0.1, *self.bounds[1:])
        self.counts[round(10 * self.bounds[0]) % 3] += 0.1
        if self.rate > 0.8:
            self.phase, self.name, self.parts = Phase.SECOND, "second", Parts.BODY | Parts.HEAD
        self.annealer.step()
        known = self.phase is Phase.SECOND, self.name == "second", Parts.HEAD in self.parts
        factor = float(self.rate) + float(self.single) + sum(self.bounds) + float(self.counts[0]) + sum(known)
        return super().loss(x, y) * factor * self.annealer.beta


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("windows", [1, 2])
def test_plain_attributes_of_many_kinds_go_on(windows, tmp_path):
    flags = dict(accumulate_grad_batches=windows)
    whole = fit(tmp_path / "whole", ExactResume(), module=KeepsMany(), **flags)
    for path in sorted((tmp_path / "whole").glob("*.ckpt")):
        last = fit(tmp_path / "on", ExactResume(), module=KeepsMany(), checkpoint=path, **flags)
        assert same(state_of(whole), state_of(last)), path.name
        assert (type(last.rate), type(last.single), last.phase) == (np.float64, np.float32, Phase.SECOND)
        assert last.counts.tolist() == whole.counts.tolist()


class KeepsState(Plain):
    """In containers: a hidden state, the last batches, weights by name, two running means."""

    def __init__(self):
        super().__init__()
        self.hidden, self.last = None, deque(maxlen=3)
        self.weights, self.means = {"data": 1.0, "prior": [torch.ones(2), 3]}, [0.0, np.zeros(2)]
        self.counts, self.phases = Counter(a=0), {"warm"}

    def loss(self, x, y):
        h, steps = (torch.zeros(1), 0) if self.hidden is None else self.hidden
        self.hidden = (h.detach() * 0.5 + x.mean(), steps + 1)
        self.last.append((x.detach(), y))
        self.weights["data"] *= 0.9
        self.weights["prior"][0].mul_(1.1)
        self.means[0] += 1.0
        self.means[1] = self.means[1] + 0.5
        self.counts["a"] += 1
        self.phases = {"main"}
        moved = self.hidden[0] + self.weights["data"] + self.weights["prior"][0].sum() + self.means[0]
        moved = moved + self.means[1].sum() + self.counts["a"] + ("main" in self.phases)
        return sum(super(KeepsState, self).loss(*batch) for batch in self.last) * moved.item()


class BeginsAlike(Plain):
    """In places that are one thing at first; and an array and a tensor that have another name."""

    def __init__(self):
        super().__init__()
        zero = torch.zeros(1)
        self.last, self.pair = deque([zero] * 4, maxlen=4), (zero, zero)
        self.means, self.lists = dict.fromkeys("ab", torch.zeros(1)), [[0.0, 0.0]] * 3
        self.weights = np.ones(3)
        self.first_two = self.weights[:2]
        self.log_alpha = torch.zeros(1, requires_grad=True)

    def loss(self, x, y):
        loss = super().loss(x, y)
        self.last.append(loss.detach().view(1))
        self.pair = (self.pair[0] * 0.5 + loss.detach(), self.pair[1] + 1)
        self.means["a"] = self.means["a"] * 0.5 + loss.detach()
        self.lists[0] = [self.lists[0][0] + 1, 0.0]
        self.weights *= 0.9
        moved = sum(self.last) + sum(self.pair) + self.means["a"] + self.means["b"]
        moved = moved + sum(map(sum, self.lists)) + self.first_two.sum()
        return (loss * moved.item() * self.log_alpha.exp() - self.log_alpha).sum()

    def configure_optimizers(self):
        return torch.optim.AdamW([*self.net.parameters(), self.log_alpha], 0.05)


class Lookahead(torch.optim.SGD):
    """As many write one: slow weights, and a count of steps, beside its state."""

    def __init__(self, params):
        super().__init__(params, 0.05)
        [group] = self.param_groups
        self.slow, self.steps = [p.detach().clone() for p in group["params"]], 0

    def step(self, closure=None):
        loss = super().step(closure)
        self.steps += 1
        for slow, fast in zip(self.slow, self.param_groups[0]["params"], strict=True):
            with torch.no_grad():
                if self.steps % 3 == 0:
                    slow.lerp_(fast, 0.5)
                    fast.copy_(slow)
        return loss


class WithLookahead(Plain):
    def configure_optimizers(self):
        return Lookahead(self.net.parameters())


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("windows", [1, 4])
@pytest.mark.parametrize("kind", [KeepsState, BeginsAlike, WithLookahead])
def test_state_in_containers_and_optimizers_goes_on(kind, windows, tmp_path):
    def fit_anew(folder, **arguments):
        return fit(folder, ExactResume(), module=kind(), accumulate_grad_batches=windows, **arguments)

    saves = dict(train_time_interval=datetime.timedelta(0)) if windows > 1 else None  # within windows, too
    whole = fit_anew(tmp_path / "whole", saves=saves)
    for path in (tmp_path / "whole").glob("*.ckpt"):
        assert same(state_of(whole), state_of(fit_anew(tmp_path / "on", checkpoint=path))), path.name


def test_a_container_of_another_length_stays_as_the_new_run_has_it(tmp_path):
    def moves(trainer, module, *_):
        module.weights[0] += 1.0

    def fit_with(classes, **arguments):
        module = Plain()
        module.weights = [1.0] * classes
        return fit(tmp_path, ExactResume(), LambdaCallback(on_train_batch_end=moves), module=module, **arguments)

    fit_with(2, max_epochs=1)
    assert fit_with(2, checkpoint=tmp_path / "step=4.ckpt", max_epochs=1).weights == [7.0, 1.0]
    with pytest.warns(UserWarning, match="this run begins with one of another length, which stays as it is"):
        assert len(fit_with(3, checkpoint=tmp_path / "step=4.ckpt", max_epochs=1).weights) == 3


def test_settings_of_an_optimizer_of_ones_own_are_those_of_the_new_run(tmp_path):
    class Own(torch.optim.SGD):
        def __init__(self, params, rates):
            super().__init__(params, 0.05)
            self.rates, self.scale, self.all_params = rates, torch.tensor(rates[0]), self.param_groups[0]["params"]

    class With(Plain):
        def configure_optimizers(self):
            return Own(self.net.parameters(), self.rates)

    for rates, checkpoint in (([0.5], None), ([0.1], tmp_path / "step=4.ckpt")):
        module = With()
        module.rates = rates
        fit(tmp_path, ExactResume(), module=module, checkpoint=checkpoint, max_epochs=1)
        optimizer = module.optimizers().optimizer
        assert (optimizer.rates, optimizer.scale.item()) == (rates, pytest.approx(rates[0]))


def test_what_a_first_fit_has_moved_is_in_the_checkpoints_of_a_second_one(tmp_path):
    def counted(*, until=None):
        def moves(trainer, module, *_):
            module.moved += 1
            if module.moved == until:
                raise KeyError("the fit is over")

        return LambdaCallback(on_train_batch_end=moves)

    module, epoch = Plain(), len(loader())
    module.moved = 0
    fit(tmp_path / "first", ExactResume(), counted(), module=module, max_epochs=1)
    with pytest.raises(KeyError):
        fit(tmp_path / "second", ExactResume(), counted(until=epoch + 3), module=module, max_epochs=1)
    again = Plain()
    again.moved = 0
    checkpoint = tmp_path / "second" / "step=2.ckpt"
    fit(tmp_path / "on", ExactResume(), counted(), module=again, checkpoint=checkpoint, max_epochs=1)
    assert again.moved == 2 * epoch


def test_a_list_that_grows_is_a_note_of_this_process(tmp_path):
    fit(tmp_path, ExactResume(), max_epochs=1)
    last = fit(tmp_path, ExactResume(), checkpoint=tmp_path / "step=4.ckpt", max_epochs=1)
    assert len(last.trained) == len(loader()) - 4


class Gathers(Plain):
    """As many log a mean of an epoch."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def loss(self, x, y):
        self.losses.append(super().loss(x, y))
        return self.losses[-1]

    def on_train_epoch_end(self):
        self.losses.clear()


@pytest.mark.parametrize("kind", [Gathers, Plain])  # which gathers indices
def test_results_that_a_list_had_gathered_are_told_of_within_an_epoch(kind, tmp_path, recwarn):
    fit(tmp_path, ExactResume(), module=kind())
    for steps in (6, 2):
        fit(tmp_path, ExactResume(), module=kind(), checkpoint=tmp_path / f"step={steps}.ckpt")
        told = [message for message in warnings_of(recwarn) if "and losses had 2 entries" in message]
        assert len(told) == (kind is Gathers and steps == 2)


def test_a_cut_that_waits_for_the_epochs_end_is_told_of(tmp_path):
    def cuts():
        return ModelPruning("l1_unstructured", amount=0.2)

    fit(tmp_path, ExactResume(), cuts(), max_epochs=1)
    with pytest.warns(UserWarning, match=r"ahead of ModelPruning.on_train_epoch_end"):
        fit(tmp_path, ExactResume(), cuts(), checkpoint=tmp_path / f"step={len(loader())}.ckpt")


class Swaps(Plain):
    """Puts another part in its network once, by a flag, and calls another function."""

    def __init__(self):
        super().__init__()
        self.swapped, self.factor = False, lambda loss: loss

    def loss(self, x, y):
        if not self.swapped and self.trainer.global_step >= 3:
            self.net[1], self.factor, self.swapped = torch.nn.ReLU(), lambda loss: 2 * loss, True
        return self.factor(super().loss(x, y))


def test_what_is_put_in_place_of_something_by_a_flag_is_put_there_again_and_told_of(tmp_path):
    whole = fit(tmp_path / "whole", ExactResume(), module=Swaps())
    for steps in (2, 3, 5, 6, 9):
        again = Swaps()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            last = fit(
                tmp_path / "on", ExactResume(), module=again, checkpoint=tmp_path / "whole" / f"step={steps}.ckpt"
            )
        assert same(state_of(whole), state_of(last)), steps
        told = [str(one.message) for one in heard if "something else in place of" in str(one.message)]
        assert len(told) == (steps > 3) and all("in place of factor, net.1," in one for one in told)


class Mosaic(Samples):
    is_on = True

    def __init__(self):
        super().__init__()
        self.is_on = True

    def __getitem__(self, index):
        x, y, index = super().__getitem__(index)
        return (2 * x if self.is_on else x), y, index


class ClosesMosaic(Plain):
    """Turns an augmentation off for the last epochs, once: the flag is the module's, and what it did the dataset's."""

    def __init__(self):
        super().__init__()
        self.closed = False

    def on_train_epoch_start(self):
        if not self.closed and self.current_epoch == 1:
            self.trainer.train_dataloader.dataset.is_on, self.closed = False, True


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*on_train_epoch_start")
@pytest.mark.parametrize("is_within_another", [False, True])
def test_what_training_moves_in_the_dataset_goes_on(is_within_another, tmp_path):
    def data(num_workers):
        dataset = Mosaic()
        if is_within_another:
            dataset.dataset = Mosaic()  # as of a wrapper
        sampler = ShuffledBatchSampler(len(dataset), 2, seed=0)
        return ResumableDataLoader(dataset, batch_sampler=sampler, num_workers=num_workers)

    whole = fit(tmp_path / "whole", ExactResume(), module=ClosesMosaic(), data=data(0), max_epochs=3)
    for path in sorted((tmp_path / "whole").glob("*.ckpt")):
        last = fit(
            tmp_path / "on",
            ExactResume(),
            module=ClosesMosaic(),
            data=data(2 * (path.stem in ("step=6", "step=8"))),
            checkpoint=path,
            max_epochs=3,
        )
        assert same(state_of(whole), state_of(last)), path.name


class Doubles(LightningDataModule):
    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def train_dataloader(self):
        return loader()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.scale *= 1.01
        return batch[0] * self.scale, *batch[1:]


@pytest.mark.thorough
def test_what_training_moves_in_the_data_module_goes_on(tmp_path):
    whole = fit(tmp_path / "whole", ExactResume(), data=Doubles())
    for path in sorted((tmp_path / "whole").glob("*.ckpt")):
        last = fit(tmp_path / "on", ExactResume(), data=Doubles(), checkpoint=path)
        assert same(state_of(whole), state_of(last)), path.name


def test_a_large_tensor_that_training_moves_is_told_of(tmp_path):
    def module():
        made = Plain()
        made.bank, made.small = torch.zeros(1_000_001), torch.zeros(3)
        return made

    adds = LambdaCallback(on_train_batch_end=lambda trainer, module, *_: (module.bank.add_(1), module.small.add_(1)))
    fit(tmp_path, ExactResume(), adds, module=module(), max_epochs=1)
    again = module()
    with pytest.warns(UserWarning, match="had moved bank, a tensor of 1,000,001 numbers"):
        fit(tmp_path, ExactResume(), adds, module=again, checkpoint=tmp_path / "step=4.ckpt")
    assert again.small.tolist() == [12.0] * 3


class Spoilt(Plain):
    def loss(self, x, y):
        return super().loss(x, y) * (float("nan") if self.trainer.fit_loop.total_batch_idx in range(2, 6) else 1.0)


def test_the_skips_in_a_row_go_on_in_the_next_life(tmp_path):
    def run(checkpoint=None):
        skips, module = SkipBadSteps(max_consecutive_skips=4, max_steps_means="attempts"), Spoilt()
        with pytest.raises(TooManySkips) as raised:
            fit(tmp_path, skips, module=module, checkpoint=checkpoint)
        return len(module.trained), [skip.attempt for skip in raised.value.skips]

    assert run() == (6, [3, 4, 5, 6])
    assert [run(tmp_path / f"step={n}.ckpt") for n in (2, 3, 5)] == [(6 - n, [3, 4, 5, 6]) for n in (2, 3, 5)]


def test_a_lambda_callback_keeps_its_hooks_in_a_second_fit(tmp_path):
    heard = []
    first = LambdaCallback(on_train_batch_start=lambda *_: heard.append("start"))
    trainer = quiet_trainer(callbacks=[first, ExactResume()], max_epochs=1)
    trainer.fit(Plain(), loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Plain(), loader())
    assert len(heard) == 2 * len(loader())


class IsNoCallback:
    """Answers to every hook, and inherits from nothing: what a library puts behind the callbacks of a Trainer."""

    state_key = _legacy_state_key = "a library's"

    def __getattr__(self, name):
        if name == "state_dict":
            return dict
        if name.startswith("on_") or name in ("setup", "teardown", "load_state_dict"):
            return lambda *_, **__: None
        raise AttributeError(name)


@pytest.mark.filterwarnings("ignore:this checkpoint was saved at a batch's end")
def test_a_callback_of_no_class_of_lightnings_is_no_hindrance(tmp_path):
    flags = dict(accumulate_grad_batches=2, val_check_interval=3)
    saves = dict(monitor="val", every_n_train_steps=None)  # at validations, within windows
    whole = fit(tmp_path, ExactResume(), validation=held_out(), saves=saves, **flags)
    for path in sorted(tmp_path.glob("*.ckpt")):
        trainer, last = quiet_trainer(callbacks=[ExactResume()], max_epochs=2, **flags), Plain()
        trainer.callbacks.append(IsNoCallback())
        trainer.fit(last, loader(), held_out(), ckpt_path=path, weights_only=False)
        assert same(state_of(whole), state_of(last)), path.name


# ------------------------------------------------------------------------------------------------------- told of


class ShufflesItself(IterableDataset):
    def __len__(self):
        return 6

    def __iter__(self):
        return (Samples()[index] for index in torch.randperm(6).tolist())


def warnings_of(record):
    own = ("no checkpoint holds", "in no checkpoint", "at random", "are made again now")
    return [str(one.message) for one in record if any(words in str(one.message) for words in own)]


def shuffled(generator=None):
    return DataLoader(Samples(6), 2, shuffle=True, generator=generator)


@pytest.mark.filterwarnings("ignore:Your `:UserWarning", "ignore:Checkpoint directory:UserWarning")
@pytest.mark.parametrize(
    ("make", "validation", "saves", "told"),
    [
        (lambda: MiniDataLoader(ShufflesItself(), 2), None, {}, "its stream is read again up to where it was"),
        (lambda: MiniDataLoader(ShufflesItself(), 2), None, AT_EPOCHS_ENDS, None),
        (loader, lambda: shuffled(torch.Generator().manual_seed(0)), AT_EPOCHS_ENDS, "that is validated comes from"),
        (loader, lambda: shuffled(), AT_EPOCHS_ENDS, None),
    ],
)
def test_an_order_that_no_checkpoint_holds_is_told_of(make, validation, saves, told, tmp_path, recwarn):
    fit(tmp_path, ExactResume(), data=make(), validation=validation and validation(), saves=saves, max_epochs=1)
    path = min(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    recwarn.clear()
    fit(tmp_path / "on", ExactResume(), data=make(), validation=validation and validation(), checkpoint=path)
    says = warnings_of(recwarn)
    assert any(told in one for one in says) if told else says == []


def test_a_lambda_callback_whose_hook_does_not_come_again_is_told_of(tmp_path):
    own = LambdaCallback(on_train_epoch_start=lambda *_: None)
    fit(tmp_path, ExactResume(), own)
    with pytest.warns(UserWarning, match="does not call LambdaCallback.on_train_epoch_start again"):
        fit(tmp_path / "on", ExactResume(), own, checkpoint=tmp_path / "step=2.ckpt")


@pytest.mark.parametrize(("step", "is_told"), [(3, False), (6, False), (8, True)])
def test_loaders_that_are_made_again_within_an_epoch_are_told_of(step, is_told, tmp_path, recwarn):
    class Loads(Plain):
        def train_dataloader(self):
            return loader()

    def run(**arguments):
        quiet = dict(max_epochs=2, reload_dataloaders_every_n_epochs=1)
        saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
        trainer = quiet_trainer(callbacks=[ExactResume(), saver], enable_checkpointing=True, **quiet)
        trainer.fit(Loads(), weights_only=False, **arguments)

    run()
    recwarn.clear()
    run(ckpt_path=tmp_path / f"step={step}.ckpt")
    assert any("and are made again now" in one for one in warnings_of(recwarn)) == is_told


# ------------------------------------------------------------------------------------------------------- refused


class DrawsByItsOwn(Sampler):
    def __init__(self, kind):
        self.draws = np.random.default_rng(0) if kind == "numpy" else torch.Generator().manual_seed(0)

    def __len__(self):
        return 6

    def __iter__(self):
        if isinstance(self.draws, torch.Generator):
            return iter(torch.randperm(6, generator=self.draws).tolist())
        return iter(self.draws.permutation(6).tolist())


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("make", [DataLoader, MiniDataLoader])
def test_an_order_by_a_generator_of_the_samplers_own_is_refused(make, kind, tmp_path):
    fit(tmp_path, ExactResume(), data=make(Samples(), 2, sampler=DrawsByItsOwn(kind)), saves=AT_EPOCHS_ENDS)
    path = tmp_path / "step=3.ckpt"
    with pytest.raises(CheckpointError, match="comes from a generator of its own"):
        fit(tmp_path, ExactResume(), data=make(Samples(), 2, sampler=DrawsByItsOwn(kind)), checkpoint=path)


def test_a_generator_whose_state_the_loader_saves_is_not_refused(tmp_path):
    def drawn():
        inner = torch.utils.data.BatchSampler(DrawsByItsOwn("numpy"), 2, False)
        return MiniDataLoader(Samples(), batch_sampler=ShardedBatchSampler(inner))

    whole = fit(tmp_path, ExactResume(), data=drawn())
    last = fit(tmp_path / "on", ExactResume(), data=drawn(), checkpoint=tmp_path / "step=4.ckpt")
    assert whole.trained[4:] == last.trained


@pytest.mark.parametrize(("before", "now", "step"), [(1, 2, 1), (2, 4, 1), (1, 4, 3)])
def test_other_windows_within_an_epoch_are_refused(before, now, step, tmp_path):
    fit(tmp_path, ExactResume(), accumulate_grad_batches=before)
    with pytest.raises(CheckpointError, match=rf"in windows of {before}: with accumulate_grad_batches={now} "):
        fit(tmp_path, ExactResume(), accumulate_grad_batches=now, checkpoint=tmp_path / f"step={step}.ckpt")


@pytest.mark.thorough
def test_other_windows_at_their_bounds_and_scheduled_ones_are_not_refused(tmp_path):
    fit(tmp_path / "1", ExactResume(), accumulate_grad_batches=1)
    fit(tmp_path / "on", ExactResume(), accumulate_grad_batches=2, checkpoint=tmp_path / "1" / "step=2.ckpt")

    def scheduled():
        return GradientAccumulationScheduler({0: 1, 1: 2})

    whole = fit(tmp_path / "2", ExactResume(), scheduled())
    for path in sorted((tmp_path / "2").glob("*.ckpt")):
        last = fit(tmp_path / "on", ExactResume(), scheduled(), checkpoint=path)
        assert same(state_of(whole), state_of(last)), path.name


class LooksTwice(torch.optim.SGD):
    def step(self, closure):
        closure()
        self.zero_grad()
        return super().step(closure)


class TrainedTwice(Plain):
    def configure_optimizers(self):
        return LooksTwice(self.parameters(), 0.1)


def test_an_optimizer_that_evaluates_twice_is_refused_in_windows_of_several(tmp_path):
    fit(tmp_path, ExactResume(), module=TrainedTwice(), max_epochs=1)
    module = TrainedTwice()
    before = state_of(module)
    with pytest.raises(MisconfigurationException, match="LooksTwice evaluates the loss a second time in one step"):
        fit(tmp_path, ExactResume(), module=module, accumulate_grad_batches=2)
    assert same(before, state_of(module))


class OfTheOther(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


CALLBACKS = [ExactResume, ExactAccumulation, SkipBadSteps, StepAudit, Rehearsal]


@pytest.mark.parametrize("callback", CALLBACKS)
def test_the_trainer_of_the_other_package_is_refused(callback, tmp_path):
    assert not issubclass(pytorch_lightning.Trainer, Trainer)
    flags = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    trainer = pytorch_lightning.Trainer(callbacks=[callback()], accelerator="cpu", max_epochs=1, **flags)
    with pytest.raises(MisconfigurationException, match=r"import lightning\.pytorch as pl in place of"):
        trainer.fit(OfTheOther(), loader())
