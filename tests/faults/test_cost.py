"""What checkpoints cost: time and space of one, and their share of a training at the default interval."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tailguard import DistributionalPPO
from tailguard.experiment import Experiment, experiment_config
from tailguard.run import Listener, RunFolder, Update
from tests.environments import cartpole
from tests.runs import begin

pytestmark = pytest.mark.slow


def test_a_bundle_of_a_million_parameters_is_written_in_half_a_second_and_is_hardly_larger_than_its_tensors(
    tmp_path: Path,
) -> None:
    agent = DistributionalPPO(
        "MlpLstmPolicy", cartpole(4, 0), n_steps=8, batch_size=32, policy_kwargs={"lstm_hidden_size": 272}, seed=0
    )
    n_parameters = sum(parameter.numel() for parameter in agent.policy.parameters())
    assert 0.95e6 < n_parameters < 1.2e6
    agent.learn(64)
    seconds = []
    for number in range(5):
        began = time.perf_counter()
        agent.checkpoint(tmp_path / f"step-{number}")
        seconds.append(time.perf_counter() - began)
    tensors = (tmp_path / "step-0" / "state.safetensors").stat().st_size
    whole = sum(file.stat().st_size for file in (tmp_path / "step-0").iterdir())
    print(f"{n_parameters:,} parameters: {sorted(seconds)[2]:.3f} s, {whole:,} bytes, {whole / tensors:.3f} x")
    assert sorted(seconds)[2] < 0.5
    assert whole <= 1.1 * tensors


def test_checkpoints_take_at_most_two_percent_of_a_training_at_the_default_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = Experiment(experiment_config({"preset": "regime", "steps": 40 * 64 * 128}))
    spent, n_saved = [0.0], [0]
    real = DistributionalPPO.checkpoint

    def timed(self: DistributionalPPO, *arguments: object, **options: object) -> None:
        began = time.perf_counter()
        real(self, *arguments, **options)  # type: ignore[arg-type]
        spent[0] += time.perf_counter() - began

    def count(update: Update) -> None:
        n_saved[0] += update.checkpoint is not None

    monkeypatch.setattr(DistributionalPPO, "checkpoint", timed)
    began = time.perf_counter()
    begin(RunFolder(tmp_path / "run"), experiment, Listener(update=count))
    whole = time.perf_counter() - began
    print(f"{n_saved[0]} checkpoints took {spent[0]:.2f} of {whole:.1f} s, {spent[0] / whole:.2%}")
    assert n_saved[0] == 4
    assert spent[0] <= 0.02 * whole
