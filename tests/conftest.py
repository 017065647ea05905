"""Settings every test shares."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Results and timings do not depend on how many cores a machine has."""
    torch.set_num_threads(1)
