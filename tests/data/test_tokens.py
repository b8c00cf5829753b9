"""`vola data tokens`: figures against an independent computation, units, what must not matter, refusals, printing."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data_tools import memory, record, spec
from rich.console import Console
from scipy.fft import dct, idct

from vola.cli import main
from vola.data.episodes import MemoryDataset, split_episodes
from vola.data.tokens import TokenReport, describe_tokens, measure
from vola.data.transforms import RelativeActions, Transforms
from vola.errors import ConfigError
from vola.types import ActionSpec, StateSpec

H = 8
KINDS = ("midpoint:16", "truncated:16", "quantile:8", "fast:10")


def demonstrations(n: int = 10, seed: int = 0) -> MemoryDataset:
    """Smooth random walks: action x in metres, y in metres."""
    rng = np.random.default_rng(seed)
    data = memory([20 + i for i in range(n)], spec(S=2))
    walks = {
        k: [rng.standard_normal((e.length, 2)).cumsum(0).astype(np.float32) / 10 for e in data.episodes]
        for k in ("state", "action")
    }
    return replace(data, columns=walks)


def changed(data: MemoryDataset, action) -> MemoryDataset:
    """The dataset with ``action(episode place, numbers)`` instead of its actions."""
    made = [action(i, a.copy()).astype(np.float32) for i, a in enumerate(data.columns["action"])]
    return replace(data, columns={**data.columns, "action": made})


def by_kind(report: TokenReport) -> dict:
    return {r.kind: r for r in report.rows}


def text(report: TokenReport, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(describe_tokens(report))
    return console.file.getvalue()


def test_T08_figures_are_those_of_an_independent_computation() -> None:
    data = demonstrations()
    report = by_kind(measure(data, H, KINDS))
    train, held = split_episodes(data, 0.2, 0)
    rows = np.concatenate([data.column("action", e) for e in train]).astype(np.float64)
    low, high = np.quantile(rows, [0.01, 0.99], axis=0)
    scale = (high - low) / 2

    def cut(e: int):
        """(normalised chunk, whole coefficients, how many of its steps are real) at every frame of an episode."""
        z = (data.column("action", e).astype(np.float64) - low) / scale - 1
        for t in range(len(z)):
            chunk = z[np.minimum(np.arange(t, t + H), len(z) - 1)]
            yield chunk, np.around(dct(chunk, axis=0, norm="ortho") * 10), min(H, len(z) - t)

    seen = [spectrum for e in train for _, spectrum, _ in cut(e)]
    least, most = np.min(seen), np.max(seen)
    errors: dict[str, list] = {"midpoint:16": [], "fast:10": []}
    outside, lost, count = 0, 0, 0
    for e in held:
        for chunk, spectrum, n in cut(e):
            outside += (np.abs(chunk[:n]) > 1 + 1e-6).sum()
            lost += ((spectrum < least) | (spectrum > most)).sum()
            count += 2 * n
            bins = np.clip(np.floor((chunk + 1) * 8), 0, 15)
            errors["midpoint:16"].append(((bins + 0.5) / 8 - 1 - chunk)[:n])
            back = idct(np.clip(spectrum, least, most) / 10, axis=0, norm="ortho")
            errors["fast:10"].append((back - chunk)[:n])
    for kind, parts in errors.items():
        error = np.concatenate(parts)
        row = report[kind]
        np.testing.assert_allclose(row.rms, np.sqrt(((error * scale) ** 2).mean(0)), rtol=1e-3)
        np.testing.assert_allclose(row.worst, np.abs(error * scale).max(0), rtol=1e-3)
        assert row.share == pytest.approx(np.sqrt((error**2).mean()), rel=1e-3)
    assert report["midpoint:16"].clipped == pytest.approx(outside / count)
    assert lost > 0
    assert report["midpoint:16"].tokens_mean == report["midpoint:16"].tokens_max == 2 * H
    assert report["midpoint:16"].bits <= 2 * H * 4
    assert report["fast:10"].tokens_mean < 2 * H + 1


def test_T08_a_finer_scale_costs_tokens_and_one_wrong_token_is_shown() -> None:
    rows = measure(demonstrations(), H, ("fast:2", "fast:10", "fast:50", "midpoint:64")).rows
    shares, tokens = [r.share for r in rows[:3]], [r.tokens_mean for r in rows[:3]]
    assert shares == sorted(shares, reverse=True)
    assert tokens == sorted(tokens)
    # Bins: one number of 2 H moves by one width. FAST: anything up to the loss of the whole chunk.
    assert rows[3].one_token == pytest.approx(2 / 64 / np.sqrt(2 * H), rel=1e-3)
    assert rows[3].broken == 0
    assert rows[1].one_token > rows[3].one_token


def test_errors_are_physical() -> None:
    data = demonstrations()
    base = by_kind(measure(data, H, KINDS))
    millimetres = by_kind(measure(changed(data, lambda i, a: a * [1000, 1]), H, KINDS))
    for kind in KINDS:
        np.testing.assert_allclose(millimetres[kind].rms, base[kind].rms * [1000, 1], rtol=1e-2)
        np.testing.assert_allclose(millimetres[kind].worst, base[kind].worst * [1000, 1], rtol=5e-2)


def test_nothing_is_fitted_on_held_out_episodes() -> None:
    """Held-out actions scaled by 10 lie outside the range: their own errors grow, floors and vocabularies stay."""
    data = demonstrations()
    _, held = split_episodes(data, 0.2, 0)
    base = by_kind(measure(data, H, KINDS))
    wild = by_kind(measure(changed(data, lambda i, a: a * 10 if i in held else a), H, KINDS))
    for kind in KINDS:
        assert (wild[kind].floor, wild[kind].vocabulary) == (base[kind].floor, base[kind].vocabulary)
        assert wild[kind].clipped > base[kind].clipped
        assert wild[kind].share > base[kind].share


def test_steps_past_the_end_of_an_episode_do_not_count() -> None:
    """Chunks far longer than the episodes: most steps are padding, and errors are those of H = 1."""
    data = demonstrations()
    long, one = (by_kind(measure(data, h, ("midpoint:16",)))["midpoint:16"] for h in (60, 1))
    assert np.isfinite(long.rms).all()
    np.testing.assert_allclose(long.worst, one.worst, rtol=1e-6)
    assert long.clipped > 0


def test_a_constant_dimension_costs_nothing() -> None:
    report = measure(changed(demonstrations(), lambda i, a: a * [1, 0] + [0, 0.3]), H, KINDS)
    for row in report.rows:
        assert (row.rms[1], row.worst[1]) == (0, 0)
        assert np.isfinite([row.share, row.floor, row.clipped, row.bits]).all()
    assert "nan" not in text(report)


def test_relative_actions() -> None:
    """Moving robot and target together changes absolute actions, not relative ones."""
    names, units = ("x", "y"), ("m", "m")
    robot = replace(spec(), state=StateSpec(names, units), action=ActionSpec(names, units, ("position",) * 2, 10.0))
    data = replace(demonstrations(), spec=robot)
    shift = [np.float32(3 * i) for i in range(len(data.episodes))]
    moved = {k: [v + s for v, s in zip(parts, shift, strict=True)] for k, parts in data.columns.items()}
    away = replace(data, columns=moved)
    relative = Transforms((RelativeActions.by_name(robot),))
    first, second = (by_kind(measure(d, H, KINDS, relative)) for d in (data, away))
    for kind in KINDS:
        np.testing.assert_allclose(first[kind].rms, second[kind].rms, rtol=1e-3)
    a, b = (by_kind(measure(d, H, KINDS))["midpoint:16"].rms for d in (data, away))
    assert (b > 3 * a).all()


def test_a_tokenizer_that_cannot_be_fitted_says_why_and_the_others_stay() -> None:
    report = measure(demonstrations(), H, ("fast:5000", "midpoint:16"))
    assert "Lower scale" in report.rows[0].refused
    assert not report.rows[1].refused
    assert "fast:5000: not fitted." in text(report)


def test_the_picture_fits_80_columns_and_names_everything() -> None:
    report = measure(demonstrations(), H, KINDS)
    shown = text(report)
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert "…" not in shown
    for word in (*KINDS, "a0", "a1", "unit m", "all", "8 episodes", "of 2"):
        assert word in shown


def test_refusals() -> None:
    data = demonstrations()
    for bad in (
        lambda: measure(data, H, ("midpoint",)),
        lambda: measure(data, H, ("words:3",)),
        lambda: measure(data, H, ("midpoint:16.5",)),
        lambda: measure(data, H, ("fast:0",)),
        lambda: measure(data, 0, KINDS),
        lambda: measure(data, H, KINDS, val=0.0),
    ):
        with pytest.raises(ConfigError):
            bad()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record(tmp_path / "set", demonstrations())
    main(["data", "tokens", str(folder), "--H", "4", "--kinds", "midpoint:16", "fast:10"])
    out = capsys.readouterr().out
    assert "midpoint:16" in out
    assert "fast:10" in out
    assert "H=4" in out
    with pytest.raises(SystemExit):
        main(["data", "tokens", str(folder), "--kinds", "words:3"])
    assert "expected NAME:NUMBER" in capsys.readouterr().err
