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
    "06": {},
    # ------------------------------------------------------------------------------------------------------------------
    "07": {},
    # ------------------------------------------------------------------------------------------------------------------
    "08": {},
    # ------------------------------------------------------------------------------------------------------------------
    "09": {},
    # ------------------------------------------------------------------------------------------------------------------
    "10": {},
}
