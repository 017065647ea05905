"""The verdict on agents trained where the truth is known: nothing to earn in noise, a lot in regime."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailguard.examination import examine
from tailguard.experiment import Experiment, experiment_config
from tailguard.run import RunFolder, train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("market", "skill"), [("regime", True), ("noise", False)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_verdict_is_the_truth(tmp_path: Path, market: str, skill: bool, seed: int) -> None:
    config = experiment_config({"preset": market, "seed": seed, "steps": 200_000})
    experiment, folder = Experiment(config), RunFolder(tmp_path / market)
    folder.create(config.to_yaml(), {})
    train(experiment.agent(), folder, config.steps, config.checkpoint)
    found = examine(folder)
    assert found.verdict.skill is skill, found.verdict
    if skill:
        assert found.optimum is not None
        assert found.optimum.fraction is not None
        assert found.optimum.fraction > 0.6
