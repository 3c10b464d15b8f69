"""``python -m tests.corpus.fits REPORT script.py [its arguments]``: its first ``Trainer.fit`` is judged, not trained.

The script runs as it stands until it calls ``fit``. The report says as well whether weights and files are as before.
"""

import functools
import json
import os
import runpy
import sys
from pathlib import Path

import lightning.pytorch
import pytorch_lightning
import torch

from rehearse import rehearse


class Judged(BaseException):
    """The fit has been judged; what comes behind it in the script does not run."""


def main(report_file, script, *arguments):
    for package in (lightning.pytorch, pytorch_lightning):
        judge_fits(package, Path(report_file))
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except Judged:
        return
    raise SystemExit("the script ended without a fit")


def judge_fits(package, report_file):
    trainer_class = package.Trainer
    made, trained, own = trainer_class.__init__, trainer_class.fit, os.getpid()

    @functools.wraps(made)  # LightningCLI reads its arguments
    def on_the_cpu(self, *arguments, **options):
        made(self, *arguments, **options | {"accelerator": "cpu", "devices": 1})

    def fit(self, model, train_dataloaders=None, val_dataloaders=None, datamodule=None, **options):
        if os.getpid() != own:  # in a trial
            return trained(self, model, train_dataloaders, val_dataloaders, datamodule, **options)
        data = datamodule if datamodule is not None else train_dataloaders
        if val_dataloaders is not None:
            data = package.LightningDataModule()
            vars(data).update(train_dataloader=lambda: train_dataloaders, val_dataloader=lambda: val_dataloaders)
        if hasattr(data, "prepare_data"):
            data.prepare_data()
        elif data is None:
            model.prepare_data()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        files = sorted(str(path) for path in Path().rglob("*"))
        report = rehearse(self, model, data).to_dict()
        same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        report["untouched"] = same and files == sorted(str(path) for path in Path().rglob("*"))
        report_file.write_text(json.dumps(report, default=str), encoding="utf-8")
        raise Judged

    trainer_class.__init__, trainer_class.fit = on_the_cpu, fit


if __name__ == "__main__":
    main(*sys.argv[1:])
