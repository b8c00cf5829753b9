import time

import numpy as np
import pytest

from vola.errors import ConfigError, InputError
from vola.executor import Receding
from vola.types import Chunk


def chunk(B: int, H: int, A: int = 2, base: float = 0.0) -> Chunk:
    """Action h of row b is base + 100 b + h in every dimension."""
    values = base + 100 * np.arange(B)[:, None, None] + np.arange(H)[None, :, None] + np.zeros((B, H, A))
    return Chunk(values.astype(np.float32), np.ones((B, H), bool))


@pytest.mark.parametrize(("k", "H"), [(1, 4), (3, 4), (4, 4)])
def test_executes_the_first_k_of_every_chunk(k: int, H: int) -> None:
    execute, seen = Receding(k), []
    state = execute.start(2, H, 2)
    for tick in range(3 * k):
        due = execute.due(state)
        assert due.all() == (tick % k == 0)
        plan = chunk(2, H, base=1000.0 * tick) if due.any() else None
        action, state = execute.step(state, plan)
        seen.append(action[:, 0])
    expected = [[1000 * (t - t % k) + 100 * b + t % k for b in range(2)] for t in range(3 * k)]
    np.testing.assert_array_equal(seen, expected)


def test_rows_are_independent_and_reset_forgets_only_theirs() -> None:
    execute = Receding(3)
    _, state = execute.step(execute.start(3, 4, 2), chunk(3, 4))
    state = execute.reset(state, np.array([False, True, False]))
    np.testing.assert_array_equal(execute.due(state), [False, True, False])
    action, state = execute.step(state, chunk(1, 4, base=5000.0), np.array([False, True, False]))
    np.testing.assert_array_equal(action[:, 0], [1, 5000, 201])


def test_C03_an_old_chunk_never_survives_a_reset() -> None:
    execute = Receding(3)
    _, state = execute.step(execute.start(1, 4, 2), chunk(1, 4, base=7.0))
    state = execute.reset(state, np.array([True]))
    with pytest.raises(InputError, match="used up"):
        execute.step(state)


def test_step_is_pure() -> None:
    execute = Receding(2)
    before = execute.start(2, 4, 2)
    actions, cursor = before.actions.copy(), before.cursor.copy()
    execute.step(before, chunk(2, 4))
    np.testing.assert_array_equal(before.actions, actions)
    np.testing.assert_array_equal(before.cursor, cursor)


def test_C10_horizons_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="k=5, H=4"):
        Receding(5).start(1, 4, 2)
    with pytest.raises(ConfigError, match="k >= 1"):
        Receding(0)
    state = Receding(2).start(2, 4, 2)
    with pytest.raises(InputError, match="expected 2 chunks"):
        Receding(2).step(state, chunk(1, 4))
    with pytest.raises(InputError, match="plan for the rows"):
        Receding(2).step(state)


def test_popping_costs_microseconds() -> None:
    """200 environments; the bound is 20 microseconds per environment step, with room for a busy machine."""
    execute = Receding(16)
    _, state = execute.step(execute.start(200, 16, 2), chunk(200, 16))
    times = []
    for _ in range(14):
        start = time.perf_counter()
        _, state = execute.step(state)
        times.append(time.perf_counter() - start)
    assert np.median(times) / 200 < 20e-6
