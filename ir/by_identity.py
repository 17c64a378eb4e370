"""Facts about objects, keyed by identity: hashing attributes takes longer than reading them."""

from __future__ import annotations

from typing import Generic, TypeVar

MOST = 65536
"""Entries; with more, all are forgotten."""

V = TypeVar("V")


class ByIdentity(Generic[V]):
    """Values by keys with identities in them; the objects are kept, so that none is used again."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[V, object]] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._known

    def find(self, key: object) -> V | None:
        entry = self._known.get(key)
        return None if entry is None else entry[0]

    def keep(self, key: object, value: V, objects: object) -> V:
        """Know a value from now on. objects: those whose identities the key has."""
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[key] = value, objects
        return value
