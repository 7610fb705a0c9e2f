"""Checks on GPUs: `make gpu`. What needs more of them than are visible is skipped, and named at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

DEMO = Path(__file__).parents[2] / "shared/ryzanstein/demo"


def need(count: int) -> None:
    """Skips the test where fewer GPUs are visible."""
    if (found := torch.cuda.device_count()) < count:
        pytest.skip(f"needs {count} GPUs, {found} are visible")


@pytest.fixture(autouse=True)
def gpu() -> None:
    need(1)
