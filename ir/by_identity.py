"""A cache keyed by the ids of objects, since hashing xDSL's attributes is slow."""

from __future__ import annotations

from typing import Generic, TypeVar

MOST = 65536
"""Most entries of a cache; a full one is cleared."""

V = TypeVar("V")


class ByIdentity(Generic[V]):
    """A cache whose keys contain ids of objects, which it keeps alive so that no id is reused."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[V, object]] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._known

    def find(self, key: object) -> V | None:
        entry = self._known.get(key)
        return None if entry is None else entry[0]

    def keep(self, key: object, value: V, objects: object) -> V:
        """Store and return `value`. objects: the objects whose ids `key` contains."""
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[key] = value, objects
        return value
