"""Populations that are not well, from real members to the line that names it, and the same ones in health."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.environments import ConstantReward
from tests.population.tiny import digest_of, tiny_population

STILL = [{"name": "learning_rate", "low": 1e-13, "high": 1e-12}]
LIVELY = [{"name": "learning_rate", "low": 1e-3, "high": 1e-2, "log": True}]


class NothingMatters(ConstantReward):
    """Whatever is done earns the same."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}  # SB3 asks for it

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(limit=10)
        self.render_mode = render_mode


class Echo(NothingMatters):
    """Who does what is shown earns 1, always: the most there is to earn is soon found by everybody."""

    def show(self) -> NDArray[np.float32]:
        self.shown = int(self.np_random.integers(2))
        return np.array([2.0 * self.shown - 1.0], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[Any], dict[str, Any]]:
        super().reset(seed=seed)
        return self.show(), {}

    def step(self, action: Any) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        self.reward = float(int(action) == self.shown)
        return self.show(), *super().step(action)[1:]


@pytest.fixture(autouse=True)
def named_environments() -> Iterator[None]:
    kinds: dict[str, type[gym.Env[Any, Any]]] = {"Echo-v0": Echo, "NothingMatters-v0": NothingMatters}
    for name, kind in kinds.items():
        gym.register(name, entry_point=kind)
    yield
    for name in kinds:
        del gym.registry[name]


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def raised(folder: Path, **settings: Any) -> set[str]:
    """The population's own alerts; those of its members are another matter."""
    digest_of(tiny_population(perturbation_interval=1, **settings), folder)
    return {line["alert"] for line in read(folder / "alerts.jsonl") if line["member"] is None}


def test_a_score_that_does_not_see_what_members_do_is_said(tmp_path: Path) -> None:
    two = {"rounds": 4, "population_size": 2, "hyperparams": LIVELY}
    assert raised(tmp_path / "sick", gym_env="NothingMatters-v0", **two) == {"warn/members_alike"}
    assert raised(tmp_path / "well", gym_env="CartPole-v1", **two) == set()


def test_members_who_all_found_the_most_there_is_are_not_said_to_be_alike(tmp_path: Path) -> None:
    assert raised(tmp_path, rounds=9, population_size=2, gym_env="Echo-v0", hyperparams=LIVELY) == set()
    rows = read(tmp_path / "metrics.jsonl")
    assert rows[0]["pbt/best_score"] < 10.0
    same = [row["pbt/best_score"] == 10.0 and row["pbt/score_spread"] == 0.0 for row in rows]
    assert any(all(same[first : first + 3]) for first in range(7))  # for as long as others are given


@pytest.mark.parametrize(("space", "expected"), [(STILL, {"warn/stuck_population"}), (LIVELY, set())])
def test_a_population_whose_best_score_never_rises_is_said(
    space: list[dict[str, Any]], expected: set[str], tmp_path: Path
) -> None:
    assert raised(tmp_path, rounds=12, population_size=2, score_steps=150, hyperparams=space) == expected
