"""What went wrong between a plan and the robot: plans that did not decode, ticks without a fresh action.

    malformed_plans     plans whose tokens did not decode (token heads only)
    malformed_episodes  episodes with at least one of them
    starved_ticks       ticks on which the last action was repeated
    decoded             {"successes", "episodes"} among the episodes without a malformed plan; null where there is none
    on_malformed        what the tokenizer does with such a sequence (``FastConfig.on_malformed``), "" without tokens

The flags of single episodes are columns of ``rollouts.parquet``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vola.report.fields import Fields
from vola.rollout.rollout import EpisodeResult
from vola.theory.statistics import Rate


@dataclass(frozen=True)
class Counts:
    """The counts of one policy's episodes; see the top of this file."""

    malformed_plans: int = 0
    malformed_episodes: int = 0
    starved_ticks: int = 0
    decoded: Rate | None = None
    on_malformed: str = ""

    def record(self) -> dict[str, Any]:
        """As JSON."""
        rate = self.decoded
        return {
            "malformed_plans": self.malformed_plans,
            "malformed_episodes": self.malformed_episodes,
            "starved_ticks": self.starved_ticks,
            "decoded": None if rate is None else {"successes": rate.successes, "episodes": rate.n},
            "on_malformed": self.on_malformed,
        }


def count(episodes: Sequence[EpisodeResult], on_malformed: str = "") -> Counts:
    """The counts of one policy's episodes."""
    clean = [e.success for e in episodes if not e.malformed]
    return Counts(
        sum(e.malformed for e in episodes),
        sum(e.malformed > 0 for e in episodes),
        sum(e.starved for e in episodes),
        Rate(sum(clean), len(clean)) if clean else None,
        on_malformed,
    )


def read_counts(item: Fields) -> Counts | None:
    """Counts out of a JSON object; None in records that were written before there were such counts."""
    if "malformed_plans" not in item.value:
        return None
    keys = ("malformed_plans", "malformed_episodes", "starved_ticks")
    plans, episodes, ticks = (int(item.take(key, int)) for key in keys)
    decoded = item.take("decoded", dict, needed=False)
    rate = Fields(f"{item.where}, decoded", decoded).rate() if decoded is not None else None
    return Counts(plans, episodes, ticks, rate, item.text("on_malformed", ""))
