"""What kernels keep on the device that is asked for, where fake CPU tensors would keep something else.

A prediction runs fake *CPU* tensors on every machine, so that it says the same on all of them; torch without CUDA can
make fake CUDA tensors, but runs no backward through them. Most operators keep the same bytes on both devices. For CUDA
those that don't are replaced before autograd sees them: dropout (its mask takes a byte an element there), attention
(fused there, with dropout too), recurrent layers (cuDNN), what autocast runs in float32. For the CPU it is the
workspace of oneDNN's LSTM, which a fake kernel doesn't make.

The CPU's side is tested against real runs on every machine, the CUDA side on one that has a GPU; what an H100 said of
models that nobody here wrote is in ``data/gpu``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from course_lib.memory.ledger import StorageLedger

_KEPT_BY_CUDNN = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}
"""Numbers of each step and hidden unit that cuDNN keeps for backward in a layer: read off cuDNN 9 on an H100."""
# "CUDA Ops that can autocast to float32", in the documentation of torch.amp.
_AUTOCAST_TO_FLOAT32 = frozenset(
    "__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cdist cosh "
    "cosine_embedding_loss cosine_similarity cumprod cumsum dist erfinv "
    "exp expm1 group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10 log1p log2 log_softmax "
    "margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss norm normalize pdist "
    "poisson_nll_loss pow prod reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss softmax "
    "softmin softplus sum tan triplet_margin_loss".split()
)


class AsOnCuda(TorchFunctionMode):
    """Runs on fake CPU tensors what a CUDA device would run, and takes the device's name for the CPU's.

    Attributes:
        reserve_bytes: What the recurrent layers of a forward reserve, by a formula that cuDNN doesn't publish.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reserve_bytes = 0
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":  # a property, as x.shape
            return func(*args)
        args = tuple(self._cpu_instead(arg) for arg in args)
        kwargs = {key: self._cpu_instead(value) for key, value in (kwargs or {}).items()}
        if name in _AUTOCAST_TO_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_in_float32, (args, kwargs))
        if isinstance(func, FunctionType) and func.__globals__["__name__"] in ("torch.nn.functional", "torch.autograd"):
            with self:  # what it calls is to come by here too; backward as well, for what is recomputed in it
                return _without_asking(func)(*args, **kwargs)
        if name == "cuda":
            return args[0]
        if name == "dropout":
            return _dropout(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            return _attention(*args, **kwargs)
        if name == "cross_entropy_loss":
            return _cross_entropy(*args, **kwargs)
        if name in _KEPT_BY_CUDNN and isinstance(args[3], bool):  # a packed sequence has its parameters there
            return self._recurrent(name, *args, **kwargs)
        return func(*args, **kwargs)

    def _cpu_instead(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device) and leaf.type == "cuda":
            return torch.device("cpu")
        if isinstance(leaf, str) and (leaf == "cuda" or leaf.startswith("cuda:")):
            return "cpu"
        if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) and leaf.device.type == "cuda":
            # A loss_fn closes over the weights of its classes, which are on the GPU already.
            if id(leaf) not in self._copies:
                self._copies[id(leaf)] = leaf, without_data(leaf)
            return self._copies[id(leaf)][1]
        return leaf

    def _recurrent(
        self,
        name: str,
        input: Tensor,
        hx: Any,
        weights: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool = False,
    ) -> tuple[Tensor, ...]:
        states = tuple(hx) if name == "lstm" else (hx,)
        if torch.is_autocast_enabled("cpu"):
            low = torch.get_autocast_dtype("cpu")
            input, states, weights = tree_map(lambda t: t.to(low), (input, states, tuple(weights)))
        directions = 1 + bidirectional
        units = input.shape[:-1].numel() * directions * states[-1].shape[-1]
        inner = num_layers - 1  # their outputs are kept, too, and a bit of each where there is dropout
        kept = units * (num_layers * _KEPT_BY_CUDNN[name] + inner) * input.element_size()
        kept = 256 + kept + units * inner // 8 * (dropout > 0) if train else 0
        self.reserve_bytes += kept
        outputs: tuple[Tensor, ...] = _Recurrent.apply(kept, directions, len(states), input, *states, *weights)
        return outputs


def _in_float32(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16) else leaf


