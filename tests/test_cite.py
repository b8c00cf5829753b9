"""A bibliography holds what was used, once, in order."""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch

from vola.cite import Source, bibliography
from vola.errors import InputError

FLOW = Source("Lipman et al., Flow Matching, 2022", "eq. 23", "tau = 1 is data", "https://arxiv.org/abs/2210.02747")
ROPE = Source("Su et al., RoFormer, 2021", "eq. 13")
ACT = Source("Zhao et al., ACT, 2023")


@dataclass(frozen=True)
class Head:
    sources: ClassVar[tuple[Source, ...]] = (FLOW,)


@dataclass(frozen=True)
class Trunk:
    sources: ClassVar[tuple[Source, ...]] = (ROPE, FLOW)


class Net(torch.nn.Module):
    sources = (ACT,)


@dataclass(frozen=True)
class Policy:
    head: Head = Head()
    parts: dict = field(default_factory=lambda: {"trunk": (Trunk(), Trunk())})
    net: torch.nn.Module = field(default_factory=lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), Net()))


def test_collects_from_fields_mappings_tuples_and_modules_without_repeats() -> None:
    assert bibliography(of=Policy()) == (FLOW, ROPE, ACT)


def test_only_what_is_there() -> None:
    assert bibliography(of=Trunk()) == (ROPE, FLOW)
    assert bibliography(of=[ROPE, "text", 3, ROPE]) == (ROPE,)
    assert bibliography(of=None) == ()


def test_a_part_that_contains_itself_ends() -> None:
    loop: dict = {"a": ROPE}
    loop["self"] = loop
    assert bibliography(of=loop) == (ROPE,)


def test_record_round_trip_and_text() -> None:
    assert Source(**FLOW.record()) == FLOW
    assert str(FLOW) == "Lipman et al., Flow Matching, 2022. eq. 23. tau = 1 is data. https://arxiv.org/abs/2210.02747"
    assert str(ACT) == "Zhao et al., ACT, 2023"


@pytest.mark.parametrize("bad", [{"paper": " "}, {"paper": "x", "url": "javascript:alert(1)"}])
def test_refusals(bad: dict) -> None:
    with pytest.raises(InputError, match="expected"):
        Source(**bad)
