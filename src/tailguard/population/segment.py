"""A segment: the agent in one bundle, trained for some updates, scored, and written as another bundle.

It is a pure function of files. Done again, by whomever and wherever, it gives the same bits, and the first copy to
arrive under its name stays.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from math import isfinite, nan
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from tailguard.checkpoint import read_bundle, sync_directory, write_synced
from tailguard.errors import (
    CheckpointError,
    DamagedCheckpointError,
    NonFiniteError,
    StateError,
    TrainingDivergedError,
)
from tailguard.experiment import Experiment, Task
from tailguard.files import LARGEST_TEXT, Fields, read_regular
from tailguard.population.config import PopulationConfig, saved_population
from tailguard.population.exploit import exploit
from tailguard.population.scheduler import Report, RunSegment
from tailguard.population.space import with_values
from tailguard.population.tasks import Beat
from tailguard.population.watch import Vitals
from tailguard.ppo import DistributionalPPO
from tailguard.run import figures_of
from tailguard.yaml_files import parse_yaml

log = logging.getLogger(__name__)

AGENT, ABOUT = "agent", "segment.json"


def bundle_name(member: int, finished_round: int) -> str:
    """Where a segment writes, relative to the folder of bundles."""
    return f"member-{member:02d}/round-{finished_round:04d}"


def segment_path(folder: Path, name: str) -> Path:
    """The directory of a finished segment: the agent's bundle, and what it was made from."""
    return folder / "bundles" / name


def bundle_path(folder: Path, name: str) -> Path:
    return segment_path(folder, name) / AGENT


def perform_segment(payload: Mapping[str, Any], beat: Beat) -> Mapping[str, Any]:
    """A segment as a task: plain values in, plain values out."""
    folder, segment = Path(payload["folder"]), RunSegment(**payload["segment"])
    report = run_segment(folder, segment, beat)
    score = report.score if isfinite(report.score) else None
    return {
        "score": score,
        "bundle": report.bundle,
        "figures": dict(report.figures),
        "alerts": dict(report.alerts),
        "told": told_of(folder, report.bundle) if report.bundle is not None else {},
    }


def run_segment(folder: Path, segment: RunSegment, beat: Beat = lambda: None) -> Report:
    """Train one segment of a member of the population in `folder`, unless it has been done already."""
    done = finished(folder, segment)
    if done is not None:
        return done
    log.info("Member %d, round %d, with %s", segment.member, segment.round, dict(segment.hyperparameters))
    plan = plan_of((folder / "config.yaml").read_text(encoding="utf-8"))
    try:
        return work(folder, segment, plan, beat)
    except (TrainingDivergedError, NonFiniteError):
        return Report(segment.member, segment.round, nan, None)  # the worst score there is, and no step forward


@dataclass(frozen=True)
class Plan:
    """A configuration and its environments, kept from one segment of a process to the next: data is read once.

    What an environment did before does not matter: every segment seeds and resets it, or loads its state.
    """

    config: PopulationConfig
    task: Task

    @cached_property
    def training_env(self) -> VecEnv:
        """The same market for all members and rounds."""
        experiment = self.config.experiment
        return self.task.env(experiment.n_envs, experiment.seed)

    @cached_property
    def validation_env(self) -> VecEnv:
        """Where nobody trains; the same for all members and rounds."""
        experiment = self.config.experiment
        return self.task.validation_env(experiment.n_envs, experiment.seed)


@lru_cache(maxsize=1)
def plan_of(config_yaml: str) -> Plan:
    config = saved_population(parse_yaml(config_yaml, "config.yaml"), "config.yaml")
    return Plan(config, Experiment(config.experiment).task)


