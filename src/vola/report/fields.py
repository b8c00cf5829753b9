"""JSON records read strictly: every complaint says which file, which key and what to do."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vola.errors import DataError, InputError
from vola.theory.statistics import Rate


class Fields:
    """A JSON object with a name, read key by key; every complaint says which file and key."""

    def __init__(self, where: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise DataError(f"{where}: expected a JSON object, got {type(value).__name__}")
        self.where, self.value = where, value

    def take(self, key: str, kinds: type | tuple[type, ...], default: Any = None, *, needed: bool = True) -> Any:
        found = self.value.get(key)
        if found is None:
            if needed:
                raise DataError(f"{self.where}: expected the key {key!r}, got only {sorted(self.value)}")
            return default
        wrong = not isinstance(found, kinds) or (isinstance(found, bool) and kinds is not bool)
        if wrong or (isinstance(found, float) and not math.isfinite(found)):
            names = " or ".join(k.__name__ for k in (kinds if isinstance(kinds, tuple) else (kinds,)))
            raise DataError(f"{self.where}: expected a finite {names} under {key!r}, got {found!r:.80}")
        return found

    def text(self, key: str, default: str | None = None) -> str:
        return str(self.take(key, str, default, needed=default is None))

    def number(self, key: str) -> float:
        return float(self.take(key, (int, float)))

    def maybe_number(self, key: str) -> float | None:
        found = self.take(key, (int, float), needed=False)
        return None if found is None else float(found)

    def texts(self, key: str) -> tuple[str, ...]:
        items = self.take(key, list, [], needed=False)
        if not all(isinstance(i, str) for i in items):
            raise DataError(f"{self.where}: expected a list of texts under {key!r}, got {items!r:.80}")
        return tuple(items)

    def mapping(self, key: str) -> Mapping[str, Any]:
        return dict(self.take(key, dict, {}, needed=False))

    def rate(self) -> Rate:
        successes, episodes = self.take("successes", int), self.take("episodes", int)
        try:
            return Rate(successes, episodes)
        except InputError as error:
            raise DataError(f"{self.where}: {error}") from error


def read_json(file: Path) -> Any:
    """The content of a JSON file. Raises DataError when it is missing or cut off."""
    if not file.is_file():
        raise DataError(f"{file}: no such file. Expected a run folder; `vola train` and `vola demo` write one.")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file}: not readable as JSON ({error}). Was the run stopped while writing it?") from error


def read_lines(file: Path) -> list[Fields]:
    """The objects of a JSON-lines file. Raises DataError where a line is cut off, with its number."""
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{file}, line {number}: not a JSON object ({error}). If it was being written when the program was "
                "stopped, delete that line."
            ) from error
        rows.append(Fields(f"{file}, line {number}", value))
    return rows
