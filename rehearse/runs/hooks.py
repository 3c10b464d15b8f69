"""A callback of a Trainer that is made of the hooks that a trial needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Probe:
    """A callback made of the hooks that are given."""

    state_key = _legacy_state_key = "rehearse"

    def __init__(self, hooks: dict[str, Callable[..., None]]) -> None:
        self._hooks = hooks

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "state_dict":
            return dict
        if name.startswith("on_") or name in ("setup", "teardown", "load_state_dict"):
            return self._hooks.get(name, nothing)
        raise AttributeError(name)


def nothing(*_: Any, **__: Any) -> None:
    return None
