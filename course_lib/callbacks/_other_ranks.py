"""What a run had done before it came to the ranks that it has now."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from course_lib._lightning import loaded_checkpoint


def run_so_far(trainer: Trainer) -> dict[str, int]:
    """What a run had done when it came to the ranks that it has now: for ``plan_steps``, in ``configure_optimizers``.

    The schedules in a checkpoint come back with the horizon that they were made with. On another number of ranks it is
    wrong: the rate ends too high, or turns up again. A function of the plan's progress is not saved, and goes on::

        plan = plan_steps(n, 32, world_size=self.trainer.world_size, max_epochs=10, **run_so_far(self.trainer))
        schedule = LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * plan.progress(step))))

    A run that goes on with as many ranks gets the plan that it had.

    Returns:
        ``steps_done``: updates, as the learning rate counts them, and ``samples_done``; both 0 in a run from its start,
        and in one that has had its number of ranks from the start (told by ``ExactResume``, in the checkpoint).

    Raises:
        ValueError: The checkpoint does not say where the training loader was, or not in samples.
    """
    checkpoint = loaded_checkpoint(trainer)
    if not checkpoint:
        return {"steps_done": 0, "samples_done": 0}
    since = since_ranks(checkpoint, trainer.world_size)
    if since is None:
        raise ValueError(
            "the checkpoint does not say how far the run is in the data: it does not hold the state of one "
            "ResumableDataLoader over all samples. Give plan_steps steps_done and samples_done yourself"
        )
    return {"steps_done": since["steps_done"], "samples_done": since["samples_done"]}


def since_ranks(checkpoint: dict[str, Any], world_size: int) -> dict[str, int] | None:
    """The ranks, and what was done before the run came to them; None: the loader's state does not say it."""
    for state in checkpoint.get("callbacks", {}).values():  # those of others are what they like: a list, too
        since = state.get("since_ranks") if isinstance(state, dict) else None
        if since and since["world_size"] == world_size:
            return dict(since)
    states = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
    if len(states) != 1 or not isinstance(states[0], dict):
        return None
    num_samples = states[0].get("num_samples", states[0].get("num_primary"))
    if num_samples is None:
        return None
    samples = states[0]["epoch"] * num_samples + states[0]["position"]
    return {"world_size": world_size, "steps_done": checkpoint["global_step"], "samples_done": samples}
