"""What was used: everything a reader needs to doubt or repeat a result."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from vola.report import words
from vola.report.evaluations import digest
from vola.report.records import HeadRecord
from vola.report.sections import MOST_ROWS, Records, rolled_out
from vola.rollout.rollout import EpisodeResult


def used(records: Records) -> dict[str, Any]:
    """What was used: everything a reader needs to doubt or repeat the result."""
    s, d = records.summary, records.summary.dataset
    run = [("system", s.system), ("fingerprint", s.fingerprint), ("environment", s.env or "none")]
    run += [("executor", words.executor(s.executor))] if s.executor else []
    data = []
    if d is not None:
        sizes = f"{words.text(d.episodes, True)} episodes, {words.text(d.frames, True)} frames"
        split = f"{words.text(d.train_episodes, True)} for training, {words.text(d.val_episodes, True)} held out"
        data = [("path", d.path), ("fingerprint", d.fingerprint), ("size", sizes), ("split by episode", split)]
    told = sorted({row.instruction for row in records.rollouts} | set(s.instructions))
    data += [("cameras", words.joined(s.cameras))] if s.cameras else []
    groups = [
        ("Run", run),
        ("Data", data),
        ("Seeds", words.flat(s.seeds)),
        ("Start states", starts(records.rollouts, rolled_out(records))),
        ("Normalisation", words.flat(s.normaliser)),
        ("Parameters", words.flat(s.parameters, True)),
        ("Action head", head(s.head) if s.head else []),
        ("Versions", words.flat(s.versions)),
    ]
    return {
        "notes": d.notes if d else (),
        "command": shlex.join(s.command),
        "groups": [(title, [r for r in rows if r[1]]) for title, rows in groups if rows],
        "instructions": told[:MOST_ROWS],
        "more_instructions": max(0, len(told) - MOST_ROWS),
        "sources": s.sources,
    }


def starts(rollouts: Sequence[EpisodeResult], policies: Sequence[str]) -> list[tuple[str, str]]:
    """Which start states each policy was given: a digest over the sorted hashes, so equal digests = equal sets."""
    rows, digests = [], set()
    for name in policies:
        hashes = [row.start_hash for row in rollouts if row.policy == name]
        own = digest(hashes)
        distinct = len(set(hashes))
        repeated = f", {len(hashes) - distinct} of them repeats" if distinct < len(hashes) else ""
        rows.append((name, f"{own} ({len(hashes)} starts{repeated})"))
        digests.add(own)
    if len(rows) > 1:
        same = "the same start states for all" if len(digests) == 1 else "NOT the same start states for all"
        rows.append(("comparison", same))
    return rows


def head(record: HeadRecord) -> list[tuple[str, str]]:
    """Rule, network, passes per chunk and, per quantised dimension, the smallest error that can be reached."""
    passes = f"{words.number(record.serial, 9)}, one after the other" if record.serial > 1 else "1"
    passes += f"; {record.parallel} side by side" if record.parallel > 1 else ""
    rows = [("rule", record.rule), ("network", record.network), ("passes per chunk, at most", passes)]
    if not record.floor:
        return [*rows, ("least error", "no limit: the head is continuous")]
    return rows + [
        (f"least error \u203a {name}", f"rms {words.number(rms)}, largest {words.number(worst)}{words.NBSP}{unit}")
        for name, unit, rms, worst in record.floor
    ]
