"""Closed-loop evaluations of a run's checkpoints after its training: ``evaluations.jsonl``, one JSON object a line.

    time          ISO 8601 with the offset from UTC            command      list of texts
    system        name                                         checkpoint   {"step", "fingerprint"}
    env           task                                         scenes       {"noise", "kick_probability", "kick_size"}
    settings      overrides of the trained system              executor     {"part": class name, its settings}
    latency       {"ticks", "probabilities"} of a plan, null where the task waits
    seeds         {"first", "last"} of the start states        starts       digest of the start states
    episodes, successes, interval (95 % Wilson), failures {kind: count}, the counts of ``counts.py``
    mean_length   control steps                                plan_ms      mean milliseconds of one plan, or null
    unknown_words words of the instructions that training never saw

``vola eval`` appends; nothing is ever removed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vola.report import words
from vola.report.counts import Counts, read_counts
from vola.report.fields import Fields, read_lines
from vola.theory.statistics import Rate, wilson

FILE = "evaluations.jsonl"
MOST = 24


@dataclass(frozen=True)
class Recorded:
    """One line of ``evaluations.jsonl``; ``latency`` None: the task waits for every plan."""

    time: str
    system: str
    step: int
    fingerprint: str
    env: str
    scenes: Mapping[str, Any]
    settings: Mapping[str, Any]
    executor: Mapping[str, Any]
    latency: Mapping[str, Any] | None
    starts: str
    rate: Rate
    failures: Mapping[str, Any]
    counts: Counts | None


def append(run: Path, record: Mapping[str, Any]) -> Path:
    """Add one evaluation to a run's record and return the file. Evaluations may run side by side.

    Raises:
        OSError: the folder cannot be written.
    """
    file = run / FILE
    line = (json.dumps(record, allow_nan=False) + "\n").encode()
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        # In one piece, so that lines of two processes never mix.
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, "the disk is full; delete the last line", str(file))
    finally:
        os.close(descriptor)
    return file


def read_evaluations(run: Path) -> tuple[Recorded, ...]:
    """All evaluations of a run, oldest first; nothing where there is no file.

    Raises:
        DataError: a line is cut off or lacks a key; names file, line and key.
    """
    file = run / FILE
    return tuple(_recorded(row) for row in read_lines(file)) if file.is_file() else ()


def _recorded(row: Fields) -> Recorded:
    checkpoint = Fields(f"{row.where}, checkpoint", row.take("checkpoint", dict))
    return Recorded(
        time=row.text("time"),
        system=row.text("system"),
        step=int(checkpoint.take("step", int)),
        fingerprint=checkpoint.text("fingerprint"),
        env=row.text("env"),
        scenes=row.mapping("scenes"),
        settings=row.mapping("settings"),
        executor=row.mapping("executor"),
        latency=row.take("latency", dict, needed=False),
        starts=row.text("starts"),
        rate=row.rate(),
        failures=row.mapping("failures"),
        counts=read_counts(row),
    )


def digest(start_hashes: Sequence[str]) -> str:
    """Sixteen hex digits over the sorted hashes of start states: equal digests = equal sets."""
    return hashlib.sha256("\n".join(sorted(start_hashes)).encode()).hexdigest()[:16]


def evaluations(found: Sequence[Recorded], fingerprint: str, env: str | None) -> dict[str, Any] | None:
    """The newest evaluations as rows of a table. ``fingerprint``, ``env``: of the run's own result."""
    if not found:
        return None
    shown = found[-MOST:]
    rows = []
    for one in shown:
        beside = [f"step {words.number(one.step, 9)}"]
        beside += [f"on {one.env}"] if one.env != env else []
        beside += [f"{key} = {words.text(value)}" for key, value in one.settings.items()]
        beside += [f"other weights ({one.fingerprint})"] if one.fingerprint != fingerprint else []
        rows.append(
            {
                "executor": words.executor(one.executor),
                "beside": ", ".join(beside),
                "time": one.time[:16].replace("T", " "),
                "notes": words.decode_notes(one.counts) if one.counts else [],
                "disturbance": disturbance(one),
                "percent": words.percent(one.rate),
                "range": words.percent_range(wilson(one.rate.successes, one.rate.n, words.LEVEL)),
                "n": one.rate.n,
            }
        )
    same = len({(one.env, one.starts) for one in shown}) == 1
    return {"rows": rows, "earlier": len(found) - len(shown), "same_starts": same}


def disturbance(one: Recorded) -> str:
    """Noise, shoves and latency of an evaluation in words; "none" where the task is as it is."""
    parts = []
    if one.scenes.get("noise"):
        parts.append(f"noise {words.text(one.scenes['noise'])}")
    if one.scenes.get("kick_probability"):
        size = f" of {words.text(one.scenes['kick_size'])}{words.NBSP}m" if "kick_size" in one.scenes else ""
        parts.append(f"a shove{size} in {words.text(100 * one.scenes['kick_probability'])}{words.NBSP}% of the steps")
    if one.latency is not None:
        ticks = one.latency.get("ticks")
        parts.append(f"plans {words.text(ticks)} {'tick' if ticks == 1 else 'ticks'} late")
    return ", ".join(parts) or "none"
