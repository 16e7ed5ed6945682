"""Recent: a bounded dictionary that keeps what was used lately; quick to look up, and safe in threads."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """At most `size` values, none of them None, in two generations. When the young one is half the size, the old one
    goes and it takes its place; a value that is found in the old one is young again. So a look-up that finds is mostly
    one of a plain dictionary's, without a lock, and what was used within the last size / 2 other values is kept."""

    def __init__(self, size: int) -> None:
        self._half = max(size // 2, 1)
        self._young: dict[Hashable, Value] = {}
        self._old: dict[Hashable, Value] = {}
        self._lock = Lock()

    def get(self, key: Hashable) -> Value | None:
        value = self._young.get(key)
        if value is None and (value := self._old.get(key)) is not None:
            self.put(key, value)
        return value

    def put(self, key: Hashable, value: Value) -> None:
        gone = None  # let go outside the lock: what ends with it may take its time
        with self._lock:
            if len(self._young) >= self._half and key not in self._young:
                gone, self._old, self._young = self._old, self._young, {}
            self._young[key] = value
            self._old.pop(key, None)
        del gone

    def clear(self) -> None:
        with self._lock:
            self._young, self._old = {}, {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)
