"""What a prediction notices, and its numbers don't hold: workspaces, custom functions, guesses."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from course_lib._tensors import nodes_behind
from course_lib.memory.kernels import AsOnCuda, FakeLedger

CUBLAS_WORKSPACE = 4096 * 1024 * 2 + 16 * 1024 * 8
CUBLAS_WORKSPACE_HOPPER = 4096 * 8 * 1024
"""For each thread that multiplies: defaults of CUBLAS_WORKSPACE_CONFIG, in aten/src/ATen/cuda/CublasHandlePool.cpp."""
CUBLASLT_WORKSPACE = 1024 * 1024
"""Of products with a bias, ``addmm``."""
_PRODUCTS = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"}


def doubts_about(
    ledger: FakeLedger, model: nn.Module, cuda: AsOnCuda | None, custom: set[str], ddp: bool, masks: bool
) -> Iterator[str]:
    used = ledger.operators
    if not any(module.training for module in model.modules()):
        yield "the model is in eval mode, so this is no training step: BatchNorm and dropout would keep more"
    if cuda is not None:
        if used & _PRODUCTS:
            yield (
                f"cuBLAS's workspaces of forward and backward are not in it: 2 × {CUBLAS_WORKSPACE:,} B, "
                f"on Hopper 2 × {CUBLAS_WORKSPACE_HOPPER:,} B, and {CUBLASLT_WORKSPACE:,} B of cuBLASLt"
            )
        if "aten.convolution" in used:
            yield (
                "cuDNN's workspaces of convolutions are not in it: their size is chosen at run time, in small networks "
                "it can be that of all tensors, and with torch.backends.cudnn.benchmark larger ones are tried"
            )
        if cuda.reserve_bytes:
            yield (
                f"what recurrent layers keep is computed by cuDNN 9's rule, {cuda.reserve_bytes:,} B a forward; "
                "its workspaces are not in it: on an H100 some 9 times a wide layer's output, and 6.5 MB for dropout"
            )
        if any("_scaled_dot_product_" in name for name in used):
            yield (
                "attention is taken to run fused wherever its shapes allow; a backend switched off, an old GPU or the "
                "padding of a mask would need more"
            )
    else:
        if used & {"aten.convolution", "aten.mkldnn_rnn_layer"}:
            yield "what oneDNN takes inside of convolutions and LSTMs is not in it, here as in measure_peak"
        if ledger.workspace_bytes:
            yield f"what oneDNN keeps of LSTMs is computed by oneDNN 3's layout: {ledger.workspace_bytes:,} B a forward"
    if masks and any(type(module).__module__.startswith("transformers.") for module in model.modules()):
        yield (
            "attention is taken to need its mask, as a batch with padding does: transformers reads the mask, and drops "
            "one that masks nothing, so a batch without padding may need less"
        )
    if custom:
        yield f"custom autograd functions ({', '.join(sorted(custom))}): what they keep outside of tensors is not seen"
    foreign = sorted({name.split(".")[0] for name in used} - {"aten", "prims", "profiler"})
    if foreign:
        yield f"operators of {', '.join(foreign)}: their fake kernels tell outputs, not workspaces"
    if ddp:
        yield "DDP's buckets are taken as rebuilt; its first backward and NCCL's own buffers need more"


def custom_functions(loss: Tensor) -> set[str]:
    """The custom autograd functions in the graph of a loss, by name."""
    kinds = {type(node) for node in nodes_behind(loss.grad_fn, {}) if isinstance(node, BackwardCFunction)}
    # This package has one of its own, in `kernels`.
    return {kind.__name__.removesuffix("Backward") for kind in kinds if not kind.__name__.startswith("_Recurr")}
