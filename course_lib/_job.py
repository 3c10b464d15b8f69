"""What a job of a cluster, or another launcher, has put into the environment of this process.

Jupyter on a cluster runs inside a job, so a kernel has ``RANK``, ``SLURM_NTASKS`` or a seed that were meant for the
job's own processes. A Trainer or a process group that is started from there takes them for its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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
    """The names in `environment` that say which process of which job this is, or seed it."""
    return [name for name in environment if _OF_A_JOB.fullmatch(name)]
