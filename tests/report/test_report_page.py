"""The page: self-contained, safe against hostile texts, complete where there are records, equal to them, readable."""

import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_run import LAYOUT, heldout, write_dataset_run, write_json, write_run
from safetensors.numpy import save_file

from vola.model.layout import Block, Causal, Layout, Rule
from vola.report import animation, charts, sections
from vola.report.page import build_report
from vola.report.records import read_log, read_summary
from vola.report.theme import DARK, LIGHT, STAND_IN
from vola.theory.statistics import Rate, wilson

VOID = {"meta", "img", "br", "link", "input"}


class Reader(HTMLParser):
    """Tags with their attributes, visible text, and a check that tags are nested."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.said: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.said.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"[\s\u00a0]+", " ", "".join(self.said))

    def sections(self) -> list[str | None]:
        return [a.get("id") for tag, a in self.tags if tag == "section"]


def read(run: Path) -> tuple[str, Reader]:
    page = build_report(run).read_text(encoding="utf-8")
    return page, Reader(page)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Reader]:
    run = write_run(tmp_path_factory.mktemp("full"), np.random.default_rng(0), side=48)
    write_json(run / "heldout.json", heldout(np.random.default_rng(1), 4, 8))
    return run, *read(run)


def test_nothing_is_fetched(full: tuple[Path, str, Reader]) -> None:
    _, page, reader = full
    for tag, attributes in reader.tags:
        assert tag not in {"link", "iframe", "object", "embed", "base", "audio", "video"}
        for key in ("src", "srcset", "href", "xlink:href", "data", "poster", "action"):
            value = attributes.get(key) or ""
            allowed = value.startswith(("data:image/webp;base64,", "#")) or not value
            assert allowed or (tag == "a" and value.startswith("https://"))
    assert not re.search(r"@import|url\((?!#)", page)
    policy = next(
        a["content"] for t, a in reader.tags if t == "meta" and "Content-Security" in str(a.get("http-equiv"))
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_all_sections_stand_in_reading_order(full: tuple[Path, str, Reader]) -> None:
    expected = ["fans", "rollouts", "outcomes", "learning", "heldout", "layout", "speed", "used"]
    assert full[2].sections() == expected


def test_numbers_equal_the_records(full: tuple[Path, str, Reader]) -> None:
    run, page, reader = full
    summary = read_summary(run)
    for policy in summary.policies:
        assert f"{policy.rate.successes} of {policy.rate.n}" in reader.text
        interval = wilson(policy.rate.successes, policy.rate.n)
        assert f"left:{round(100 * interval.low, 2)}%" in page
    won = summary.policies[0].rate
    assert f"pi0 succeeds from {100 * won.rate:.1f} % [" in reader.text
    assert "the L2 baseline from 0 % [0, 2]; the expert from 100 % [98, 100]." in reader.text
    assert f"pi0 succeeds on {won.successes} where the L2 baseline fails, and the other way round on 0" in reader.text
    rows = pq.read_table(run / "rollouts.parquet").to_pylist()
    hits = sum(r["failure"] == "hit the wall" and r["policy"] == "L2" for r in rows)
    assert f"{hits} × hit the wall" in reader.text
    latency = np.median([r["plan_ms"] for r in rows if r["policy"] == "pi0"])
    assert f"{latency:.2f}" in reader.text
    for said in (
        "2.47 min",
        "31 % of the measured peak",
        "1 360 514",
        "b1946ac92492d234",
        "vola demo --minutes 2.5 --seed 7",
    ):
        assert said in reader.text.replace("\u2009", " ")
    assert "the same start states for all" in reader.text
    assert "tau = 0 is noise, tau = 1 is data" in reader.text
    record = json.loads((run / "heldout.json").read_text())
    assert f"{np.mean([e['mae'] for e in record['policy']['per_episode']]):.3g}" in reader.text


def test_other_start_states_are_named(full: tuple[Path, str, Reader], tmp_path: Path) -> None:
    run = write_run(tmp_path, np.random.default_rng(0), episodes=8, side=8)
    table = pq.read_table(run / "rollouts.parquet").to_pylist()
    for row in table:
        row["start_hash"] += row["policy"]
    pq.write_table(pa.Table.from_pylist(table), run / "rollouts.parquet")
    _, reader = read(run)
    assert "NOT the same start states for all" in reader.text
    assert "start states both were given" not in reader.text  # nothing is paired that does not belong together


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    run = write_run(tmp_path, np.random.default_rng(0), episodes=8, side=8)
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"' {{ 7*7 }} $x_1$ 推"
    summary = json.loads((run / "summary.json").read_text())
    summary["headline"]["claim"] = summary["dataset"]["path"] = summary["layout"]["picture"] = evil
    summary["dataset"]["notes"], summary["versions"], summary["cameras"] = [evil], {evil: evil}, [evil]
    summary["policies"][0]["name"] = evil
    write_json(run / "summary.json", summary)
    rows = pq.read_table(run / "rollouts.parquet").to_pylist()
    for row in rows:
        row["policy"] = evil if row["policy"] == "pi0" else row["policy"]
        row["instruction"], row["failure"] = evil, "" if row["success"] else evil
    pq.write_table(pa.Table.from_pylist(rows), run / "rollouts.parquet")
    name = f"rollout/0/{'frames'}"
    info = {"rollout/0": {"policy": evil, "instruction": evil, "success": False, "failure": evil}}
    save_file({name: np.zeros((2, 8, 8, 3), np.uint8)}, run / "samples.safetensors", {"info": json.dumps(info)})
    log = (run / "log.jsonl").read_text().replace('"pi0"', json.dumps(evil))
    (run / "log.jsonl").write_text(log)
    record = heldout(np.random.default_rng(0), 3, 4)
    record["dims"][0] = evil
    write_json(run / "heldout.json", record)
    page, reader = read(run)
    assert sum(tag == "script" for tag, _ in reader.tags) == 1
    assert not any(key.startswith("on") for _, a in reader.tags for key in a)
    assert all((a.get("src") or "data:").startswith("data:") for _, a in reader.tags)
    assert evil in "".join(reader.said)
    assert "{{ 7*7 }}" in page  # no second round of templating
    assert evil in unescape(page[page.index('id="learning"') : page.index('id="heldout"')])  # inside the SVG too


def test_absent_records_leave_no_trace(tmp_path: Path) -> None:
    run = write_run(tmp_path, np.random.default_rng(0), episodes=8, side=8)
    for name in ("log.jsonl", "rollouts.parquet", "samples.safetensors"):
        (run / name).unlink()
    summary = json.loads((run / "summary.json").read_text())
    for key in ("layout", "minutes", "samples_per_second", "flops_share", "plan_ms", "sources", "cameras", "dataset"):
        del summary[key]
    write_json(run / "summary.json", summary)
    _, reader = read(run)
    assert reader.sections() == ["used"]
    assert "None" not in reader.text
    assert "nan" not in reader.text


def test_run_without_environment_answers_with_heldout_error(tmp_path: Path) -> None:
    _, reader = read(write_dataset_run(tmp_path, np.random.default_rng(0)))
    assert reader.sections() == ["heldout", "learning", "layout", "speed", "used"]
    assert "On held-out actions pi0.small is off by 0.0" in reader.text
    assert "At steps 1–3 of 16 pi0.small does not beat holding the last action or linear extrapolation." in reader.text
    assert "88 of 100 episodes lack their video on disk and were left out." in reader.text


def test_error_bars_stand_where_the_records_say_and_nameless_units_are_data_units(tmp_path: Path) -> None:
    run = write_dataset_run(tmp_path, np.random.default_rng(0), 6, 4)
    record = json.loads((run / "heldout.json").read_text())
    write_json(run / "heldout.json", record | {"units": ["unknown"] * 4, "unit": "unknown"})
    shown = sections.heldout(sections.read_records(run), np.random.default_rng(0))
    assert shown is not None
    assert shown["unit"] == "data units"
    methods = {"policy": record["policy"], **record["baselines"]}
    mae = np.array([np.mean([e["mae"] for e in method["per_episode"]]) for method in methods.values()])
    assert [bar["name"] for bar in shown["bars"]] == ["pi0.small", "hold", "mean", "linear"]
    assert [bar["at"] for bar in shown["bars"]] == pytest.approx(mae / mae.max() * 100 / 1.08, abs=0.01)
    assert all(0 <= bar["low"] <= bar["at"] <= bar["high"] <= 100 for bar in shown["bars"])


def test_run_without_any_evaluation(tmp_path: Path) -> None:
    run = write_dataset_run(tmp_path, np.random.default_rng(0), 3, 4)
    (run / "heldout.json").unlink()
    assert "no evaluation has been recorded" in read(run)[1].text


def test_both_themes_and_no_other_colour(full: tuple[Path, str, Reader]) -> None:
    _, page, _ = full
    assert LIGHT.keys() == DARK.keys()
    assert f"--paper:{LIGHT['paper']}" in page
    assert f'data-theme="dark"] {{ color-scheme: dark; --paper:{DARK["paper"]}' in page
    assert "prefers-color-scheme: dark" in page
    assert not [c for c in STAND_IN.values() if c in page]
    assert not re.findall(r"(?:fill|stroke)[:=]\s*\"?(?!#fff)#[0-9a-f]{3,6}", page)
    assert set(re.findall(r"var\(--([a-z]+)\)", page)) <= LIGHT.keys() | {"columns", "few", "group", "row"}


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast_of_every_text_colour(palette: dict[str, str]) -> None:
    """At least 4.5 to 1 on the page and on cards (WCAG 2.2, success criterion 1.4.3)."""
    for ground in ("paper", "card"):
        for role in palette.keys() - {"paper", "card", "line"}:
            light, dark = sorted((luminance(palette[role]), luminance(palette[ground])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (role, ground)


def test_pictures_have_words_and_ids_are_unique(full: tuple[Path, str, Reader]) -> None:
    _, _, reader = full
    assert all(a.get("alt") for tag, a in reader.tags if tag == "img")
    assert all(a.get("aria-label") for _, a in reader.tags if a.get("role") == "img")
    ids = [a["id"] for _, a in reader.tags if "id" in a]
    assert len(ids) == len(set(ids))
    used = {v for _, a in reader.tags for v in re.findall(r"#([\w-]+)", f"{a.get('href')} {a.get('clip-path')}")}
    assert used <= set(ids)


def test_same_records_same_page_and_no_leftover(tmp_path: Path) -> None:
    run = write_run(tmp_path, np.random.default_rng(0), episodes=8, side=8)
    one = build_report(run).read_bytes()
    assert build_report(run).read_bytes() == one
    assert not list(run.glob("*.part"))


def test_page_stays_small_and_says_what_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path, np.random.default_rng(0), episodes=8, side=8)
    noise = np.random.default_rng(1).integers(0, 256, (12, 8, 128, 128, 3), dtype=np.uint8)  # cannot be compressed
    tensors = {f"rollout/{i}/frames": frames for i, frames in enumerate(noise)}
    note = {"policy": "pi0", "instruction": "go", "success": True, "failure": ""}
    save_file(tensors, run / "samples.safetensors", {"info": json.dumps({f"rollout/{i}": note for i in range(12)})})
    monkeypatch.setattr(animation, "SIZES", ((128, 50), (96, 40)))
    monkeypatch.setattr("vola.report.sections.MOVIE_BYTES", 150_000)
    page, reader = read(run)
    shown = sum("live" in str(a.get("class")) for tag, a in reader.tags if tag == "img")
    assert 0 < shown < 12
    assert f"{12 - shown} recorded rollouts are left out" in reader.text
    assert len(page) < 1_200_000


def test_loss_curves_keep_their_numbers(full: tuple[Path, str, Reader]) -> None:
    run, _, _ = full
    log = read_log(run / "log.jsonl")
    assert log is not None
    x, y, low, high = charts.thinned(log.train, 100)
    assert len(x) == 100
    assert low is not None
    assert high is not None
    assert ((low <= y) & (y <= high)).all()
    assert y[0] == np.median(log.train[:3, 1])
    short = log.train[:5]
    assert charts.thinned(short, 100)[1].tolist() == short[:, 1].tolist()
    chart = charts.learning_curve(read_summary(run), log, None)
    assert chart is not None
    assert "pi0: from 8 to 97" in chart.description


def test_layout_is_drawn_as_it_is_written(full: tuple[Path, str, Reader]) -> None:
    cells = [a["class"] for _, a in full[2].tags if str(a.get("class")).startswith("cell") and a.get("role") == "img"]
    signs = re.findall(r"[#.]", "".join(line[18:] for line in LAYOUT.splitlines()[1:]))
    assert [c == "cell all" for c in cells] == [s == "#" for s in signs]
    for picture in ("rows = who looks; columns: image x2\nimage 0  ##", LAYOUT.replace("state  x1", "pose  x1")):
        other = sections.layout(replace(read_summary(full[0]), layout_picture=picture))
        assert other == {"kind": "text", "text": picture}  # not a block picture: shown as it stands


def test_the_layouts_own_picture_can_be_drawn(full: tuple[Path, str, Reader]) -> None:
    blocks = (Block("image", 3), Block("words", 2, Causal()))
    picture = Layout(blocks, (Rule("words", "image"),)).picture()
    summary = replace(read_summary(full[0]), layout_picture=picture)
    drawn = sections.layout(summary)
    assert drawn is not None
    assert drawn["rows"] == [
        ("image", "3", [sections.SIGNS["#"], sections.SIGNS["."]]),
        ("words", "2", [sections.SIGNS["#"], sections.SIGNS["\\"]]),
    ]


def test_long_names_of_dimensions_fit_their_panels() -> None:
    assert charts.fitted("elbow", 180, 11.5) == ("elbow", 11.5)
    title, size = charts.fitted("kRightHandThumbRotation", 170, 11.5)
    assert title == "kRightHandThumbRotation"
    assert 0.66 * size * len(title) <= 170
    title, size = charts.fitted("left_arm_left_shoulder_pitch_joint.position", 170, 11.5)
    assert (title, size) == ("left_arm_left…oint.position", 9.5)  # both ends stay
    assert 0.66 * size * len(title) <= 180


def test_negative_losses_get_a_linear_axis(tmp_path: Path) -> None:
    run = write_dataset_run(tmp_path, np.random.default_rng(0), 3, 4)
    (run / "log.jsonl").write_text(
        "".join(json.dumps({"kind": "train", "step": s, "loss": 1.0 - s}) + "\n" for s in range(4))
    )
    _, reader = read(run)
    assert "logarithmic" not in reader.text


def test_rates_never_round_to_certainty() -> None:
    from vola.report.words import number, percent, percent_range, ranges

    plain = {
        (199, 200): "99.5 %", (200, 200): "100 %", (1, 400): "0.2 %", (5, 7): "71 %", (115, 200): "57.5 %",
        (9, 2000): "0.5 %", (1, 9999): "< 0.1 %",
    }  # fmt: skip
    assert {k: percent(Rate(*k)).replace("\u00a0", " ") for k in plain} == plain
    assert percent_range(wilson(194, 200)) == "[93, 99]"  # 93.61 to 98.62, rounded outwards
    assert percent_range(wilson(0, 200)) == "[0, 2]"
    assert [number(v) for v in (0.0, 1523.4, 0.004312, 42.06, 1e-7, 200.0, 1360514)] == [
        "0", "1\u2009520", "0.00431", "42.1", "1.00e-07", "200", "1\u2009360\u2009514",
    ]  # fmt: skip
    assert ranges([1, 2, 3, 7, 9, 10]) == "1–3, 7, 9–10"
