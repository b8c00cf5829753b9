"""The records a run leaves behind, read strictly: summary, log, rollouts and samples (held-out error: ``heldout.py``).

Formats, one folder ``runs/<name>/`` (only ``summary.json`` must exist; a missing record leaves out its section):

    summary.json          who, what, with which result; keys in ``Summary``
    log.jsonl             one JSON object a line: kind "train" (step, loss), "val" (step, loss), "eval" (step, policy,
                          successes, episodes); further keys and kinds are left alone
    baseline/log.jsonl    the same of the baseline's training
    rollouts.parquet      one row per episode; columns in ``EpisodeResult``
    samples.safetensors   "rollout/<i>/frames" uint8 L Y X 3; "fan/<i>/<policy>/image" uint8 Y X 3 and
                          "fan/<i>/<policy>/paths" float32 n H+1 2 (x right, y down, in pixels of that image; the
                          first point is where the plan starts); header key "info": JSON {"rollout/<i>": {policy,
                          instruction, success, failure, [rate]}, "fan/<i>/<policy>": {instruction}}
    heldout.json          see ``heldout.py``
    evaluations.jsonl     one JSON object per later evaluation, see ``evaluations.py``

Every reader raises DataError with the file, the key and what to do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open

from vola.cite import Source
from vola.errors import DataError, InputError
from vola.report.counts import Counts, read_counts
from vola.report.fields import Fields, read_json, read_lines
from vola.rollout.rollout import EpisodeResult
from vola.theory.statistics import Rate

ROLES = ("policy", "baseline", "expert")


@dataclass(frozen=True)
class PolicyResult:
    """Closed-loop result of one policy; ``k`` = executed steps per chunk, None where it does not apply. ``counts``:
    what did not decode (``counts.py``), None in older records."""

    name: str
    role: str
    rate: Rate
    k: int | None
    counts: Counts | None = None


@dataclass(frozen=True)
class HeadRecord:
    """The action head: class names of rule and network, passes of the network per chunk (at most) one after the other
    and side by side, and the smallest error it can reach in physical units, per action dimension (name, unit, rms,
    worst); no dimensions for continuous heads."""

    rule: str
    network: str
    serial: int
    parallel: int
    floor: tuple[tuple[str, str, float, float], ...]


@dataclass(frozen=True)
class DatasetRecord:
    """Which demonstrations: path, content fingerprint, sizes, split by episode, and what the reader noticed."""

    path: str
    fingerprint: str
    episodes: int
    frames: int
    notes: tuple[str, ...]
    train_episodes: int
    val_episodes: int


@dataclass(frozen=True)
class Summary:
    """``summary.json``. ``minutes``, ``samples_per_second``, ``flops_share`` (0..1) and ``plan_ms`` ({"median": ms,
    ...}) may be missing or null; ``claim`` is ``headline.claim``, one sentence under the answer."""

    name: str
    system: str
    fingerprint: str
    env: str | None
    policies: tuple[PolicyResult, ...]
    claim: str
    dataset: DatasetRecord | None
    minutes: float | None
    samples_per_second: float | None
    flops_share: float | None
    plan_ms: Mapping[str, float]
    command: tuple[str, ...]
    cameras: tuple[str, ...]
    instructions: tuple[str, ...]
    seeds: Mapping[str, Any]
    normaliser: Mapping[str, Any]
    parameters: Mapping[str, Any]
    head: HeadRecord | None
    executor: Mapping[str, Any]
    versions: Mapping[str, Any]
    layout_picture: str
    layout_explain: str
    sources: tuple[Source, ...]

    def role_of(self, policy: str, default: str) -> str:
        return next((p.role for p in self.policies if p.name == policy), default)


@dataclass(frozen=True)
class Evaluation:
    """A closed-loop evaluation during training."""

    step: int
    policy: str
    rate: Rate


@dataclass(frozen=True)
class Log:
    """Training record: (step, loss) as float64 ``N 2`` for training and held-out loss, and the evaluations."""

    train: np.ndarray
    val: np.ndarray
    evaluations: tuple[Evaluation, ...]


@dataclass(frozen=True)
class Clip:
    """The frames of one rollout, uint8 ``L Y X 3``; ``rate`` in frames per second, None where not recorded."""

    frames: np.ndarray
    policy: str
    instruction: str
    success: bool
    failure: str
    rate: float | None


@dataclass(frozen=True)
class Fan:
    """n chunks sampled from one observation: ``paths`` float32 ``n H+1 2`` in pixels of ``image`` uint8 ``Y X 3``."""

    group: str
    policy: str
    image: np.ndarray
    paths: np.ndarray
    instruction: str


def read_summary(run: Path) -> Summary:
    """``summary.json``; the only record that must exist."""
    file = run / "summary.json"
    top = Fields(str(file), read_json(file))
    policies = tuple(
        _policy(Fields(f"{file}, policies[{i}]", p)) for i, p in enumerate(top.take("policies", list, [], needed=False))
    )
    names = [p.name for p in policies]
    if len(set(names)) != len(names):
        raise DataError(f"{file}: expected different policy names, got {names}. Two settings of one policy need two.")
    layout = Fields(f"{file}, layout", top.mapping("layout"))
    dataset, head = (top.take(key, dict, needed=False) for key in ("dataset", "head"))
    plan_ms = Fields(f"{file}, plan_ms", top.mapping("plan_ms"))
    return Summary(
        name=top.text("name"),
        system=top.text("system"),
        fingerprint=top.text("fingerprint", ""),
        env=top.take("env", str, needed=False),
        policies=policies,
        claim=Fields(f"{file}, headline", top.mapping("headline")).text("claim", ""),
        dataset=_dataset(Fields(f"{file}, dataset", dataset)) if dataset else None,
        minutes=top.maybe_number("minutes"),
        samples_per_second=top.maybe_number("samples_per_second"),
        flops_share=top.maybe_number("flops_share"),
        plan_ms={key: plan_ms.number(key) for key, value in plan_ms.value.items() if value is not None},
        command=top.texts("command"),
        cameras=top.texts("cameras"),
        instructions=top.texts("instructions"),
        seeds=top.mapping("seeds"),
        normaliser=top.mapping("normaliser"),
        parameters=top.mapping("parameters"),
        head=_head(Fields(f"{file}, head", head)) if head else None,
        executor=top.mapping("executor"),
        versions=top.mapping("versions"),
        layout_picture=layout.text("picture", ""),
        layout_explain=layout.text("explain", ""),
        sources=tuple(
            _source(Fields(f"{file}, sources[{i}]", s))
            for i, s in enumerate(top.take("sources", list, [], needed=False))
        ),
    )


def _policy(item: Fields) -> PolicyResult:
    role = item.text("role")
    if role not in ROLES:
        raise DataError(f"{item.where}: expected a role out of {', '.join(ROLES)}, got {role!r}")
    k = item.take("k", int, needed=False)
    return PolicyResult(item.text("name"), role, item.rate(), k, read_counts(item))


def _head(item: Fields) -> HeadRecord:
    rows = [Fields(f"{item.where}, floor[{i}]", r) for i, r in enumerate(item.take("floor", list))]
    floor = tuple((r.text("name"), r.text("unit"), r.number("rms"), r.number("worst")) for r in rows)
    passes = int(item.take("serial", int)), int(item.take("parallel", int))
    return HeadRecord(item.text("rule"), item.text("network"), *passes, floor)


def _dataset(item: Fields) -> DatasetRecord:
    sizes = (int(item.take(key, int)) for key in ("episodes", "frames", "train_episodes", "val_episodes"))
    episodes, frames, train, val = sizes
    return DatasetRecord(
        item.text("path"), item.text("fingerprint", ""), episodes, frames, item.texts("notes"), train, val
    )


def _source(item: Fields) -> Source:
    try:
        return Source(*(item.text(key, "") for key in ("paper", "equation", "convention", "url")))
    except InputError as error:
        raise DataError(f"{item.where}: {error}") from error


def read_log(file: Path) -> Log | None:
    """A ``log.jsonl``, or None where there is none. A line cut off in the middle is refused, with its number."""
    if not file.is_file():
        return None
    curves: dict[str, list[tuple[float, float]]] = {"train": [], "val": []}
    evaluations = []
    for row in read_lines(file):
        kind = row.text("kind")
        if kind in curves:
            curves[kind].append((float(row.take("step", int)), row.number("loss")))
        elif kind == "eval":
            evaluations.append(Evaluation(int(row.take("step", int)), row.text("policy"), row.rate()))
    train, val = (np.array(curves[k], np.float64).reshape(-1, 2) for k in ("train", "val"))
    return Log(train, val, tuple(evaluations))


_COLUMNS = {
    "policy": str, "role": str, "task": str, "instruction": str, "seed": int, "start_hash": str,
    "success": bool, "length": int, "plan_ms": float, "failure": str,
}  # fmt: skip
_LATER = {"malformed": int, "starved": int}  # 0 in files that were written before there were such counts


def read_rollouts(run: Path) -> tuple[EpisodeResult, ...]:
    """``rollouts.parquet``, or nothing where there is none. A null ``plan_ms`` becomes NaN."""
    file = run / "rollouts.parquet"
    if not file.is_file():
        return ()
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: not readable as parquet ({error}). Was the run stopped while writing it?") from error
    missing = [name for name in _COLUMNS if name not in table.column_names]
    if missing:
        raise DataError(f"{file}: expected the columns {list(_COLUMNS)}, got {table.column_names}; missing: {missing}")
    columns = _COLUMNS | {name: kind for name, kind in _LATER.items() if name in table.column_names}
    rows = []
    for number, row in enumerate(table.select(list(columns)).to_pylist()):
        row["plan_ms"] = math.nan if row["plan_ms"] is None else row["plan_ms"]
        row["failure"] = row["failure"] or ""
        for name, kind in columns.items():
            fits = isinstance(row[name], (int, float) if kind is float else kind)
            if not fits or (isinstance(row[name], bool) and kind is not bool):
                raise DataError(f"{file}, row {number}: expected a {kind.__name__} as {name}, got {row[name]!r:.80}")
        rows.append(EpisodeResult(**row))
    return tuple(rows)


def read_samples(run: Path) -> tuple[tuple[Clip, ...], tuple[Fan, ...]]:
    """``samples.safetensors``: clips and fans in the order of their numbers; nothing where there is none."""
    file = run / "samples.safetensors"
    if not file.is_file():
        return (), ()
    try:
        with safe_open(file, framework="numpy") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  (not a mapping)
            header = stored.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise DataError(f"{file}: not readable ({error}). Was the run stopped while writing it?") from error
    if "info" not in header:
        raise DataError(f"{file}: expected the header key 'info' (JSON text), got {sorted(header)}")
    try:
        info = Fields(f"{file}, header", json.loads(header["info"]))
    except ValueError as error:
        raise DataError(f"{file}: the header key 'info' is not a JSON object ({error})") from error
    keys = sorted({name.rpartition("/")[0] for name in tensors}, key=_natural)
    notes = {key: Fields(f"{file}, info[{key!r}]", info.take(key, dict)) for key in keys}
    clips = [_clip(file, key, tensors, notes[key]) for key in keys if key.startswith("rollout/")]
    fans = [_fan(file, key, tensors, notes[key]) for key in keys if key.startswith("fan/")]
    return tuple(clips), tuple(fans)


def _natural(key: str) -> tuple[str, int, str]:
    """ "fan/10/pi0" comes after "fan/9/pi0"."""
    kind, _, rest = key.partition("/")
    number, _, tail = rest.partition("/")
    return kind, int(number) if number.isdigit() else -1, tail or number


def _clip(file: Path, key: str, tensors: Mapping[str, np.ndarray], note: Fields) -> Clip:
    frames = _picture(file, f"{key}/frames", tensors, 4)
    success, failure = bool(note.take("success", bool)), note.text("failure", "")
    return Clip(frames, note.text("policy"), note.text("instruction"), success, failure, note.maybe_number("rate"))


def _fan(file: Path, key: str, tensors: Mapping[str, np.ndarray], note: Fields) -> Fan:
    _, group, policy = key.split("/", 2)
    image, name = _picture(file, f"{key}/image", tensors, 3), f"{key}/paths"
    paths = tensors.get(name)
    if (
        paths is None
        or paths.ndim != 3
        or paths.shape[1] < 2
        or paths.shape[2] != 2
        or not paths.size
        or not np.isfinite(paths).all()
    ):
        got = "none" if paths is None else f"{paths.dtype} {paths.shape}"
        raise DataError(f"{file}: expected finite numbers of shape (n, H + 1, 2) under {name!r}, got {got}")
    return Fan(group, policy, image, np.asarray(paths, np.float32), note.text("instruction"))


def _picture(file: Path, name: str, tensors: Mapping[str, np.ndarray], axes: int) -> np.ndarray:
    found = tensors.get(name)
    if found is None or found.dtype != np.uint8 or found.ndim != axes or found.shape[-1] != 3 or not found.size:
        got = "none" if found is None else f"{found.dtype} {found.shape}"
        shape = "(L, Y, X, 3)" if axes == 4 else "(Y, X, 3)"
        raise DataError(f"{file}: expected uint8 {shape} under {name!r}, got {got}")
    return found
