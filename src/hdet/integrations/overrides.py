"""Methods of one object, replaced for a while: for trainers that have no hook where one is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Overrides:
    """What was replaced, and how to put it back. Subclasses and other objects of the class are not touched."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let `owner.name` be `make(what it is now)`."""
        own = vars(owner).get(name)  # somebody else's replacement, or nothing
        setattr(owner, name, make(getattr(owner, name)))

        def undo() -> None:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        self._undo.append(undo)

    def restore(self) -> None:
        """Put everything back, the last one first."""
        while self._undo:
            self._undo.pop()()
