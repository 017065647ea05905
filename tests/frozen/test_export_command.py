"""`tailguard export`: a run of own bars, of an embedded market and of a Gymnasium environment as frozen policies."""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tailguard import DistributionalPPO
from tailguard.checkpoint import DIGEST
from tailguard.cli import app
from tailguard.errors import ConfigError
from tailguard.frozen import export
from tailguard.run import RunFolder
from tailguard_runtime import FrozenPolicy
from tests.runs import begin, tiny_experiment
from tests.test_examination import train_here, write


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with a run of own bars of two symbols."""
    place = tmp_path_factory.mktemp("bars")
    with chdir(place):
        write(place / "bars.csv")
        train_here("first")
    return place


def test_a_run_of_own_bars_becomes_a_folder_that_says_all_of_its_market(place: Path) -> None:
    with chdir(place):
        said = CliRunner().invoke(app, ["export", "first"])
        assert said.exit_code == 0, said.output
        policy = FrozenPolicy.load("runs/first/frozen")
        agent = DistributionalPPO.load(RunFolder("runs/first").last_checkpoint())
        checkpoint = RunFolder("runs/first").last_checkpoint()
        assert policy.contract["source"]["checkpoint_sha256"] == (checkpoint / DIGEST).read_text()
        scaler = json.loads(Path("runs/first/scaler.json").read_text())["scaler"]
    market = policy.contract["market"]
    assert market["symbols"] == ["AAA", "BBB"]
    assert market["features"] == [{"name": "return_1", "look_back": 1}, {"name": "return_4", "look_back": 4}]
    assert market["look_back"] == 4
    assert market["interval_seconds"] == 3600.0
    assert market["scaler"] == {**scaler, "clip": 5.0, "min_std": 1e-9}
    assert market["account"]["gross_cap"] == 1.0
    assert market["costs"]["fee_bps"] == 2.0
    assert policy.contract["observation"]["names"] == [
        *("return_1:AAA", "return_4:AAA", "return_1:BBB", "return_4:BBB"),
        *("weight:AAA", "weight:BBB"),
    ]
    rng, state, own = np.random.default_rng(0), None, None
    for _ in range(50):
        seen = rng.normal(size=(1, 6)).astype(np.float32)
        expected, state = agent.predict(seen, state, deterministic=True)
        action, own = policy.step(seen, own)
        np.testing.assert_allclose(action, expected, rtol=0, atol=1e-6)


def test_an_embedded_market_and_a_gymnasium_environment(tmp_path: Path) -> None:
    for source in ("regime", "cartpole"):
        folder = RunFolder(tmp_path / source)
        begin(folder, tiny_experiment(source, updates=2))
        contract = FrozenPolicy.load(export(folder.path, tmp_path / f"frozen-{source}")).contract
        assert (contract["market"] is None) == (source == "cartpole")
        assert contract["source"]["run"] == source


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run"):
        export(tmp_path / "nothing", tmp_path / "frozen")
