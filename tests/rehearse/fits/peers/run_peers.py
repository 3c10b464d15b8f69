"""Run the peers of a rehearsal on the planted faults and on their twins, and write down what each said."""

import contextlib
import functools
import importlib.metadata
import itertools
import logging
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
import torchtest2
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch_audit import Auditor
from torchtest2.plugins import LightningPlugin
from trainproof.epoch import check_records

from course_lib.launch import RankError, RankTimeout, run_ranks
from tests.rehearse.fits import parts

TOOLS = ("torchtest2", "torch-audit", "trainproof", "Lightning", "fast_dev_run")
SPEED = re.compile("does not have many workers|log_every_n_steps|to speed up")
ON_SPEED = ("TA200",)  # of torch-audit: widths that are no multiple of 8
HANGS = ("24_dealing_uneven_ranks",)


class GiveUp(Callback):
    """Ends a run that nothing ends."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 200:
            trainer.should_stop = True


class Log(Callback):
    """The records that trainproof reads: one for each step."""

    def __init__(self):
        self.records = []
        self.norm = None

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradients = [p.grad.norm() for p in pl_module.parameters() if p.grad is not None]
        self.norm = torch.stack(gradients).norm().item() if gradients else None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        record = {"step": len(self.records) + 1, "grad_norm": self.norm}
        if isinstance(outputs, dict) and "loss" in outputs:
            record["loss"] = float(outputs["loss"])
        elif isinstance(outputs, torch.Tensor):
            record["loss"] = float(outputs)
        if trainer.optimizers:
            record["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
        self.records.append(record)


class Audit(Callback):
    """torch-audit, from the start of the fit on."""

    def on_fit_start(self, trainer, pl_module):
        optimizer = trainer.optimizers[0] if trainer.optimizers else None
        self.auditor = Auditor(pl_module, optimizer=optimizer, every_n_steps=1)
        self.auditor.autopatch()


def words(message) -> str:
    """A message without its numbers, short enough to be told from others."""
    return re.sub(r"\d+(\.\d+)?", "#", " ".join(str(message).split()))[:90]


def fitted(trainer, model, data, *callbacks) -> set[str]:
    """Fit, and return the warnings and the error."""
    trainer.callbacks += [GiveUp(), *callbacks]
    said = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(model, data)
        except Exception as error:
            said.add(f"{type(error).__name__}: {words(error)}")
    about_versions = (DeprecationWarning, FutureWarning)
    ours = [
        w
        for w in caught
        if ("lightning" in w.filename or "torch" in w.filename) and not issubclass(w.category, about_versions)
    ]
    return said | {words(w.message) for w in ours if not SPEED.search(str(w.message))}


def ask_torchtest2(fault, make):
    run = make()
    with contextlib.redirect_stdout(None):
        if isinstance(run, dict):
            batch = next(iter(run["loader"]))
            plugin = LightningPlugin(lambda inputs, targets: (inputs, *targets))
            plugin.forward = lambda model, inputs, targets: run["loss_fn"](model, (inputs, *targets))
            report = torchtest2.check_model(
                run["model"], batch[0], list(batch[1:]), plugin=plugin, optimizer=run["optimizer"]
            )
        else:
            trainer, model, data = run
            poisoned(fault, data)
            if not model.automatic_optimization:
                return None
            model.trainer = trainer
            batch = first_batch(model, data)
            inputs, targets = (batch, []) if isinstance(batch, torch.Tensor) else (batch[0], list(batch[1:]))
            plugin = LightningPlugin(
                lambda inputs, targets: (inputs, *targets) if isinstance(batch, (list, tuple)) else inputs
            )
            plugin.loss = lambda outputs, targets, loss_fn: mean_of(outputs)
            report = torchtest2.check_model(model, inputs, targets, plugin=plugin)
    return {f"{result.name} {result.status}" for result in [*report.failures, *report.warnings]}


def mean_of(outputs):
    """The loss of a training step, which for ExactAccumulation is a sum and a count."""
    return outputs[0] / outputs[1] if isinstance(outputs, tuple) else outputs


def first_batch(model, data):
    if isinstance(data, LightningDataModule):
        data.setup("fit")
        data = data.train_dataloader()
    elif data is None:
        data = model.train_dataloader()
    return next(iter(data))


def ask_torch_audit(fault, make):
    run = make()
    if isinstance(run, dict):
        auditor = Auditor(run["model"], optimizer=run["optimizer"], every_n_steps=1)
        auditor.autopatch()
        parts.looped(**run)
    else:
        poisoned(fault, run[2])
        audit = Audit()
        fitted(*run, audit)
        auditor = audit.auditor
    findings = [f for f in auditor.finish().findings if f.severity.value != "INFO" and f.rule_id not in ON_SPEED]
    return {f"{f.rule_id} {f.severity.value}" for f in findings}


def ask_trainproof(fault, make):
    run = make()
    if isinstance(run, dict):
        losses, loss_fn = [], run["loss_fn"]

        def logged(model, batch):
            losses.append(loss_fn(model, batch))
            return losses[-1]

        parts.looped(**run | {"loss_fn": logged})
        records = [{"step": i + 1, "loss": loss.item()} for i, loss in enumerate(losses)]
    else:
        poisoned(fault, run[2])
        log = Log()
        fitted(*run, log)
        records = log.records
    if records and not any("loss" in record for record in records):
        return None  # a training step by hand that returns no loss: there is no log to read
    return {f"{f['id']} {f['level']}" for f in check_records(records)["findings"] if f["level"] in ("WARN", "FAIL")}


def ask_lightning(fault, make):
    run = make()
    if isinstance(run, dict):
        return None
    poisoned(fault, run[2])
    return fitted(*run)


def ask_fast_dev_run(fault, make):
    parts.Trainer = functools.partial(Trainer, fast_dev_run=True)
    try:
        return ask_lightning(fault, make)
    finally:
        parts.Trainer = Trainer


def poisoned(fault, data):
    """Put a NaN sample into the data of a fault of ``bad_step``."""
    if fault.CHECK == "bad_step":
        data.dataset.x[slice(None) if hasattr(fault, "RANKS") else 20] = torch.nan


ASK = dict(zip(TOOLS, (ask_torchtest2, ask_torch_audit, ask_trainproof, ask_lightning, ask_fast_dev_run), strict=True))


def asked(rank: int, names: list[str]) -> dict[str, dict[str, list]]:
    """Per fault and tool, what was said of the faulty run and of its twin; None where the tool does not apply."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    said: dict[str, dict[str, list]] = {}
    for name, (tool, ask) in itertools.product(names, ASK.items()):
        fault = parts.script("faults", name)
        for make in (fault.make_run, fault.make_twin):
            torch.manual_seed(0)
            with tempfile.TemporaryDirectory() as folder:
                tempfile.tempdir = folder
                try:
                    answer = ask(fault, make)
                except Exception as error:
                    answer = {f"could not run: {type(error).__name__}: {words(error)}"}
                tempfile.tempdir = None
            said.setdefault(name, {}).setdefault(tool, []).append(answer)
    return said


