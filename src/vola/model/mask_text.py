"""A mask in words and signs: works from the matrix alone, so a picture shows what attention does, not what was meant.

Arguments throughout: ``spans`` maps block names to their place among the N tokens, in order; ``mask`` is the bool
matrix N x N, True where the row looks at the column; ``time`` is each token's time inside its block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

SIGNS = {
    "#": "all",
    ".": "nothing",
    "\\": "up to its own place",
    "~": "up to its own time step",
    "<": "before its own time step",
    "I": "itself only",
}


def sign(mask: Bool[Tensor, "N N"], time: Int64[Tensor, " N"], rows: slice, columns: slice) -> str:
    """The sign of ``SIGNS`` that describes one pair of blocks exactly."""
    cell = mask[rows, columns]
    if cell.all():
        return "#"
    if not cell.any():
        return "."
    age = time[rows, None] - time[columns]
    if torch.equal(cell, age == 0):
        return "I"
    if torch.equal(cell, age > 0):
        return "<"
    assert torch.equal(cell, age >= 0), "a window of ages without a sign"
    return "\\" if rows == columns and len(time[rows].unique()) == len(cell) else "~"


def block_picture(spans: Mapping[str, slice], mask: Bool[Tensor, "N N"], time: Int64[Tensor, " N"]) -> str:
    """One sign per pair of blocks, and a legend of the signs used."""
    lengths = {name: f"x{s.stop - s.start}" for name, s in spans.items()}
    wide, long = max(map(len, spans)), max(map(len, lengths.values()))
    corner = "(rows = who looks)"
    margin = max(len(corner), wide + 1 + long) + 2
    lines = [f"{corner:<{margin}}" + "  ".join(spans)]
    used = set()
    for name, row in spans.items():
        signs = [sign(mask, time, row, column) for column in spans.values()]
        used.update(signs)
        cells = "  ".join(s.center(len(column)) for s, column in zip(signs, spans, strict=True))
        lines.append((f"{name:<{wide}} {lengths[name]:<{long}}".ljust(margin) + cells).rstrip())
    lines.append("   ".join(f"{s} {meaning}" for s, meaning in SIGNS.items() if s in used))
    return "\n".join(lines)


def token_picture(spans: Mapping[str, slice], mask: Bool[Tensor, "N N"]) -> str:
    """One sign per pair of tokens; columns are the tokens in the same order as the rows."""
    wide = max(map(len, spans))
    digits = len(str(max(s.stop - s.start for s in spans.values()) - 1))
    lines = ["rows = who looks; columns: " + " | ".join(f"{n} x{s.stop - s.start}" for n, s in spans.items())]
    for name, row in spans.items():
        for offset, line in enumerate(mask[row].tolist()):
            cells = " ".join("".join("#" if x else "." for x in line[s]) for s in spans.values())
            lines.append(f"{name:<{wide}} {offset:>{digits}}  {cells}")
    return "\n".join(lines)


def sentence(
    name: str,
    spans: Mapping[str, slice],
    mask: Bool[Tensor, "N N"],
    time: Int64[Tensor, " N"],
    indirect: Sequence[str],
) -> str:
    """What block ``name`` reads and who reads it; ``indirect`` are blocks that reach it only through others."""
    signs = {other: sign(mask, time, spans[name], s) for other, s in spans.items()}
    own = {"itself": signs.pop(name)}
    reads = [n + ("" if s == "#" else f" ({SIGNS[s]})") for n, s in (signs | own).items() if s != "."]
    readers = [other for other, s in spans.items() if other != name and mask[s, spans[name]].any()]
    text = f"{name} reads {', '.join(reads) or 'nothing'}"
    text += f"; {', '.join(readers) or 'nothing'} {'read' if len(readers) > 1 else 'reads'} {name}"
    if indirect:
        text += f"; {', '.join(indirect)} {'reach' if len(indirect) > 1 else 'reaches'} it only through other blocks"
    return text
