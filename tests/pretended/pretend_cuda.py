"""Rehearse a GPU's rules on a machine without one.

    with pretend_cuda():
        net = nn.Linear(8, 3).to("cuda")
        net(torch.ones(4, 8))       # RuntimeError: Expected all tensors to be on the same device, ...

Data stay on the CPU and carry a label: their class. Labelled data say that they are on cuda:0, and refuse to meet a CPU
tensor, to become a numpy array, or to be drawn from a CPU generator. What is random on "the GPU" has a stream of its
own, so that an output that depends on the numbers of a CPU stream shows it.

What this can't show: other rounding, the allocator, streams and forks, threads (the mode belongs to one), and what a
backward pass does (its hooks get plain tensors).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # looks every function of torch up, so before any of them is replaced
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
CpuGenerator = torch.Generator


class OnCuda(Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)


class ParameterOnCuda(nn.Parameter):
    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)


class Generator(CpuGenerator):
    """Says where it was asked to be."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, "cpu")

    def __init__(self, device: Any = "cpu") -> None:
        self.place = torch.device(device).type

    device = property(lambda self: CUDA if self.place == "cuda" else CPU)

    def manual_seed(self, seed: int) -> Generator:
        super().manual_seed(seed)
        return self


def is_labelled(value: Any) -> bool:
    return type(value) is OnCuda or type(value) is ParameterOnCuda


def names(*words: str) -> set[str]:
    """Functions, methods, in-place methods and operators of these names."""
    return {form for word in " ".join(words).split() for form in (word, f"{word}_", f"__{word}__")}


# Both sides may differ in these; what they return is decided by their arguments.
CROSSING = {"to", "type_as", "copy_", "backward", "_has_compatible_shallow_copy_type", "_use_count", "is_set_to"}
# A CPU tensor without dimensions is taken as a number by these, where the result is on the GPU.
ELEMENTWISE = names(
    "add sub mul div true_divide floor_divide remainder pow eq ne lt le gt ge and or xor radd rsub rmul rtruediv",
    "truediv where clamp maximum minimum logical_and logical_or bitwise_and bitwise_or fmod atan2 rpow rand ror rxor",
)
IN_PLACE = {f"__{word}__" for word in "iadd isub imul itruediv ifloordiv iand ior ixor ipow imod".split()}
RANDOM = names("rand randn randint randperm normal bernoulli multinomial uniform exponential random cauchy log_normal")
RANDOM |= {"rand_like", "randn_like", "randint_like", "dropout", "feature_dropout", "alpha_dropout"}
RANDOM |= {"rrelu", "dropout1d", "dropout2d", "dropout3d"}
RANDOM |= {"trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_"}