def everything() -> dict[str, dict[str, list]]:
    said: dict[str, dict[str, list]] = {}
    for ranks in (1, 2):
        names = [n for n in parts.scripts("faults") if getattr(parts.script("faults", n), "RANKS", 1) == ranks]
        chosen = [n for n in names if n not in HANGS]
        results = [result.value for result in run_ranks(asked, ranks, args=(chosen,), timeout=1500)]
        for name in chosen:
            said[name] = {tool: merged([one[name][tool] for one in results]) for tool in TOOLS}
        for name in set(names) - set(chosen):
            try:
                run_ranks(asked, ranks, args=([name],), timeout=60)
            except (RankTimeout, RankError) as error:
                nothing = [{f"hangs: {type(error).__name__}"}, set()]
                said[name] = dict.fromkeys(TOOLS, nothing)
    return said


def merged(answers):
    """What any rank was told, of the run and of the twin."""
    return [None if None in pair else set().union(*pair) for pair in zip(*answers, strict=True)]


def could_not(said: set[str]) -> bool:
    return any(one.startswith(("could not run", "hangs")) for one in said)


def table(said: dict[str, dict[str, list]]) -> str:
    found, alarms, asked_of = Counter(), Counter(), Counter()
    rows = []
    for name in sorted(said):
        cells = []
        for tool in TOOLS:
            run, twin = said[name][tool]
            if run is None or twin is None or could_not(run) or could_not(twin):
                told = run or twin or set()
                cells.append("hangs" if any(one.startswith("hangs") for one in told) else "–")
                continue
            asked_of[tool] += 1
            found[tool] += bool(run - twin)
            alarms[tool] += bool(twin) and "bad_step" not in name  # their data are bad
            cells.append("**" + "; ".join(sorted(run - twin)).replace("|", "/") + "**" if run - twin else "")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    summary = [f"| {tool} | {asked_of[tool]} | {found[tool]} | {alarms[tool]} |" for tool in TOOLS]
    alarmed = {tool: Counter(a for n in said for a in said[n][tool][1] or ()) for tool in TOOLS}
    what = [f"- {tool}: " + "; ".join(f"{a} ({n})" for a, n in alarmed[tool].most_common(8)) for tool in TOOLS]
    return "\n".join(
        [
            "| tool | runs it could be asked about | faults found | twins complained of |",
            "|---|---:|---:|---:|",
            *summary,
            "",
            "What the twins were complained of, with the number of twins:",
            "",
            *what,
            "",
            "What each said of a faulty run and not of its twin (– it does not apply or could not run):",
            "",
            "| fault | " + " | ".join(TOOLS) + " |",
            "|---|" + "---|" * len(TOOLS),
            *rows,
        ]
    )


def main():
    versions = [
        f"{p} {importlib.metadata.version(p)}" for p in "torchtest2 torch-audit trainproof lightning torch".split()
    ]
    text = table(everything())
    head = (
        f"# Results of {time.strftime('%Y-%m-%d')}\n\n{', '.join(versions)}; Python {sys.version.split()[0]}, CPU.\n\n"
    )
    Path(__file__).with_name("RESULTS.md").write_text(head + text + "\n")
    print(text)


if __name__ == "__main__":
    main()
