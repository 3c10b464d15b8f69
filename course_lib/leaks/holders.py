"""Who holds an object, as its reader would name it: `losses` (attribute of Trainer).

`gc.get_referrers` answers with dicts, cells and tuples, which have no names. The way up from holder to holder ends at a
name: in a module, a function, an instance, a generator, or the notebook's outputs.

    holder_of(trainer.losses)          # "list `losses` (attribute of Trainer)"
"""

from __future__ import annotations

import gc
import inspect
import itertools
import re
import reprlib
import sys
import types
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

_DEEPEST = 24
_WIDEST = 16
_UNNAMED = (list, tuple, dict, set, frozenset, deque, types.CellType, types.MethodType, types.TracebackType)
# What IPython keeps of outputs and inputs: Out, _, __, _12, _i12 ...
_NOTEBOOK = re.compile(r"_+|_i*\d*|Out|In|_oh|_ih|_dh")


class _Name(NamedTuple):
    rank: int
    """0: a name that the reader gave; 1: one that the notebook gave."""
    text: str
    """The name, and where it is."""


def holder_of(target: Any) -> str | None:
    """The shortest way by which Python holds `target`; None where no Python object does.

    Locals of functions that are running have no name here, unless an inner function or a generator holds them.
    """
    modules = {id(vars(m)): m.__name__ for m in list(sys.modules.values()) if isinstance(m, types.ModuleType)}
    ring: dict[int, tuple[Any, ...]] = {id(target): (target,)}  # by the outermost object: the way to it
    seen = {id(target)}
    found: list[_Name] = []
    for _ in range(_DEEPEST):
        wider: dict[int, tuple[Any, ...]] = {}
        mine = {id(ring), *map(id, ring.values())}
        for holder in _referrers(chain[-1] for chain in ring.values()):
            if id(holder) not in seen | mine and not is_ours(holder) and not _is_shell(holder):
                seen.add(id(holder))
                chain = next(ring[id(o)] for o in gc.get_referents(holder) if id(o) in ring)
                name = _name_at(holder, chain, modules)
                if name is not None:
                    found.append(name)
                elif len(wider) < _WIDEST:
                    wider[id(holder)] = (*chain, holder)
        if not wider or any(name.rank == 0 for name in found):
            break
        ring = wider
    return f"{kind_of(target)} {min(found).text}" if found else None


def _referrers(objects: Iterable[Any]) -> list[Any]:
    # Python 3.13 names the tuple of the call's own arguments among what refers to them.
    arguments = tuple(objects)
    return [holder for holder in gc.get_referrers(*arguments) if holder is not arguments]


def kind_of(target: Any) -> str:
    if issubclass(type(target), Tensor):
        return "tensor"
    return next((k.__name__ for k in (list, dict, set, deque) if issubclass(type(target), k)), type(target).__name__)


def is_ours(holder: Any) -> bool:
    """Functions and frames of this package hold what they look at."""
    frame = holder.gi_frame if isinstance(holder, types.GeneratorType) else holder
    names = getattr(frame, "f_globals" if isinstance(frame, types.FrameType) else "__globals__", None)
    return isinstance(names, dict) and str(names.get("__name__")).startswith(f"{__package__}.")


def _is_shell(holder: Any) -> bool:
    """IPython's own objects hold whatever the notebook's names hold."""
    return str(type(holder).__module__).partition(".")[0] in ("IPython", "ipykernel")


def _name_at(holder: Any, chain: tuple[Any, ...], modules: dict[int, str]) -> _Name | None:
    """The name that `holder` gives to the last of `chain`, with the way from there down to the first."""
    if id(holder) in modules:
        return _name_in_module(holder, chain, modules[id(holder)])
    if isinstance(holder, types.FunctionType):
        return _name_in_function(holder, chain)
    if isinstance(holder, types.GeneratorType):
        return _name_in_generator(holder, chain)
    if issubclass(type(holder), _UNNAMED) or isinstance(holder, types.FrameType):
        return None
    return _name_in_instance(holder, chain)


