"""K1, K4: a run that stopped and went on is, bit for bit, the run that never stopped."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecNormalize

from tailguard import DistributionalPPO
from tailguard.checkpoint import read_manifest, state_digest
from tailguard.errors import CheckpointError, StateError
from tailguard.run import CheckpointConfig, Listener, RunFolder, Update, resumed, train
from tests.agents import tiny_agent
from tests.cli.test_cli import prices, write_bars
from tests.environments import cartpole
from tests.runs import SOURCES, STEPS_PER_UPDATE, begin, go_on, tiny_experiment, whole_state


class PowerCut(BaseException):
    """Ends a run between two updates without any farewell."""


def cut_at(step: int) -> Listener:
    def cut(update: Update) -> None:
        if update.step >= step:
            raise PowerCut

    return Listener(update=cut)


def metrics(folder: RunFolder) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in folder.metrics_file.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "time" and not k.startswith("time/")} for row in rows]


@pytest.fixture(scope="module", params=SOURCES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RunFolder]:
    folder = RunFolder(tmp_path_factory.mktemp("whole") / request.param)
    assert begin(folder, tiny_experiment(request.param)).finished
    return request.param, folder


@pytest.mark.parametrize("update", [1, 3, 4, 5])
def test_a_run_that_was_cut_ends_in_the_same_bits(whole: tuple[str, RunFolder], tmp_path: Path, update: int) -> None:
    source, uninterrupted = whole
    folder, experiment = RunFolder(tmp_path / "run"), tiny_experiment(source)
    with pytest.raises(PowerCut):
        begin(folder, experiment, cut_at(update * STEPS_PER_UPDATE))
    assert go_on(folder, experiment).finished
    assert whole_state(folder.last_checkpoint()) == whole_state(uninterrupted.last_checkpoint())
    assert metrics(folder) == metrics(uninterrupted)


def test_tensorboard_holds_every_update_once_after_a_cut(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    folder, experiment = RunFolder(tmp_path / "run"), tiny_experiment("regime")
    with pytest.raises(PowerCut):
        begin(folder, experiment, cut_at(5 * STEPS_PER_UPDATE))
    go_on(folder, experiment)
    (events,) = folder.tensorboard.iterdir()
    steps = [
        event.step
        for event in EventFileLoader(str(events)).Load()
        for value in event.summary.value
        if value.tag == "train/loss"
    ]
    assert steps == [update * STEPS_PER_UPDATE for update in range(1, 7)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_after_the_update_with_a_checkpoint(
    whole: tuple[str, RunFolder], tmp_path: Path, number: signal.Signals
) -> None:
    source = whole[0]
    folder, experiment, heard = RunFolder(tmp_path / "run"), tiny_experiment(source), []

    def interrupt(update: Update) -> None:
        if update.step == 2 * STEPS_PER_UPDATE:
            os.kill(os.getpid(), number)

    outcome = begin(folder, experiment, Listener(update=interrupt, notice=heard.append))
    assert not outcome.finished
    assert outcome.step == 3 * STEPS_PER_UPDATE
    assert "stopping after this update" in heard[0]
    DistributionalPPO.load(outcome.checkpoint)
    assert go_on(folder, experiment).finished
    assert whole_state(folder.last_checkpoint()) == whole_state(whole[1].last_checkpoint())
    assert metrics(folder) == metrics(whole[1])


def test_the_second_signal_stops_at_once_and_loses_nothing_saved(tmp_path: Path) -> None:
    from tailguard.run import StoppedNow

    folder, experiment = RunFolder(tmp_path / "run"), tiny_experiment("regime")

    def interrupt(update: Update) -> None:
        if update.step == 2 * STEPS_PER_UPDATE:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    with pytest.raises(StoppedNow, match="SIGINT"):
        begin(folder, experiment, Listener(update=interrupt))
    assert folder.steps() == [2 * STEPS_PER_UPDATE]
    assert go_on(folder, experiment).finished


def test_a_clock_that_jumps_changes_no_bit(
    whole: tuple[str, RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, uninterrupted = whole
    days, real = [0.0], time.time

    def jumping() -> float:
        days[0] += 1.0 if days[0] < 3.0 else -5.0
        return real() + days[0] * 86_400.0

    monkeypatch.setattr(time, "time", jumping)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumping() * 1e9))
    folder = RunFolder(tmp_path / "run")
    assert begin(folder, tiny_experiment(source)).finished
    assert whole_state(folder.last_checkpoint()) == whole_state(uninterrupted.last_checkpoint())


def test_resuming_a_finished_run_changes_nothing(whole: tuple[str, RunFolder]) -> None:
    source, folder = whole
    before = whole_state(folder.last_checkpoint())
    assert go_on(folder, tiny_experiment(source)).finished
    assert whole_state(folder.last_checkpoint()) == before


def test_observation_statistics_and_vec_normalize_go_on_exactly(tmp_path: Path) -> None:
    def make_env() -> VecNormalize:
        return VecNormalize(tiny_experiment("regime").training_env(), norm_reward=False)

    def run(folder: RunFolder, cut: Listener | None) -> None:
        with folder.lock():
            agent = resumed(folder, make_env, tiny_agent, CheckpointConfig(every_updates=1))
            train(agent, folder, 4 * STEPS_PER_UPDATE, CheckpointConfig(every_updates=1), cut)

    whole, other = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "cut")
    run(whole, None)
    with pytest.raises(PowerCut):
        run(other, cut_at(2 * STEPS_PER_UPDATE))
    run(other, None)
    assert whole_state(other.last_checkpoint()) == whole_state(whole.last_checkpoint())


def test_a_run_on_own_bars_goes_on_exactly(tmp_path: Path) -> None:
    file = str(write_bars(tmp_path / "bars.csv", prices(3000)))
    whole, folder = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "cut")
    begin(whole, tiny_experiment(file))
    with pytest.raises(PowerCut):
        begin(folder, tiny_experiment(file), cut_at(3 * STEPS_PER_UPDATE))
    assert go_on(folder, tiny_experiment(file)).finished
    assert whole_state(folder.last_checkpoint()) == whole_state(whole.last_checkpoint())
    assert json.loads(folder.manifest_file.read_text())["data"]["bars"]


def test_without_restarts_a_foreign_environment_is_resumed_with_a_warning(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    experiment = tiny_experiment("cartpole", checkpoint={"reset_at_checkpoint": False})
    with pytest.raises(PowerCut):
        begin(folder, experiment, cut_at(3 * STEPS_PER_UPDATE))
    with pytest.warns(UserWarning, match="not exact"):
        assert go_on(folder, experiment).finished


def test_other_data_is_refused_and_the_checkpoints_stay(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(PowerCut):
        begin(folder, tiny_experiment("regime"), cut_at(3 * STEPS_PER_UPDATE))
    before = folder.steps()
    with pytest.raises(StateError, match="other bars"):
        go_on(folder, tiny_experiment("regime", seed=1))
    assert folder.steps() == before


def test_another_fingerprint_is_said(tmp_path: Path) -> None:
    agent = tiny_agent(cartpole(4, 0))
    agent.learn(STEPS_PER_UPDATE)
    agent.checkpoint(tmp_path / "agent")
    torch.set_num_threads(2)
    with pytest.warns(UserWarning, match="torch_threads 1 -> 2"):
        DistributionalPPO.resume(tmp_path / "agent", cartpole(4, 0), torch_threads=2)


# nothing is forgotten

NOT_STATE = {
    "env", "_vec_normalize_env", "normalizer", "wrapper",  # the environment: session
    "rollout_buffer",  # refilled by every rollout
    "start_time", "_num_timesteps_at_start", "_logger", "_custom_logger", "_last_original_obs",  # clocks and logs
    "observation_space", "action_space", "policy_kwargs", "verbose", "defaults",  # configuration
    "t",  # wall time of an episode
    "addresses",  # where gradients lie in memory, looked up before every use
    "trials", "n_threads",  # which number of threads is faster here; no bit depends on it
    "made",  # rooms in which threads compute, filled before every use; which thread had which batch is chance
}  # fmt: skip


def differences(a: Any, b: Any, path: str = "agent", seen: set[int] | None = None) -> list[str]:
    """Where two object graphs hold other values; attributes of NOT_STATE are passed over."""
    seen = set() if seen is None else seen
    if id(a) in seen or (callable(a) and not hasattr(a, "state_dict")):
        return []
    if type(a) is not type(b):
        return [f"{path}: {type(a).__name__} != {type(b).__name__}"]
    if isinstance(a, torch.Tensor):
        return [] if a.shape == b.shape and torch.equal(a, b) else [path]
    if isinstance(a, np.ndarray):
        return [] if np.array_equal(a, b) else [path]
    if isinstance(a, torch.Generator):
        return [] if torch.equal(a.get_state(), b.get_state()) else [path]
    if isinstance(a, np.random.Generator):
        return [] if a.bit_generator.state == b.bit_generator.state else [path]
    if a is None or isinstance(a, bool | int | float | str | bytes):
        return [] if a == b else [f"{path}: {a} != {b}"]
    seen.add(id(a))
    if isinstance(a, dict):
        by_name = all(isinstance(key, str | int) for key in a)  # an optimizer's state is keyed by parameters
        pairs = {key: b[key] for key in a if key in b} if by_name else dict(zip(a, b.values(), strict=False))
        items = {key: (a[key], right) for key, right in pairs.items()}
        wrong = [] if len(a) == len(b) else [f"{path}: {len(a)} entries != {len(b)}"]
    elif isinstance(a, list | tuple | deque):
        items = dict(enumerate(zip(a, b, strict=False)))
        wrong = [] if len(a) == len(b) else [f"{path}: {len(a)} entries != {len(b)}"]
    else:
        ours, theirs = getattr(a, "__dict__", {}), getattr(b, "__dict__", {})
        items = {key: (value, theirs.get(key)) for key, value in ours.items()}
        wrong = []
    for key, (left, right) in items.items():
        if key not in NOT_STATE:
            wrong += differences(left, right, f"{path}.{key}", seen)
    return wrong


def interrupted_twin(tmp_path: Path, **settings: Any) -> tuple[DistributionalPPO, DistributionalPPO]:
    make = lambda: tiny_experiment("regime").training_env()  # noqa: E731
    agent = tiny_agent(make(), **settings)
    agent.learn(3 * STEPS_PER_UPDATE)
    agent.checkpoint(tmp_path / "agent")
    twin = DistributionalPPO.resume(tmp_path / "agent", make())
    for each in (agent, twin):  # what is drawn or cached on demand is there after one more update
        each.learn(STEPS_PER_UPDATE, reset_num_timesteps=False)
    return agent, twin


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "upgd", "adaptive_upgd", "upgdw"])
def test_every_attribute_that_training_changes_comes_back(tmp_path: Path, optimizer: str) -> None:
    agent, twin = interrupted_twin(
        tmp_path,
        optimizer=optimizer,
        optimizer_kwargs={"adaptive_noise": True} if optimizer == "upgd" else {},
        vgs={"warmup_steps": 2},
        ent_coef=0.01,
        kl_penalty={"target": 0.01},
        entropy={"decay_updates": 5, "plateau_window": 2},
        risk={"mode": "episode", "cvar_limit": -0.01, "alpha": 0.5, "horizon": 5},
    )
    assert differences(agent, twin) == []


def test_state_that_no_part_saves_is_noticed(tmp_path: Path) -> None:
    agent, twin = interrupted_twin(tmp_path)
    agent.learner.gradient_scaler.forgotten = 1
    twin.learner.gradient_scaler.forgotten = 0
    agent.return_scale.mean += 1e-9
    assert differences(agent, twin) == [
        "agent.learner.gradient_scaler.forgotten: 1 != 0",
        f"agent.return_scale.mean: {agent.return_scale.mean} != {twin.return_scale.mean}",
    ]


# which checkpoint


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    begin(folder, tiny_experiment("cartpole", updates=8, checkpoint={"every_updates": 1, "keep_last": 2}))
    scores = {row["step"]: row.get("rollout/ep_rew_mean", -1.0) for row in metrics(folder)}
    best = max(scores, key=lambda step: (scores[step], step))
    assert folder.steps() == sorted({7 * STEPS_PER_UPDATE, 8 * STEPS_PER_UPDATE, best})
    assert read_manifest(folder.checkpoint(best))["score"] == scores[best]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(whole: tuple[str, RunFolder], tmp_path: Path) -> None:
    source, uninterrupted = whole
    folder, experiment = RunFolder(tmp_path / "run"), tiny_experiment(source)
    with pytest.raises(PowerCut):
        begin(folder, experiment, cut_at(4 * STEPS_PER_UPDATE))
    file = folder.last_checkpoint() / "state.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    with pytest.warns(UserWarning, match=r"step-512/state.safetensors is damaged.*one before it is used"):
        assert go_on(folder, experiment).finished
    assert whole_state(folder.last_checkpoint()) == whole_state(uninterrupted.last_checkpoint())


def test_when_no_checkpoint_can_be_read_nothing_is_trained_over(tmp_path: Path) -> None:
    folder, experiment = RunFolder(tmp_path / "run"), tiny_experiment("regime", updates=2)
    begin(folder, experiment)
    (folder.last_checkpoint() / "tree.json").unlink()
    with pytest.warns(UserWarning, match=r"tree.json"), pytest.raises(CheckpointError, match="No checkpoint of"):
        go_on(folder, experiment)


class SavesInAStep(BaseCallback):
    """Writes a checkpoint at a moment that cannot be resumed from."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def _on_step(self) -> bool:
        self.model.save(self.path / "agent")
        self.model.checkpoint(self.path / "checkpoint")
        return True


def test_a_checkpoint_in_the_middle_of_an_update_is_refused(tmp_path: Path) -> None:
    agent = tiny_agent()
    with pytest.raises(StateError, match="between two updates"):
        agent.learn(STEPS_PER_UPDATE, SavesInAStep(tmp_path))
    assert DistributionalPPO.load(tmp_path / "agent").num_timesteps == 4
    agent.checkpoint(tmp_path / "checkpoint")  # what was broken off is forgotten


def test_an_agent_from_python_goes_on_exactly_too(tmp_path: Path) -> None:
    make = lambda: tiny_experiment("regime").training_env()  # noqa: E731
    agent = tiny_agent(make())
    agent.learn(2 * STEPS_PER_UPDATE)
    agent.checkpoint(tmp_path / "agent")
    agent.learn(2 * STEPS_PER_UPDATE, reset_num_timesteps=False)
    twin = DistributionalPPO.resume(tmp_path / "agent", make())
    twin.learn(2 * STEPS_PER_UPDATE, reset_num_timesteps=False)
    states = [state_digest({name: part.state_dict() for name, part in each.parts().items()}) for each in (agent, twin)]
    assert states[0] == states[1]
