"""Config: every compile-time choice of a kernel that never changes its bits. `str(config)` is its id."""

from __future__ import annotations

import typing
from dataclasses import dataclass, fields
from typing import Self

from .errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Config:
    """Base of the frozen class that each kernel with choices derives; this one has none to make.

    Fields are int, str or bool. `str()` gives `field=value` pairs joined by commas (`default` without fields), and
    `parse` reads that back; fields left out take their defaults.
    """

    def __str__(self) -> str:
        pairs = [f"{f.name}={_write(getattr(self, f.name))}" for f in fields(self)]
        return ",".join(pairs) or "default"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The config that `text` names. Raises ArgumentError for a field or value that this kernel does not have."""
        types = typing.get_type_hints(cls)
        names = [f.name for f in fields(cls)]
        values = {}
        for pair in [] if text in ("", "default") else text.split(","):
            name, equals, value = pair.partition("=")
            if name not in names or not equals:
                raise ArgumentError("config", f"{pair!r} is no choice of this kernel", f"write {cls.form()}")
            values[name] = _read(name, value, types[name])
        try:
            return cls(**values)
        except TypeError:
            raise ArgumentError("config", f"{text!r} leaves a field out", f"write {cls.form()}") from None

    @classmethod
    def form(cls) -> str:
        """How a config of this class is written, for error messages."""
        return ",".join(f"{f.name}=..." for f in fields(cls)) or "default"


def _write(value: object) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _read(name: str, value: str, kind: type) -> int | str | bool:
    try:
        return {"no": False, "yes": True}[value] if kind is bool else kind(value)
    except (KeyError, ValueError):
        wanted = "yes or no" if kind is bool else f"an {kind.__name__}"
        raise ArgumentError("config", f"{name}={value!r}", f"give {wanted}") from None