def _name_in_module(names: dict[str, Any], chain: tuple[Any, ...], module: str) -> _Name | None:
    given = [name for name, value in names.items() if value is chain[-1]]
    if own := [name for name in given if not _NOTEBOOK.fullmatch(name)]:
        return _Name(0, f"`{own[0]}{_way(chain)}` (global of {module})")
    return _Name(1, f"`{max(given, key=len)}{_way(chain)}` (the notebook's outputs)") if given else None


def _name_in_function(function: types.FunctionType, chain: tuple[Any, ...]) -> _Name | None:
    """Of a variable in its closure, or of a default argument: these are tuples of cells, and of values."""
    child, code, name = chain[-1], function.__code__, function.__name__
    defaults: Any = function.__defaults__
    if child is function.__closure__ and len(chain) > 2:
        variable = code.co_freevars[_index(child, chain[-2])]
        return _Name(0, f"`{variable}{_way(chain[:-2])}` (closure of `{name}`)")
    if child is defaults and len(chain) > 1:
        arguments = code.co_varnames[code.co_argcount - len(child) : code.co_argcount]
        return _Name(0, f"`{arguments[_index(child, chain[-2])]}{_way(chain[:-1])}` (default argument of `{name}`)")
    return None


def _name_in_generator(generator: types.GeneratorType[Any, Any, Any], chain: tuple[Any, ...]) -> _Name | None:
    frame = generator.gi_frame
    if frame is None:
        return None
    found = next((name for name, value in frame.f_locals.items() if value is chain[-1]), None)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        frame.f_locals.clear()  # a copy that would keep what the function itself lets go
    return _Name(0, f"`{found}{_way(chain)}` (local of the generator `{frame.f_code.co_name}`)") if found else None


def _name_in_instance(holder: Any, chain: tuple[Any, ...]) -> _Name | None:
    owner = f"class {holder.__name__}" if isinstance(holder, type) else type(holder).__name__
    attributes = _attributes_of(holder)
    in_its_dict = len(chain) > 1 and (
        chain[-1] is attributes or (isinstance(holder, type) and isinstance(chain[-1], dict))
    )
    way = chain[:-1] if in_its_dict else chain
    name = next((name for name, value in attributes.items() if value is way[-1]), None)
    return _Name(0, f"`{name}{_way(way)}` (attribute of {owner})") if name else None


def _attributes_of(holder: Any) -> dict[str, Any]:
    """Attributes, looked up without running properties."""
    try:
        own = object.__getattribute__(holder, "__dict__") if not isinstance(holder, type) else dict(vars(holder))
    except AttributeError:
        own = {}
    if isinstance(holder, Tensor) and holder.is_leaf:
        hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
        return {**own, **{name: getattr(holder, name) for name in hooks}}
    slots = {
        name: value
        for kind in type(holder).__mro__
        for name, member in vars(kind).items()
        if isinstance(member, types.MemberDescriptorType) and (value := _slot(member, holder)) is not None
    }
    return {**own, **slots} if slots else own


def _slot(member: types.MemberDescriptorType, holder: Any) -> Any:
    try:
        return member.__get__(holder)
    except AttributeError:
        return None


def _way(chain: tuple[Any, ...]) -> str:
    """The subscripts that lead from the last of `chain` to the first."""
    steps = []
    for inner, outer in itertools.pairwise(chain):
        if issubclass(type(outer), dict):
            key = next((key for key, value in dict.items(outer) if value is inner), "…")
            steps.append(f"[{reprlib.repr(key)}]")
        elif isinstance(outer, (list, tuple, deque)):
            steps.append(f"[{_index(outer, inner)}]")
    return "".join(reversed(steps))


def _index(holder: Any, child: Any) -> int:
    return next(i for i, value in enumerate(holder) if value is child)
