"""Fixtures shared by all tests."""

from pathlib import Path

import pytest
import torch


@pytest.fixture
def shared() -> Path:
    """The folder of reference data beside the repository; tests that need it are skipped where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"reference data not present: {folder}")
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
