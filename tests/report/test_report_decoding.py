"""Plans that did not decode are counted per episode, and success is shown with and without them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_run import write_json, write_run
from test_report_page import read

from tools import system
from vola.envs.experts import Expert
from vola.envs.tabletop import make_tabletop
from vola.errors import DataError
from vola.executor import Receding
from vola.report import words
from vola.report.counts import Counts, count
from vola.report.records import read_summary
from vola.report.sections import read_records
from vola.rollout.rollout import EpisodeResult, Rollouts, rollout
from vola.summary import result_of, write_rollouts
from vola.theory.statistics import Rate
from vola.types import Chunk, Observation

TASK = "vola/Detour-v0"
SEEDS = range(8)
DAMAGED, STANDS = (0, 2, 3, 5, 6), (6, 7)  # scenes whose plans 3 and 9 do not decode; scenes that never move


class Stub:
    """The expert, but plans 3 and 9 of some scenes are sequences that do not decode, and some scenes stand still."""

    def __init__(self, expert: Expert) -> None:
        self.expert, self.plans = expert, 0
        self.observation_window, self.chunk_length = expert.observation_window, expert.chunk_length

    def plan(self, observation: Observation, rngs: Sequence[np.random.Generator]) -> Chunk:
        """All scenes are asked together (whole=True, k = 1), so that a call's number is the number of its plans."""
        self.plans += 1
        made = self.expert.plan(observation, rngs)
        actions, malformed = made.actions.copy(), np.zeros(len(SEEDS), bool)
        actions[list(STANDS)] = 0
        malformed[list(DAMAGED)] = self.plans in (3, 9)
        return Chunk(actions, made.valid & ~malformed[:, None], malformed)


@cache
def stub_rollouts() -> Rollouts:
    table = make_tabletop(TASK)
    planner = Stub(Expert(table))
    done = rollout(
        table, SEEDS, planner, Receding(1), name="pi0-fast", role="policy", task=TASK, whole=True, noise_seed=0
    )
    assert min(e.length for e in done.episodes) >= 9
    return done


def fast_run(run: Path) -> dict:
    """A run whose only policy is the stub, as its records are written."""
    write_run(run, np.random.default_rng(0), episodes=4, side=8)
    done = stub_rollouts()
    write_rollouts(run, [done])
    content = json.loads((run / "summary.json").read_text())
    content["policies"] = [result_of(done, system("fast", head__tokens__on_malformed="repeat"))]
    write_json(run / "summary.json", content)
    (run / "samples.safetensors").unlink()
    return content


def test_T06_decode_failures_are_counted_flagged_and_success_is_shown_with_and_without_them(tmp_path: Path) -> None:
    result = fast_run(tmp_path)["policies"][0]
    assert (result["malformed_plans"], result["malformed_episodes"], result["starved_ticks"]) == (10, 5, 10)
    assert (result["successes"], result["episodes"]) == (6, 8)
    assert result["decoded"] == {"successes": 2, "episodes": 3}
    assert result["on_malformed"] == "repeat"
    flags = {row["seed"]: row["malformed"] for row in pq.read_table(tmp_path / "rollouts.parquet").to_pylist()}
    assert flags == {seed: 2 * (seed in DAMAGED) for seed in SEEDS}
    _, reader = read(tmp_path)
    assert "10 plans of pi0-fast did not decode, in 5 of 8 episodes: the last action was repeated" in reader.text
    assert "head.tokens.on_malformed=repeat" in reader.text
    assert "Success without these episodes: 67 % [20, 94], 2 of 3; with them 75 %, 6 of 8." in reader.text
    assert "On 10 ticks in all pi0-fast had no fresh action" in reader.text
    assert "The episodes with plans that did not decode (5)" in reader.text


def test_nothing_is_said_where_all_is_well(tmp_path: Path) -> None:
    run = write_run(tmp_path, np.random.default_rng(0), episodes=8, side=8)
    assert "decode" not in read(run)[1].text
    content = json.loads((run / "summary.json").read_text())
    for policy in content["policies"]:
        policy |= Counts(decoded=Rate(policy["successes"], 8), on_malformed="repair").record()
    write_json(run / "summary.json", content)
    assert "decode" not in read(run)[1].text


def test_older_summaries_get_the_counts_of_their_episodes(tmp_path: Path) -> None:
    content = fast_run(tmp_path)
    (policy,) = content["policies"]
    for key in Counts().record():
        del policy[key]
    write_json(tmp_path / "summary.json", content)
    assert read_summary(tmp_path).policies[0].counts is None
    assert read_records(tmp_path).summary.policies[0].counts == Counts(10, 5, 10, Rate(2, 3), "")
    text = read(tmp_path)[1].text
    assert "10 plans of pi0-fast did not decode, in 5 of 8 episodes." in text  # the fallback was not recorded


@pytest.mark.parametrize("column", ["malformed", "starved"])
def test_counts_that_contradict_the_episodes_are_refused(tmp_path: Path, column: str) -> None:
    fast_run(tmp_path)
    rows = pq.read_table(tmp_path / "rollouts.parquet").to_pylist()
    rows[0][column] += 1
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rollouts.parquet")
    with pytest.raises(DataError, match="counts .*11.* for 'pi0-fast', but summary.json says .*10"):
        read_records(tmp_path)


def test_counts_ignore_order_and_may_leave_no_clean_episode() -> None:
    episodes = stub_rollouts().episodes
    assert count(episodes) == count(episodes[::-1])
    damaged = [e for e in episodes if e.malformed]
    assert count(damaged).decoded is None
    told = words.decode_sentences("pi0", Rate(4, 5), count(damaged, "repair"))
    assert told[0].endswith("surplus ones dropped (head.tokens.on_malformed=repair).")
    assert "No episode of pi0 was without such a plan" in told[1]


def test_one_is_not_many() -> None:
    episode = EpisodeResult("p", "policy", TASK, "go", 0, "h", True, 9, 1.0, "", malformed=1, starved=1)
    told = words.decode_sentences("p", Rate(1, 1), count([episode], "repeat"))
    assert told[0].startswith("1 plan of p did not decode, in 1 of 1 episode: ")
    assert told[2].startswith("On 1 tick in all p")


def test_experts_and_continuous_heads_have_no_fallback() -> None:
    done = stub_rollouts()
    assert result_of(done, system("flow"))["on_malformed"] == ""
    expert = replace(done, episodes=tuple(replace(e, role="expert") for e in done.episodes))
    assert result_of(expert, system("fast"))["on_malformed"] == ""
    repaired = system("fast", head__tokens__on_malformed="repair")
    assert result_of(done, repaired)["on_malformed"] == "repair"
