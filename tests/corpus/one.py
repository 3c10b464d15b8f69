"""One public script, run as it stands until it calls ``fit``: each run is judged in place of being trained."""

import json
import os
import runpy
import sys
import time
from pathlib import Path

import torch

from course_lib.preflight import preflight
from tests.corpus import stand_ins

MOST = 1
"""Runs of a script that are judged."""


class Judged(BaseException):
    """Enough runs of the script have been judged."""


def main(script, *arguments):
    stand_ins.install()
    reports = []
    import lightning.pytorch
    import pytorch_lightning

    for package in (lightning.pytorch, pytorch_lightning):
        judge_fits(package.Trainer, reports)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    error = ""
    try:
        runpy.run_path(script, run_name="__main__")
    except (Judged, SystemExit):
        pass
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    print(json.dumps({"reports": reports, "error": "" if reports else error}), file=sys.__stdout__)


def judge_fits(trainer_class, reports):
    made, trained, own = trainer_class.__init__, trainer_class.fit, os.getpid()

    def on_the_cpu(self, *arguments, **options):
        made(self, *arguments, **options | {"accelerator": "cpu", "devices": 1})

    def fit(self, model, train_dataloaders=None, val_dataloaders=None, datamodule=None, **options):
        if os.getpid() != own:  # in a trial
            return trained(self, model, train_dataloaders, val_dataloaders, datamodule, **options)
        data = datamodule if datamodule is not None else train_dataloaders
        if hasattr(data, "prepare_data"):
            data.prepare_data()
        elif data is None:
            model.prepare_data()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        files = sorted(str(path) for path in Path().rglob("*"))
        began = time.monotonic()
        report = preflight(self, model, data)
        judged = report.to_dict() | {"wall": time.monotonic() - began, "model": type(model).__name__}
        same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        judged["untouched"] = same and files == sorted(str(path) for path in Path().rglob("*"))
        reports.append(judged)
        if len(reports) == MOST:
            raise Judged
        return None

    trainer_class.__init__, trainer_class.fit = on_the_cpu, fit


if __name__ == "__main__":
    os.environ["MPLBACKEND"] = "agg"
    main(*sys.argv[1:])
