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
        ("repair-a-sampler", "self.seed, self.epoch = (seed, 0)  ->  self.seed, self.epoch = (seed, 1)"): (
            "which epoch it begins with is not asked: whoever reads it calls set_epoch first"
        ),
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
    "10": {
        (
            "stops-early",
            "trainer = quiet_trainer(max_epochs=10, accelerator='cpu')  ->  trainer = quiet_trainer(max_epochs=10)",
        ): "a Trainer takes the CPU where there is no GPU, and the run is right on a GPU too",
        (
            "two-ranks",
            "two_ranks = {'devices': 2, 'strategy': 'ddp', 'accelerator': 'cpu'}  ->  "
            "two_ranks = {'devices': 2, 'accelerator': 'cpu'}",
        ): "a Trainer with two devices takes ddp where no strategy is given",
        (
            "two-ranks",
            "two_ranks = {'devices': 2, 'strategy': 'ddp', 'accelerator': 'cpu'}  ->  "
            "two_ranks = {'devices': 2, 'strategy': 'ddp'}",
        ): "a Trainer takes the CPU where there is no GPU, and the run is right on two GPUs too",
        (
            "two-ranks",
            "trainer = quiet_trainer(max_epochs=2, use_distributed_sampler=False, **two_ranks)  ->  "
            "trainer = quiet_trainer(max_epochs=2, **two_ranks)",
        ): "ShardedBatchSampler deals alike under the Trainer's default flag, as the solution says",
        (
            "two-ranks",
            "trainer = quiet_trainer(max_epochs=2, use_distributed_sampler=False, **two_ranks)  ->  "
            "trainer = quiet_trainer(max_epochs=2, use_distributed_sampler=True, **two_ranks)",
        ): "ShardedBatchSampler deals alike with the flag on, as the solution says",
        (
            "masked-labels",
            "trainer = quiet_trainer(max_epochs=1, accelerator='cpu', **flags)  ->  "
            "trainer = quiet_trainer(max_epochs=1, **flags)",
        ): "a Trainer takes the CPU where there is no GPU, and the run is right on a GPU too",
        (
            "masked-labels",
            "loss_sum = cross_entropy(scores, tags, ignore_index=-100, reduction='sum')  ->  "
            "loss_sum = cross_entropy(scores, tags, reduction='sum')",
        ): "-100 is what cross_entropy leaves out by default",
        (
            "masked-labels",
            "flags = {'accumulate_grad_batches': 4, 'callbacks': [ExactAccumulation()]}  ->  "
            "flags = {'accumulate_grad_batches': 5, 'callbacks': [ExactAccumulation()]}",
        ): "the epoch has four micro-batches, so that a window of five ends with it, weighed by its labels",
    },
}
