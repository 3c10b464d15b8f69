"""Who holds an object, as its reader would name it: `losses` (attribute of Trainer).

`gc.get_referrers` answers with dicts, cells and tuples, which have no names. The way up from holder to holder ends at a
name: a global of a module, a variable in a function's closure, or an attribute of an instance or a class.

    holder_of(trainer.losses)          # "list `losses` (attribute of Trainer)"
"""

from __future__ import annotations

import gc
import re
import reprlib
import sys
import types
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from torch import Tensor

_DEEPEST = 24
_WIDEST = 16
_UNNAMED = (list, tuple, dict, set, frozenset, deque, types.CellType, types.MethodType, types.TracebackType)
# What IPython keeps of outputs and inputs: Out, _, __, _12, _i12 ...
_NOTEBOOK = re.compile(r"_+|_i*\d*|Out|In|_oh|_ih|_dh")


def holder_of(target: Any) -> str | None:
    """The shortest way by which Python holds `target`; None where there is no name on any.

    No names are: locals of functions that are running, but those that an inner function holds; what a notebook's
    outputs are called; and slots.
    """
    modules = {id(vars(m)): m.__name__ for m in list(sys.modules.values()) if isinstance(m, types.ModuleType)}
    ring: dict[int, tuple[Any, ...]] = {id(target): (target,)}  # by the outermost object: the way to it
    seen = {id(target)}
    for _ in range(_DEEPEST):
        names: list[str] = []
        wider: dict[int, tuple[Any, ...]] = {}
        mine = {id(ring), *map(id, ring.values())}
        for holder in _referrers(chain[-1] for chain in ring.values()):
            if id(holder) not in seen | mine and not is_ours(holder) and not _is_shell(holder):
                seen.add(id(holder))
                chain = next(ring[id(o)] for o in gc.get_referents(holder) if id(o) in ring)
                if id(holder) in modules:
                    names += _name_in_module(holder, chain, modules[id(holder)])
                elif named := _name_at(holder, chain):
                    names += named
                elif len(wider) < _WIDEST:
                    wider[id(holder)] = (*chain, holder)
        if names:
            return f"{kind_of(target)} {min(names)}"
        ring = wider
    return None


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
    names = getattr(holder, "f_globals" if isinstance(holder, types.FrameType) else "__globals__", None)
    return isinstance(names, dict) and str(names.get("__name__")).startswith(f"{__package__}.")


def _is_shell(holder: Any) -> bool:
    """IPython's own objects hold whatever the notebook's names hold."""
    return str(type(holder).__module__).partition(".")[0] in ("IPython", "ipykernel")


# What follows gives the name that a holder has for the last of `chain`, with the way from there down to the first.


def _name_in_module(names: dict[str, Any], chain: tuple[Any, ...], module: str) -> list[str]:
    given = [name for name, value in names.items() if value is chain[-1] and not _NOTEBOOK.fullmatch(name)]
    return [f"`{given[0]}{_way(chain)}` (global of {module})"] if given else []


def _name_at(holder: Any, chain: tuple[Any, ...]) -> list[str]:
    if isinstance(holder, types.FunctionType):
        return _name_in_closure(holder, chain)
    if issubclass(type(holder), _UNNAMED) or isinstance(holder, types.FrameType):
        return []
    return _name_of_attribute(holder, chain)


def _name_in_closure(function: types.FunctionType, chain: tuple[Any, ...]) -> list[str]:
    if chain[-1] is not function.__closure__ or len(chain) < 3:
        return []
    variable = function.__code__.co_freevars[_index(chain[-1], chain[-2])]
    return [f"`{variable}{_way(chain[:-2])}` (closure of `{function.__name__}`)"]


def _name_of_attribute(holder: Any, chain: tuple[Any, ...]) -> list[str]:
    try:  # without running properties
        attributes = vars(holder) if isinstance(holder, type) else object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return []
    owner = f"class {holder.__name__}" if isinstance(holder, type) else type(holder).__name__
    for way in (chain, chain[:-1]):  # the holder itself refers to an attribute, or its dict does
        given = [name for name, value in attributes.items() if way and value is way[-1]]
        if given:
            return [f"`{given[0]}{_way(way)}` (attribute of {owner})"]
    return []


def _way(chain: tuple[Any, ...]) -> str:
    """The subscripts that lead from the last of `chain` to the first."""
    steps = []
    for inner, outer in pairwise(chain):
        if issubclass(type(outer), dict):
            key = next((key for key, value in dict.items(outer) if value is inner), "…")
            steps.append(f"[{reprlib.repr(key)}]")
        elif isinstance(outer, (list, tuple, deque)):
            steps.append(f"[{_index(outer, inner)}]")
    return "".join(reversed(steps))


def _index(holder: Any, child: Any) -> int:
    return next(i for i, value in enumerate(holder) if value is child)
