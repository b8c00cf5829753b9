"""Where a formula comes from: a ``Source`` beside the code, and the bibliography of whatever was put together.

A part that implements a published formula carries ``sources: tuple[Source, ...]`` (a class variable is enough);
``bibliography(of=policy)`` collects them from all parts the policy is made of, so that a report prints what was
really used and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

from vola.errors import InputError


@dataclass(frozen=True)
class Source:
    """One formula's origin.

    paper: author, title, year. equation: where in the paper ("eq. 5", "section 3.1"). convention: how the code
    here differs in sign, direction or order from the paper ("tau = 0 is noise"). url: where to read it.
    """

    paper: str
    equation: str = ""
    convention: str = ""
    url: str = ""

    def __post_init__(self) -> None:
        if not self.paper.strip():
            raise InputError("Source: expected the paper's author, title and year, got an empty text")
        if self.url and not self.url.startswith("https://"):
            raise InputError(f"Source.url: expected an address that starts with https://, got {self.url!r}")

    def record(self) -> dict[str, str]:
        """The four texts as JSON, the form in which ``summary.json`` keeps a source."""
        return asdict(self)

    def __str__(self) -> str:
        return ". ".join(part.rstrip(".") for part in (self.paper, self.equation, self.convention, self.url) if part)


def bibliography(of: Any) -> tuple[Source, ...]:
    """All sources of ``of`` and of the parts it is made of, each once, in the order they are met.

    Looks at ``sources`` of every part and descends into dataclass fields, lists, tuples, mappings and the
    ``children()`` of a torch module. A ``Source`` itself counts, so a plain list of sources works too.
    """
    found: dict[Source, None] = {}
    seen: set[int] = set()
    waiting: list[Any] = [of]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Source):
            found.setdefault(part)
            continue
        if id(part) in seen or isinstance(part, str | bytes | type):
            continue
        seen.add(id(part))
        waiting.extend(reversed(list(_inside(part))))
    return tuple(found)


def _inside(part: Any) -> Iterable[Any]:
    """The sources a part names, then the parts it is made of."""
    sources = getattr(part, "sources", ())
    if isinstance(sources, tuple):
        yield from (s for s in sources if isinstance(s, Source))
    if is_dataclass(part):
        yield from (getattr(part, f.name) for f in fields(part) if hasattr(part, f.name))
    if isinstance(part, Mapping):
        yield from part.values()
    elif isinstance(part, list | tuple):
        yield from part
    elif callable(getattr(part, "children", None)):
        yield from part.children()
