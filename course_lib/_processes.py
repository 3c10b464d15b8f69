"""Processes: the servers that work for this one, those that end with it, and what a job started this one with."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SERVERS: set[int] = set()
"""The processes that ranks start from. They grow while they load modules."""


def fork_server() -> Any:
    """Python's own, if ``multiprocessing.forkserver`` was loaded here; else None."""
    return getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)


def end_with(parent: int, folder: Path | None = None) -> None:
    """Let this process, the first of its group, and its workers end when its parent is gone.

    What is in ``folder``, which the parent would have removed, goes with them.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


_OF_A_JOB = re.compile(
    r"""
    (GROUP_|LOCAL_|NODE_|ROLE_)?RANK | (LOCAL_|GROUP_|ROLE_)?WORLD_SIZE | ROLE_NAME | MASTER_(ADDR|PORT)  # torch
    | (TORCHELASTIC|PET)_\w+                                                                         # torchrun
    | PL_GLOBAL_SEED | PL_SEED_WORKERS | PL_TRAINER_\w+ | LT_\w+                                     # Lightning, Fabric
    | (SLURM|SLURMD|SRUN|SBATCH)_\w+
    | (OMPI|PMI|PMIX|PRTE|MPI|MV2|HYDRA|I_MPI)_\w+                                                   # MPI's launchers
    | (LSB|LSF|JSM)_\w+ | KUBERNETES_PORT                                                            # LSF, Kubeflow
    | ACCELERATE_\w+ | DEEPSPEED_\w+
    """,
    re.VERBOSE,
)


def variables_of_a_job(environment: Mapping[str, str]) -> list[str]:
    """The names in `environment` that say which process of which job this is, or seed it.

    Jupyter on a cluster runs inside a job, so a kernel has ``RANK``, ``SLURM_NTASKS`` or a seed that were meant for the
    job's own processes. A Trainer or a process group that is started from there takes them for its own.
    """
    return [name for name in environment if _OF_A_JOB.fullmatch(name)]