def work(folder: Path, segment: RunSegment, plan: Plan, beat: Beat) -> Report:
    """Train, write the bundle, score; all of it appears under its name at once."""
    config = plan.config
    ppo = with_values(config.experiment.ppo, segment.hyperparameters)
    # members share the machine, so each keeps to one core unless told otherwise; results do not depend on it
    experiment = config.experiment.replace(ppo=ppo.replace(update_threads=ppo.update_threads or 1))
    place = segment_path(folder, bundle_name(segment.member, segment.round))
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(mkdtemp(prefix=".segment-", dir=place.parent))
    clock = [time.process_time()]
    try:
        agent = begin(folder, segment, plan, Experiment(experiment.replace(seed=segment.seed)))
        clock.append(time.process_time())
        pace = train(agent, segment, config, beat)
        clock.append(time.process_time())
        try:
            agent.checkpoint(aside / AGENT)
        except StateError as error:  # its last update left numbers that are not finite
            raise TrainingDivergedError(str(error)) from None
        score = validate(agent, plan, beat) if config.population.score == "validation" else pace.mean_return
        clock.append(time.process_time())
        about = {
            "inputs": inputs_of(segment),
            "score": score,
            "figures": {**pace.vitals.last(), **pace.vitals.since_copy(figures_of_source(folder, segment))},
            "alerts": pace.vitals.alerts,
            "told": told(agent, clock),
        }
        write_synced(aside / ABOUT, json.dumps(about).encode())
        return move_in(aside, place, folder, segment, report_of(segment, about))
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def begin(folder: Path, segment: RunSegment, plan: Plan, experiment: Experiment) -> DistributionalPPO:
    """The agent at the start of the segment: fresh, exactly where it stopped, or a copy of another member."""
    env = plan.training_env
    if segment.bundle is None:
        return experiment.agent(env)
    bundle = bundle_path(folder, segment.bundle)
    if segment.source is None:
        return DistributionalPPO.resume(bundle, env)
    agent = experiment.agent(env)
    exploit(agent, bundle, segment.hyperparameters, plan.config.population.optimizer_exploit_strategy)
    return agent


def train(agent: DistributionalPPO, segment: RunSegment, config: PopulationConfig, beat: Beat) -> Pace:
    """Take the segment's updates; returns what was seen on the way."""
    pace = Pace(segment.updates, beat)
    whole = max(config.total_steps, agent.num_timesteps + segment.updates * config.rollout_steps)
    with suppress(SegmentOver):
        agent.learn(whole - agent.num_timesteps, pace, reset_num_timesteps=False)
    return pace


class SegmentOver(Exception):  # noqa: N818 (not an error: the way out of SB3's loop between two updates)
    """The updates of the segment are done."""


class Pace(BaseCallback):
    """Stops after some updates, between two of them, gives signs of life, and keeps what the updates say."""

    model: DistributionalPPO

    def __init__(self, updates: int, beat: Beat) -> None:
        super().__init__()
        self.updates, self.beat = updates, beat
        self.done, self.total_reward, self.n_ends = 0, 0.0, 0
        self.vitals = Vitals()

    @property
    def mean_return(self) -> float:
        """Per episode, while exploring; episodes under way count as they are."""
        return self.total_reward / (self.n_ends + self.model.n_envs)

    def _on_rollout_start(self) -> None:
        self.beat()
        self.take_vitals()
        if self.done >= self.updates:
            raise SegmentOver

    def _on_training_end(self) -> None:
        self.take_vitals()

    def take_vitals(self) -> None:
        """After every update of this segment, once."""
        if self.done > self.vitals.n_updates:
            self.vitals.add(self.model.logger.name_to_value, self.model.alerts.begun())

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.beat()
        self.done += 1
        self.total_reward += float(self.model.rollout_buffer.rewards.sum(dtype=np.float64))
        self.n_ends += int(self.model.rollout_buffer.dones.sum())


def told(agent: DistributionalPPO, clock: Sequence[float]) -> dict[str, Any]:
    """What readers of the journal want to know of a segment; nothing of it decides anything.

    clock: processor seconds before beginning, before training, after training, at the end
    """
    return {
        "step": agent.num_timesteps,
        "cpu_seconds": round(clock[3] - clock[0], 3),
        "train_cpu_seconds": round(clock[2] - clock[1], 3),
        "metrics": {name: value if isfinite(value) else None for name, value in sorted(figures_of(agent).items())},
    }


def told_of(folder: Path, name: str) -> Mapping[str, Any]:
    """What a finished segment has to tell; a segment of an earlier version has nothing."""
    return dict(about_of(segment_path(folder, name)).get("told", {}))


