"""Stand-ins for what public scripts import and this project does not have.

Python runs this at its start where this folder is in PYTHONPATH; ``torchvision`` beside it is then imported from here.
What draws, logs, or shows progress becomes a module whose every name does nothing.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import urllib.error
import urllib.request
from types import ModuleType

SILENT = {"pandas", "seaborn", "tensorboard", "wandb", "kornia", "torch_geometric", "visdom", "progress"}
"""What a script is judged without."""


class Nothing:
    """Takes any call, and has any name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_, **__):
        return self

    def __iter__(self):
        return iter(())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


class Silent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds these modules where nobody else does."""

    def find_spec(self, name, path=None, target=None):
        known = name.partition(".")[0] in SILENT or name == "torch.utils.tensorboard"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec):
        module = ModuleType(spec.name)
        vars(module)["__getattr__"] = Nothing().__getattr__
        return module

    def exec_module(self, module):
        """It has all its names."""


def no_network(url, *_, **__):
    raise urllib.error.HTTPError(str(url), 404, "there is no network here", None, None)


sys.meta_path.insert(0, Silent())
urllib.request.urlopen = urllib.request.urlretrieve = no_network
os.environ["MPLBACKEND"] = "agg"
