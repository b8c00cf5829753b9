"""Every error this library raises on purpose, and the shape check used at every door.

A user's mistake raises one of these with what was expected, what was found and what to do about it.
A mistake of ours is an ``assert``.
"""

from __future__ import annotations

from typing import Any


class VolaError(Exception):
    """Root of all errors that vola raises on purpose."""


class InputError(VolaError, ValueError):
    """A value handed to a public function is not usable (wrong shape, NaN, unknown camera, empty text)."""


class ConfigError(VolaError, ValueError):
    """Settings that contradict each other or do not fit the data; raised at construction."""


class DataError(VolaError, ValueError):
    """A dataset on disk is missing, damaged or inconsistent; names the file, episode, frame or key."""


class CheckpointError(VolaError, ValueError):
    """A checkpoint cannot be used as it stands (missing, extra or mis-shaped weight; other dataset)."""


class NonFiniteError(VolaError, ArithmeticError):
    """A loss or gradient became NaN or infinite; names the samples and their value ranges."""


def expect_positive(where: str, **sizes: int) -> None:
    """Raises ConfigError naming the first size that is not a whole number >= 1."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{where}: expected {name} >= 1 (a whole number), got {size!r}")


def expect_shape(name: str, array: Any, pattern: str, **sizes: int) -> dict[str, int]:
    """Check an array's shape against letters of the legend and return what each letter stands for.

    ``pattern`` is letters or integers separated by spaces (``"B T S"``). A letter that occurs twice must
    stand for one size; ``sizes`` fixes letters in advance (``S=7``). Works on anything with ``.shape``.

    Raises:
        InputError: naming the array, the expected and the found shape.
    """
    shape = getattr(array, "shape", None)
    if shape is None:
        raise InputError(f"{name}: expected an array of shape ({pattern}), got {type(array).__name__}")
    letters = pattern.split()
    known = dict(sizes)
    fits = len(letters) == len(shape)
    if fits:
        for letter, size in zip(letters, shape, strict=True):
            wanted = int(letter) if letter.isdigit() else known.setdefault(letter, int(size))
            fits = fits and wanted == int(size)
    if not fits:
        fixed = ", ".join(f"{k}={v}" for k, v in sizes.items())
        where = f" with {fixed}" if fixed else ""
        raise InputError(f"{name}: expected shape ({pattern}){where}, got {tuple(shape)}")
    return known