def about_of(place: Path) -> dict[str, Any]:
    """The record of a finished segment; scores may be NaN."""
    try:
        about = json.loads(read_regular(place / ABOUT, LARGEST_TEXT, CheckpointError))
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise DamagedCheckpointError(f"{place / ABOUT} is not valid JSON: {error}.") from None
    if not isinstance(about, dict):
        raise DamagedCheckpointError(f"{place / ABOUT} holds {str(about)[:60]!r}; expected an object.")
    return about


def recorded_score(folder: Path, name: str) -> float | None:
    """What a segment wrote down as its score; None where it is not there any more, or cannot be read."""
    try:
        score = about_of(segment_path(folder, name))["score"]
    except (CheckpointError, KeyError):
        return None
    return float(score) if isinstance(score, int | float) and isfinite(score) else None


@torch.inference_mode()
def validate(agent: DistributionalPPO, plan: Plan, beat: Beat) -> float:
    """Mean return per episode of the deterministic policy where no member trains; all members meet the same.

    Episodes under way at the end count as they are, so the score exists also when none has ended. Only the actor is
    asked: `predict` would run the critics' memories too.
    """
    env, policy = plan.validation_env, agent.policy
    env.seed(plan.config.experiment.seed)
    observations, starts = env.reset(), np.ones(env.num_envs, np.bool_)
    state, head = policy.initial_state(env.num_envs), policy.action_head
    total, n_episodes = 0.0, 0
    for number in range(plan.config.population.score_steps):
        n_episodes += int(starts.sum())
        if starts.any():
            state = state.keep(torch.from_numpy(~starts).float().to(policy.device))
        with torch.no_grad():
            distribution, state = policy.action_step(
                policy.flat(agent.obs_stats.normalize(np.asarray(observations))), state
            )
        observations, rewards, starts, _ = env.step(head.to_env(head.mode(distribution).numpy(force=True)))
        total += float(np.sum(rewards, dtype=np.float64))
        if number % 256 == 0:
            beat()
    return total / n_episodes


def figures_of_source(folder: Path, segment: RunSegment) -> Mapping[str, float]:
    """The last figures of the agent that a copy began as; nothing for who is no copy."""
    if segment.source is None or segment.bundle is None:
        return {}
    about = about_of(segment_path(folder, segment.bundle))
    return dict(about.get("figures", {}))


def report_of(segment: RunSegment, about: Mapping[str, Any]) -> Report:
    """What is told of a finished segment; earlier versions kept no figures."""
    name = bundle_name(segment.member, segment.round)
    fields = Fields({"figures": {}, "alerts": {}, **about}, name, DamagedCheckpointError)
    return Report(
        segment.member,
        segment.round,
        fields.number("score"),
        name,
        fields.numbers("figures"),
        fields.numbers("alerts"),
    )


def finished(folder: Path, segment: RunSegment) -> Report | None:
    """The report of a segment that has been done, when all of it is there and from the very same inputs."""
    place = segment_path(folder, bundle_name(segment.member, segment.round))
    try:
        about = about_of(place) if (place / ABOUT).is_file() else {}
        if about["inputs"] != inputs_of(segment) or not (place / AGENT).is_dir():
            return None
        read_bundle(place / AGENT)
        return report_of(segment, about)
    except DamagedCheckpointError:
        return None  # it is made again
    except CheckpointError:
        raise  # whole, and of a later version: not to be written over
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there


def inputs_of(segment: RunSegment) -> dict[str, Any]:
    """What determines the bits of a segment; which attempt it is does not."""
    return {name: value for name, value in asdict(segment).items() if name != "attempt"}


def move_in(aside: Path, place: Path, folder: Path, segment: RunSegment, report: Report) -> Report:
    """Rename a finished segment to its place; one that is there already stays. Returns the report of what is there."""
    sync_directory(aside)
    try:
        os.rename(aside, place)
    except OSError:
        earlier = finished(folder, segment)
        if earlier is not None:
            return earlier
        shutil.rmtree(place, ignore_errors=True)  # what is there is damaged or of other inputs
        os.rename(aside, place)
    sync_directory(place.parent)
    return report