class PretendCuda(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.stream = CpuGenerator().manual_seed(20_000).get_state()
        self.labelled: dict[int, weakref.ref[Tensor]] = {}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if special := _special(name):
            return special(self, func, args, kwargs)
        tensors, others = [], []
        for leaf in _leaves((args, kwargs)):
            (tensors if isinstance(leaf, Tensor) else others).append(leaf)
        here = [tensor for tensor in tensors if is_labelled(tensor)]
        if name not in CROSSING:
            _refuse_to_mix(name, tensors, here)
        asked = _asked_device(others, kwargs)
        on_cuda = bool(here) if asked is None else asked == "cuda"
        _refuse_generator(others, on_cuda)
        if asked is not None:
            args, kwargs = _on_cpu(args), _on_cpu(kwargs)
        if name in ("to", "type_as"):
            if len(tensors) > 1:
                on_cuda = is_labelled(tensors[1])
            return self._moved(args[0], func(*args, **kwargs), on_cuda)
        if not (on_cuda and name in RANDOM):
            return self._result(func(*args, **kwargs), tensors, on_cuda)
        with self._own_stream():
            return self._result(func(*args, **kwargs), tensors, on_cuda)

    # ------------------------------------------------------------------------------------------- single functions

    def _numpy(self, func: Any, args: Any, kwargs: Any) -> Any:
        if is_labelled(args[0]) and not kwargs.get("force"):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first.")
        return func(*args, **kwargs)

    _array = _numpy

    def _parse_to(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)  # what Module.to was asked for

    _device = _parse_to

    def _format(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(args[0].detach().as_subclass(Tensor), *args[1:])

    def _cuda(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        return self._moved(args[0], args[0], True)

    def _cpu(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        return self._moved(args[0], args[0], False)

    def _pin_memory(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        if is_labelled(args[0]):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        pinned = args[0].clone()
        pinned.is_pretended_pinned = True
        return pinned

    def _is_pinned(self, func: Any, args: Any, kwargs: Any) -> bool:
        return hasattr(args[0], "is_pretended_pinned")

    def _deepcopy(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, memo = args
        if not is_labelled(tensor):
            return func(*args, **kwargs)
        if id(tensor) not in memo:
            plain = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            if tensor.grad is not None:
                plain.grad = copy.deepcopy(tensor.grad, memo)
            if _is_parameter(tensor):
                plain = nn.Parameter(plain, tensor.requires_grad)
            memo[id(tensor)] = self._label(plain)
        return memo[id(tensor)]

    def _set(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``tensor.data = other`` moves a tensor, and so does ``module.to``."""
        target, value = args
        done = func(target, value)
        if func.__self__.__name__ == "data" and is_labelled(target) != is_labelled(value):
            (self._label if is_labelled(value) else _unlabel)(target)
        return done

    def _get(self, func: Any, args: Any, kwargs: Any) -> Any:
        found = func(*args)
        return self._label(found) if isinstance(found, Tensor) and is_labelled(args[0]) else found

    def _getitem(self, func: Any, args: Any, kwargs: Any) -> Any:
        indexed, index = args
        if not is_labelled(indexed) and any(map(is_labelled, _leaves([index]))):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        return self._result(func(*args), _leaves(args), is_labelled(indexed))

    def _setitem(self, func: Any, args: Any, kwargs: Any) -> Any:
        target, index, value = args
        indices = [leaf for leaf in _leaves([index]) if isinstance(leaf, Tensor)]
        if indices and isinstance(value, Tensor) and value.dim() and is_labelled(value) != is_labelled(target):
            raise RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu! (index_put_)")
        return func(*args)

    # -------------------------------------------------------------------------------------------------- labels

    def _moved(self, before: Tensor, after: Tensor, on_cuda: bool) -> Tensor:
        """What ``to`` returns: the same tensor where it is there already, else a copy."""
        if is_labelled(before) == on_cuda:
            return after if after is before else self._result(after, [before], on_cuda)
        after = after.clone() if after is before else after
        return self._label(after) if on_cuda else _unlabel(after)

    def _result(self, out: Any, tensors: list[Any], on_cuda: bool) -> Any:
        def relabel(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or any(leaf is tensor for tensor in tensors):
                return leaf
            return self._label(leaf) if on_cuda else _unlabel(leaf)

        if isinstance(out, Tensor):
            return relabel(out)
        return tree_map(relabel, out) if isinstance(out, tuple | list | dict) else out

    def _label(self, tensor: Tensor) -> Tensor:
        if not is_labelled(tensor):
            if not isinstance(tensor, nn.Parameter) and type(tensor) is not Tensor:
                return tensor  # a class with a device of its own: a fake tensor
            tensor.__class__ = ParameterOnCuda if _is_parameter(tensor) else OnCuda
            self.labelled[id(tensor)] = weakref.ref(tensor)
        return tensor

    def allocated(self) -> int:
        """The bytes of all labelled storages."""
        alive = [tensor for ref in self.labelled.values() if (tensor := ref()) is not None]
        self.labelled = {id(tensor): weakref.ref(tensor) for tensor in alive}
        return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in alive)}.values())

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        before = torch.get_rng_state()
        torch.set_rng_state(self.stream)
        try:
            yield
        finally:
            self.stream = torch.get_rng_state()
            torch.set_rng_state(before)

    def seed(self, seed: int) -> None:
        self.stream = CpuGenerator().manual_seed(20_000 + seed % 2**31).get_state()


@functools.cache
def _special(name: str) -> Callable[..., Any] | None:
    """The method above that stands for a function of torch, if there is one."""
    return getattr(PretendCuda, f"_{name.strip('_')}", None)


def _leaves(arguments: Iterable[Any]) -> list[Any]:
    """What they and their tuples, lists and dicts hold: torch's `tree_leaves`, which takes five times as long."""
    found = []
    for value in arguments:
        if isinstance(value, tuple | list):
            found += _leaves(value)
        elif isinstance(value, dict):
            found += _leaves(value.values())
        else:
            found.append(value)
    return found


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _unlabel(tensor: Tensor) -> Tensor:
    if is_labelled(tensor):
        tensor.__class__ = nn.Parameter if isinstance(tensor, ParameterOnCuda) else Tensor
    return tensor


def _refuse_to_mix(name: str, tensors: list[Tensor], here: list[Tensor]) -> None:
    if len(here) in (0, len(tensors)):
        return
    elsewhere = [tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter)]
    if not elsewhere:
        return
    written = name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    numbers = name in ELEMENTWISE | IN_PLACE and not any(tensor.dim() for tensor in elsewhere)
    if numbers and (not written or is_labelled(tensors[0])):
        return
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({name})"
    )


def _refuse_generator(leaves: list[Any], on_cuda: bool) -> None:
    wanted = "cuda" if on_cuda else "cpu"
    for leaf in leaves:
        if isinstance(leaf, CpuGenerator) and leaf.device.type != wanted:
            raise RuntimeError(f"Expected a '{wanted}' device type for generator but found '{leaf.device.type}'")


def _asked_device(leaves: list[Any], kwargs: dict[str, Any]) -> str | None:
    for leaf in [kwargs["device"], *leaves] if "device" in kwargs else leaves:
        if type(leaf) is torch.device or (isinstance(leaf, str) and leaf.partition(":")[0] in ("cuda", "cpu")):
            return torch.device(leaf).type
    return None


def _on_cpu(arguments: Any) -> Any:
    def one(leaf: Any) -> Any:
        is_device = type(leaf) is torch.device or (isinstance(leaf, str) and leaf.partition(":")[0] == "cuda")
        return CPU if is_device else leaf

    return tree_map(one, arguments)


def _grouped(by_device: Callable[..., Any]) -> Callable[..., Any]:
    """What optimizers group their tensors by: C++ does not know of labels."""

    def group(lists: list[list[Tensor | None]], *rest: Any) -> Any:
        groups = by_device(lists, *rest)
        return {
            (CUDA if any(map(is_labelled, found[0])) else device, dtype): (found, indices)
            for (device, dtype), (found, indices) in groups.items()
        }

    return group


class Event:
    """As ``torch.cuda.Event``; nothing is asynchronous here."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1.0


@contextlib.contextmanager
def pretend_cuda(device_count: int = 1) -> Iterator[PretendCuda]:
    """Within, torch says that it has ``device_count`` GPUs; tensors that are sent to one follow its rules."""
    mode = PretendCuda()
    nothing, gib = (lambda *_, **__: None), 2**30
    pretended = {
        "torch.Generator": Generator,
        "torch.accelerator.is_available": lambda: True,
        "torch.accelerator.current_accelerator": lambda check_available=False: torch.device("cuda"),
        "torch.accelerator.current_device_index": lambda: 0,
        "torch.accelerator.set_device_index": nothing,
        "torch.accelerator.current_stream": lambda *_: mock.Mock(is_capturing=lambda: False),
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.is_initialized": lambda: True,
        "torch.cuda.is_current_stream_capturing": lambda: False,
        "torch.cuda.device_count": lambda: device_count,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.set_device": nothing,
        "torch.cuda.synchronize": nothing,
        "torch.cuda.empty_cache": nothing,
        "torch.cuda.get_device_name": lambda *_: "a pretended GPU",
        "torch.cuda.get_device_capability": lambda *_: (9, 0),
        "torch.cuda.mem_get_info": lambda *_: (60 * gib, 80 * gib),
        "torch.cuda.memory_allocated": lambda *_: mode.allocated(),
        "torch.cuda.max_memory_allocated": lambda *_: mode.allocated(),
        "torch.cuda.memory_reserved": lambda *_: mode.allocated(),
        "torch.cuda.max_memory_reserved": lambda *_: mode.allocated(),
        "torch.cuda.reset_peak_memory_stats": nothing,
        "torch.cuda.manual_seed_all": mode.seed,
        "torch.cuda.get_rng_state_all": lambda: [mode.stream.clone()],
        "torch.cuda.set_rng_state_all": lambda states: setattr(mode, "stream", states[0].clone()),
        "torch.cuda.get_rng_state": lambda *_: mode.stream.clone(),
        "torch.cuda.set_rng_state": lambda state, *_: setattr(mode, "stream", state.clone()),
        "torch.cuda.Event": Event,
        "torch._C._cuda_clearCublasWorkspaces": nothing,
        "torch._C._group_tensors_by_device_and_dtype": _grouped(torch._C._group_tensors_by_device_and_dtype),
    }
    with contextlib.ExitStack() as stack:
        for name, value in pretended.items():
            stack.enter_context(mock.patch(name, value, create=name.startswith("torch._C")))
        stack.enter_context(mode)
        yield mode
