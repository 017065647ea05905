"""Training inside a run folder: records, checkpoints, signals, and going on after any stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv

from tailguard.errors import EnvWorkerError
from tailguard.health.alerts import Alert
from tailguard.ppo import DistributionalPPO
from tailguard.run.checkpoints import SettingsFor, newest_good, prune, tidy, unchanged
from tailguard.run.folder import RunFolder
from tailguard.run.records import Records
from tailguard.run.settings import CheckpointConfig
from tailguard.run.signals import StopRequests


@dataclass(frozen=True)
class Update:
    """What is told after every update."""

    step: int
    total_steps: int
    row: Mapping[str, Any]
    """The line of metrics.jsonl."""
    alerts: list[Alert]
    """Alerts that began with it."""
    checkpoint: Path | None
    """The bundle written after it, if one was due."""
    since: Mapping[str, int] = field(default_factory=dict)
    """The update since which each of these alerts holds, by name."""


@dataclass(frozen=True)
class Outcome:
    """Where training stands when `train` returns."""

    step: int
    finished: bool
    checkpoint: Path
    """The last bundle."""
    stopped_by: int | None = None
    """The signal that asked for a stop, if one did."""


@dataclass
class Listener:
    """Who is told: of updates, and of what a user should read. The default hears nothing."""

    update: Callable[[Update], None] = field(default=lambda update: None)
    notice: Callable[[str], None] = field(default=lambda text: None)


class StopRequested(Exception):  # noqa: N818 (not an error: the way out of SB3's loop between two updates)
    """A signal asked for a stop, and the checkpoint is written."""


def train(
    agent: DistributionalPPO,
    folder: RunFolder,
    total_steps: int,
    settings: CheckpointConfig | None = None,
    listener: Listener | None = None,
    callback: BaseCallback | None = None,
) -> Outcome:
    """Train up to `total_steps` environment steps in all, a fresh agent or one from `resumed`; hold the lock.

    There is a checkpoint every so many updates, at the end, and when SIGINT, SIGTERM or SIGHUP ask for a stop.
    """
    settings, listener = settings or CheckpointConfig(), listener or Listener()
    start = agent.num_timesteps
    if start >= total_steps:
        return Outcome(start, True, folder.last_checkpoint())
    agent.set_logger(Logger(None, []))
    records = Records(folder, start)
    with StopRequests(listener.notice) as stop:
        keeper = Keeper(folder, total_steps, settings, listener, records, stop)
        callbacks = CallbackList([callback, keeper]) if callback is not None else keeper
        try:
            agent.learn(total_steps - start, callbacks, reset_num_timesteps=start == 0)
        except StopRequested:
            pass
        except EnvWorkerError:
            if not stop.requested:  # Ctrl-C reaches an environment's worker processes too, and they end at once
                raise
        finally:
            records.close()
    step = folder.steps()[-1] if folder.steps() else 0
    return Outcome(step, step >= total_steps, folder.checkpoint(step), stop.signum)


def resumed(
    folder: RunFolder,
    make_env: Callable[[], VecEnv],
    make_agent: Callable[[VecEnv], DistributionalPPO],
    settings: CheckpointConfig,
    settings_for: SettingsFor = unchanged,
) -> DistributionalPPO:
    """The agent where the run stopped, or a fresh one when it has no checkpoint yet; hold the lock.

    settings_for: from the checkpoint to settings of the learner that have changed since, such as {"gamma": 0.95}
    """
    tidy(folder)
    return newest_good(folder, make_env, settings.reset_at_checkpoint, settings_for) or make_agent(make_env())


class Keeper(BaseCallback):
    """Between two updates: write the row, tell it, write a checkpoint when one is due, stop when asked."""

    model: DistributionalPPO

    def __init__(
        self,
        folder: RunFolder,
        total_steps: int,
        settings: CheckpointConfig,
        listener: Listener,
        records: Records,
        stop: StopRequests,
    ) -> None:
        super().__init__()
        self.folder, self.total_steps, self.settings = folder, total_steps, settings
        self.listener, self.records, self.stop = listener, records, stop
        self.updated = False
        self.clock = time.monotonic()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.updated = True  # SB3 trains on every rollout that was collected to its end

    def _on_rollout_start(self) -> None:
        self.between_updates()

    def _on_training_end(self) -> None:
        self.between_updates()

    def between_updates(self) -> None:
        if not self.updated:
            return
        self.updated = False
        agent, step, stopping = self.model, self.model.num_timesteps, self.stop.requested
        row, alerts = self.row(), agent.alerts.begun()
        since = {alert.name: agent.alerts.since[alert.name] for alert in alerts}
        self.records.add(
            row,
            [{"step": step, **alert.described(row.get(alert.metric.name), since[alert.name])} for alert in alerts],
        )
        scheduled = row["update"] % self.settings.every_updates == 0
        place = None
        if scheduled or stopping or step >= self.total_steps:
            place = self.save(scheduled or step >= self.total_steps, row)
        self.listener.update(Update(step, self.total_steps, row, alerts, place, since))
        if stopping and step < self.total_steps:
            raise StopRequested

    def row(self) -> dict[str, Any]:
        """The figures of the update just made."""
        agent = self.model
        now, before = time.monotonic(), self.clock
        self.clock = now
        per_update = agent.n_envs * agent.config.n_steps
        figures = figures_of(agent)
        figures["time/fps"] = per_update / max(now - before, 1e-9)
        update = agent.num_timesteps // per_update
        return {"step": agent.num_timesteps, "update": update, "time": time.time(), **dict(sorted(figures.items()))}

    def save(self, scheduled: bool, row: Mapping[str, Any]) -> Path:
        """Records first, then the bundle, then what need no longer stay."""
        place = self.folder.checkpoint(self.model.num_timesteps)
        self.records.sync()
        self.model.checkpoint(
            place,
            {"score": row.get("rollout/ep_rew_mean")},
            scheduled=scheduled and self.settings.reset_at_checkpoint,
        )
        prune(self.folder, self.settings.keep_last)
        return place


def figures_of(agent: DistributionalPPO) -> dict[str, float]:
    """What the last update recorded, and what the episodes around it earned."""
    figures = {name: value for name, value in agent.logger.name_to_value.items() if isinstance(value, int | float)}
    episodes = list(agent.ep_info_buffer or ())
    if episodes:
        figures["rollout/ep_rew_mean"] = sum(float(episode["r"]) for episode in episodes) / len(episodes)
        figures["rollout/ep_len_mean"] = sum(int(episode["l"]) for episode in episodes) / len(episodes)
    figures["rollout/reward_mean"] = float(agent.rollout_buffer.rewards.mean())
    return figures
