"""Mutants of solutions that are right answers too: by chapter and check, the change, and why no check can refuse it.

A change reads as `python -m tests.workbook.mutants 05` prints it.
"""

EQUIVALENT: dict[str, dict[tuple[str, str], str]] = {
    "00": {},
    "01": {},
    # ------------------------------------------------------------------------------------------------------------------
    "02": {},
    # ------------------------------------------------------------------------------------------------------------------
    "03": {
        (
            "validate",
            "with torch.no_grad(): / for number, batch in enumerate(batches): / "
            "losses.append(model(batch).square().mean().item()) / if losses[-1] >= max(losses): / worst = number  ->  "
            "for number, batch in enumerate(batches): / losses.append(model(batch).square().mean().item()) / "
            "if losses[-1] >= max(losses): / worst = number",
        ): "no name holds the loss, so its graph is freed at the end of the line, with gradients or without",
        ("find", "half = usual // 2  ->  half = -(-usual // 2)"): (
            "the half rounded up lies on the backward pass's line as well, so it is another right answer"
        ),
    },
    # ------------------------------------------------------------------------------------------------------------------
    "04": {},
    # ------------------------------------------------------------------------------------------------------------------
    "05": {},
    # ------------------------------------------------------------------------------------------------------------------
    "06": {
        (
            "repair-a-sampler",
            "def __init__(self, num_samples, batch_size, num_replicas, rank, seed=0, sampler=None):"
            "  ->  def __init__(self, num_samples, batch_size, num_replicas, rank, seed=1, sampler=None):",
        ): "any default seed is right: the exercise asks for none, and the check hands its own in",
    },
    # ------------------------------------------------------------------------------------------------------------------
    "07": {
        ("batches-trained", "my_batches = 5 + 6 + 0  ->  my_batches = 5 + 6 - 0"): (
            "the same number: 0 is neither added nor taken away"
        ),
    },
    # ------------------------------------------------------------------------------------------------------------------
    "08": {
        (
            "windows",
            "return [effective_batch_size // (size * world_size) for size in batch_sizes]  ->  "
            "return [-(-effective_batch_size // (size * world_size)) for size in batch_sizes]",
        ): "the task says that all divisions come out even, and then up and down are the same",
    },
    # ------------------------------------------------------------------------------------------------------------------
    "09": {},
    # ------------------------------------------------------------------------------------------------------------------
    "10": {},
}