@functools.cache
def _without_asking(func: FunctionType) -> Callable[..., Any]:
    """The same function, but it doesn't ask first whether a mode wants to replace it: what it calls does."""
    no: dict[str, Any] = {
        name: lambda *_: False
        for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    }
    copy = FunctionType(func.__code__, func.__globals__ | no, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return input
    result: Tensor = torch.native_dropout(input, p, train)[0]
    return result


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: Any = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Under autocast the logarithms of the softmax keep the input's type, and only the loss of them is in float32."""
    arguments = weight, reduction, ignore_index, label_smoothing
    if not torch.is_autocast_enabled("cpu") or target.is_floating_point() or input.dtype == torch.float32:
        entropy: Tensor = torch._C._nn.cross_entropy_loss(input, target, *arguments)
        return entropy
    with torch.autocast("cpu", enabled=False):
        logarithms = torch.log_softmax(input, 1 if input.dim() > 1 else 0)
    loss: Tensor = torch._C._nn.nll_loss_nd(logarithms.float(), target, weight, reduction, ignore_index)
    return loss


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention in half precision without a mask, else memory-efficient attention, else the plain product."""
    if torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(low), key.to(low), value.to(low)
        attn_mask = attn_mask.to(low) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    head, half = query.shape[-1], query.dtype in (torch.float16, torch.bfloat16)
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    shapes = query.dim() == 4 and key.shape[-1] == head
    if shapes and half and attn_mask is None and head <= 256 and value.shape[-1] == head:
        pad = -head % 8
        query, key, value = (torch.nn.functional.pad(t, (0, pad)) if pad else t for t in (query, key, value))
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out: Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out[..., :head]
    if shapes and head % (8 if half else 4) == 0 and query.dtype != torch.float64:
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        grad = torch.is_grad_enabled()
        out = efficient(query, key, value, attn_mask, grad, dropout_p, is_causal, scale=scale)[0]
        return out
    product = torch.ops.aten._scaled_dot_product_attention_math
    out = product(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
    return out


class _Recurrent(torch.autograd.Function):
    """What cuDNN makes and keeps for recurrent layers; time or batch first is all the same."""

    @staticmethod
    def forward(ctx: Any, kept: int, directions: int, num_states: int, input: Tensor, *rest: Tensor) -> Any:
        states = rest[:num_states]
        output = input.new_empty(*input.shape[:-1], directions * states[0].shape[-1])
        reserve = input.new_empty(kept, dtype=torch.uint8)
        ctx.save_for_backward(input, *rest, output, reserve)
        return (output, *(state.new_empty(state.shape) for state in states))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        input, *rest = ctx.saved_tensors[:-2]
        needed = ctx.needs_input_grad[3:]
        made = [t.new_empty(t.shape) if need else None for t, need in zip((input, *rest), needed, strict=True)]
        return (None, None, None, *made)


class FakeLedger(StorageLedger):
    """A ledger that gives outputs the storages that real kernels give them, where fake ones give smaller ones.

    Attributes:
        workspace_bytes: What oneDNN's LSTMs keep of a forward for its backward.
    """

    workspace_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket in _LOSSES_IN_PLACE and result.dim() == 0:
            result = args[0].new_empty(args[0].shape).as_strided((), ())
            self._meet(result, made_here=True)
        elif func is torch.ops.aten.mkldnn_rnn_layer.default and torch.is_grad_enabled():
            *outputs, workspace = result
            nbytes = lstm_workspace_bytes(args[0].shape, outputs[0].shape)
            workspace = args[0].new_empty(nbytes, dtype=torch.uint8)
            self.workspace_bytes += nbytes
            self._meet(workspace, made_here=True)
            result = (*outputs, workspace)
        return result


_LOSSES_IN_PLACE = {torch.ops.aten.mse_loss, torch.ops.aten.smooth_l1_loss, torch.ops.aten.binary_cross_entropy}
"""They write the loss of each element and reduce it in place: the scalar keeps a storage as large as the input."""


class FakeCopies(TorchFunctionMode):
    """Lets modules of fake tensors be deep-copied, as ``nn.TransformerEncoder`` does with its layer.

    Without it the copies' views don't share the copies' storages, and each ``weight.t()`` counts once more.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            fake = without_data(tensor)
            if tensor.grad is not None:
                fake.grad = without_data(tensor.grad)
            memo[id(tensor)] = fake
        return memo[id(tensor)]


class AttentionMasks(TorchFunctionMode):
    """Notices whether attention is told which places not to look at.

    Attributes:
        seen: Whether there was a mask of booleans. A bias, which is floating, hides nothing.
    """

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "scaled_dot_product_attention":
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            self.seen |= mask is not None and mask.dtype == torch.bool
        return func(*args, **kwargs)


def without_data(tensor: Tensor) -> Tensor:
    """Under a fake mode: a fake tensor of this one's kind."""
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def lstm_workspace_bytes(input: torch.Size, output: torch.Size) -> int:
    """Of one layer and direction, in float32, as oneDNN 3 lays it out: parts that begin on pages of 4096 bytes."""
    steps, batch, width = output

    def aligned(columns: int) -> int:  # to cache lines; never a multiple of 256, where lines would evict each other
        columns = -(-columns // 16) * 16
        return columns + 16 * (columns % 256 == 0)

    def pages(rows: int, columns: int) -> int:
        return -(-rows * batch * columns * 4 // 4096) * 4096

    both = 2 * (steps + 1)  # a layer's input and output, and a state before the first step
    states, their_gradients = 3 * pages(both, aligned(max(width, input[-1]))), 2 * pages(both, width)
    return pages(steps, aligned(4 * width)) + pages(steps, aligned(width)) + states + their_gradients
