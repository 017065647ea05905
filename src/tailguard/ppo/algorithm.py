"""`DistributionalPPO`: a recurrent distributional PPO behind Stable-Baselines3's API."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import chain
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback
from stable_baselines3.common.vec_env import VecEnv

from tailguard.adversary import make_adversary
from tailguard.errors import ConfigError, InertSettingError, StateError
from tailguard.health import metrics
from tailguard.health.alerts import AlertMonitor
from tailguard.health.metrics import Meter, Metric
from tailguard.kernels import native, status
from tailguard.leftovers import remove_empty_compiler_folder
from tailguard.normalization import Affine, ObservationStatistics, ReturnScale, refuse_two_return_scales
from tailguard.policy import RecurrentPolicy
from tailguard.ppo.bundle_checks import refuse_networks_beyond_memory
from tailguard.ppo.config import PPOConfig
from tailguard.ppo.hindsight import make_hindsight
from tailguard.ppo.interruption import named_stop
from tailguard.ppo.learner import Learner, Schedules
from tailguard.ppo.native_update import why_torch_actor, why_torch_critics
from tailguard.ppo.randomness import Randomness
from tailguard.ppo.risk import make_risk
from tailguard.ppo.saving import BundledAlgorithm, EpisodeWindow, Progress
from tailguard.ppo.settings import (
    config_from,
    inert_for_space,
    policy_config_from,
)
from tailguard.ppo.threads import keep_freed_memory
from tailguard.ppo.update import UpdateStats, update
from tailguard.ppo.watch import (
    TradingSample,
    calibration_figures,
    explained_variance,
    gradient_figures,
    rollout_figures,
    state_figures,
)
from tailguard.rollout import RolloutBuffer, SequenceBatch
from tailguard.rollout.advantages import normalize_valid
from tailguard.rollout.collect import RolloutState, collect_steps
from tailguard.rollout.contract import watched_environments
from tailguard.rollout.evaluate import evaluate_rollout
from tailguard.rollout.sequences import reserve, sequences_of
from tailguard.rollout.targets import return_law_samples, rewards_to_go
from tailguard.rollout.workers import watch_workers
from tailguard.schedules import EntropyCoefficient, KLPenalty, value_at
from tailguard.stateful import Stateful

log = logging.getLogger(__name__)


class DistributionalPPO(BundledAlgorithm):
    """Recurrent PPO whose twin critics predict the law of the return.

    Takes the keyword names of sb3-contrib's RecurrentPPO and every other setting of `PPOConfig`, or a whole config:

        DistributionalPPO("MlpLstmPolicy", env, n_steps=256, critic={"n_quantiles": 51}, seed=0).learn(100_000)
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": RecurrentPolicy,
        "MlpLstmPolicy": RecurrentPolicy,
    }

    def __init__(
        self,
        policy: str | type[RecurrentPolicy],
        env: GymEnv | str | None,
        learning_rate: Any = None,
        *,
        config: PPOConfig | Mapping[str, Any] | None = None,
        policy_kwargs: Mapping[str, Any] | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "cpu",
        _init_setup_model: bool = True,
        **settings: Any,
    ) -> None:
        if learning_rate is not None:
            settings["learning_rate"] = learning_rate
        self.config = config_from(config, settings)
        self.policy_name = policy if isinstance(policy, str) else "MlpLstmPolicy"
        self.policy_config = policy_config_from(self.policy_name, policy_kwargs, self.config.risk.mode != "none")
        super().__init__(
            policy,  # type: ignore[arg-type]
            env,  # type: ignore[arg-type]
            learning_rate=self.config.learning_rate,
            n_steps=self.config.n_steps,
            gamma=self.config.gamma,
            gae_lambda=self.config.gae_lambda,
            ent_coef=self.config.ent_coef,
            vf_coef=self.config.vf_coef,
            max_grad_norm=self.config.max_grad_norm,
            use_sde=False,
            sde_sample_freq=-1,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=dict(policy_kwargs or {}),
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=False,
        )
        if _init_setup_model:
            self._setup_model()

    def _setup_model(self) -> None:
        if self.config.torch_threads is not None:
            torch.set_num_threads(self.config.torch_threads)
        keep_freed_memory()
        inert = [*chain.from_iterable(inert_for_space(self.policy_config, self.config, self.action_space))]
        if inert:
            raise InertSettingError(inert)
        refuse_two_return_scales(self._vec_normalize_env, self.config.return_scale)
        watch_workers(self.env, self.config.env_timeout)
        self.randomness = Randomness(self.seed)
        self.set_random_seed(self.randomness.root)
        refuse_networks_beyond_memory(self.build_policy, self)
        self.policy = self.build_policy().to(self.device)
        self.adversary = make_adversary(self.config.adversary, self.policy.obs_features, self.randomness.adversary)
        self.learner = Learner(self.policy, self.config, self.randomness.noise, self.adversary)
        remove_empty_compiler_folder()
        self.policy.optimizer = self.learner.optimizer  # where SB3's users look for it
        self.return_scale = ReturnScale(self.config.return_scale)
        self.risk = make_risk(self.config.risk, self.config.critic, self.config.return_scale.horizon)
        self.hindsight = make_hindsight(self.config.hindsight)
        self.obs_stats = ObservationStatistics(self._vec_normalize_env)
        self.entropy = EntropyCoefficient(self.config.ent_coef, self.config.entropy)
        self.kl_penalty = KLPenalty(self.config.kl_penalty)
        self.alerts = AlertMonitor()
        self.meter = Meter()
        self.trading = TradingSample()
        self.n_reserve_all_masked = 0
        self.live: RolloutState | None = None
        self.in_update = False  # from the first step of a rollout to the end of the training on it
        self.size_rollouts()

    # collecting

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        if self.env is None:
            raise ConfigError(
                "This agent has no environment to learn in. Give it one with set_env(env) or load(path, env=env)."
            )
        resets = reset_num_timesteps or self._last_obs is None
        silent = not self._custom_logger and self.verbose < 1 and self.tensorboard_log is None
        if silent:  # SB3's own logger would write nothing either, into a new temporary folder
            self._logger = Logger(None, [])
        self._custom_logger |= silent
        with (
            watched_environments(self.env),
            self.obs_stats.frozen(),
        ):  # the first observations must not move the statistics either
            prepared = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)
        self._custom_logger &= not silent
        if resets or self.live is None:
            self.start_live()
        log.log(logging.INFO if native() is not None else logging.WARNING, "Updates run on %s", self.update_runs_on)
        n_updates = self._total_timesteps // (self.config.n_steps * self.n_envs)
        self.adversary.begin(n_updates, reset_num_timesteps, self.env)
        return prepared

    def learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "DistributionalPPO",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Self:
        """Train for at least `total_timesteps` environment steps; arguments as in SB3."""
        with named_stop(self):
            return super().learn(
                total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar
            )

    def collect_rollouts(  # type: ignore[override]
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        """Fill the buffer, let the critics evaluate it, estimate advantages, then move the observation statistics."""
        self.policy.set_training_mode(False)
        callback.on_rollout_start()
        self.policy.refuse_what_nobody_calls()
        self.size_rollouts()  # a callback may have set n_steps
        self.in_update, rollout_buffer = True, self.rollout_buffer
        live = self.live_now()  # a checkpoint in the callback may have started fresh episodes

        def after_each_step(seen: dict[str, Any]) -> bool:
            self.num_timesteps += env.num_envs
            self._last_obs, self._last_episode_starts = seen["new_obs"], seen["dones"]
            callback.update_locals({"self": self, "env": env, "rollout_buffer": rollout_buffer, **seen})
            if not callback.on_step():
                return False
            self.hindsight.record(env)
            self.trading.note(seen["n_steps"], seen["rewards"], seen["infos"])
            ended = seen["dones"].nonzero()[0]
            if len(ended):
                self._update_info_buffer([seen["infos"][n] for n in ended], seen["dones"][ended])
            return True

        with self.obs_stats.frozen():
            raw = collect_steps(
                env, self.policy, rollout_buffer, live, self.obs_stats, self.randomness.actions, after_each_step
            )
        if raw is None:
            return False
        to_go = rewards_to_go(rollout_buffer.rewards, rollout_buffer.dones, self.config.gamma)
        self.return_scale.calibrate(to_go[rollout_buffer.valid])
        evaluate_rollout(self.policy, rollout_buffer, live, self.return_scale.snapshot, self.learner.n_threads)
        self.estimate_advantages()
        self.risk.judge(self.policy, rollout_buffer, live)
        self.follow_observations(raw)
        callback.on_rollout_end()
        return True

    def live_now(self) -> RolloutState:
        """Where acting stands; learn() has prepared it."""
        if self.live is None:
            raise StateError("There is nothing to go on from: rollouts are collected inside learn().")
        return self.live

    def follow_observations(self, raw: list[NDArray[Any]]) -> None:
        """Between rollouts: move the observation statistics and see the waiting observations through them."""
        if not raw or self.live is None:
            return
        mean_drift, std_drift = self.obs_stats.update(np.stack(raw))
        self.live.observations = self._last_obs = np.asarray(self.obs_stats.normalize(raw[-1]))
        self.meter.add({metrics.MEAN_DRIFT: mean_drift, metrics.STD_DRIFT: std_drift})

    # learning

    @property
    def update_runs_on(self) -> str:
        """What computes the gradients of an update: the native core, torch and why, or each of them a part."""
        reasons = {"actor": why_torch_actor(self.learner), "critics": why_torch_critics(self.learner)}
        left = {part: reason for part, reason in reasons.items() if reason is not None}
        if len(left) == 2:
            return f"torch ({left['actor']})"
        return status() + "".join(f"; the {part} on torch ({reason})" for part, reason in left.items())

    def train(self) -> None:
        """One update on the rollout just collected (docs/algorithm.md, Algorithm 1)."""
        self.policy.set_training_mode(True)
        self.follow_settings()
        schedules = self.schedules()
        self.adversary.face(self.observation_space, self.obs_stats)
        self.move_return_scale()
        sequences = self.sequences()
        training, reserved = reserve(sequences.n_sequences, self.config.ev_reserve, self.randomness.batches)
        stats = update(self.learner, sequences, training, schedules, self.randomness.batches)
        self._n_updates += stats.n_epochs
        self.finish_update(stats, sequences.select(reserved), schedules)
        self.in_update = False

    def schedules(self) -> Schedules:
        """Every scheduled value, read once."""
        progress = 1.0 - self._current_progress_remaining
        return Schedules(
            learning_rate=value_at(self.config.learning_rate, progress),
            clip_range=value_at(self.config.clip_range, progress),
            ent_coef=self.entropy.value,
            kl_beta=self.kl_penalty.beta,
            vf_coef=self.config.vf_coef,
            max_grad_norm=self.config.max_grad_norm,
            target_kl=self.config.target_kl,
        )

    def move_return_scale(self) -> None:
        """Merge this rollout's returns and rescale every critic, so that no decoded value moves; then it is fixed."""
        first = self.return_scale.count == 0
        before, after = self.return_scale.update(self.rollout_buffer.returns[self.rollout_buffer.valid])
        if before != after:
            self.learner.follow_rescale(self.policy.rescale_critics(before, after, first))
        self.learner.follow_rescale(self.risk.follow_scale(self.policy, self.rollout_buffer))

    def sequences(self) -> SequenceBatch:
        """The rollout as whole sequences, with normalized advantages and samples of the return as critic targets."""
        buffer, config = self.rollout_buffer, self.config
        target = return_law_samples(
            buffer.rewards,
            buffer.law,
            buffer.terminal_law,
            buffer.dones,
            config.gamma,
            config.gae_lambda,
            config.critic.levels,
            self.randomness.targets,
            buffer.valid,
        )
        advantages, figures = self.hindsight.apply(buffer, self.risk.advantages(buffer, target))
        self.meter.add(figures)
        if config.normalize_advantage:
            advantages = normalize_valid(advantages, buffer.valid)
        scale, clips = self.return_scale.snapshot, config.critic.value_clip is not None
        return sequences_of(buffer, advantages, target, scale, self.risk.value_targets(buffer), clips)

    def finish_update(self, stats: UpdateStats, reserved: SequenceBatch, now: Schedules) -> None:
        """Measure on the reserve, move the controllers, log everything once, check the alerts."""
        progress, scale, live = 1.0 - self._current_progress_remaining, self.return_scale.snapshot, self.live
        self.policy.clamp_log_std(progress)
        self.meter.add(stats.means())
        ev = explained_variance(self.policy, reserved, scale)
        if ev is not None:
            self.meter.add({metrics.EXPLAINED_VARIANCE: ev})
        elif reserved.n_sequences and int(reserved.valid.sum()) < 2:
            self.n_reserve_all_masked += 1
            self.meter.add({metrics.RESERVE_ALL_MASKED: float(self.n_reserve_all_masked)})
        entropy, kl = self.meter.mean(metrics.ENTROPY), self.meter.mean(metrics.KL)
        if entropy is not None and self.policy.action_head.largest_entropy is not None:
            self.meter.add({metrics.ENTROPY_SHARE: entropy / self.policy.action_head.largest_entropy})
        if entropy is not None and kl is not None:
            self.entropy.update(entropy, ev)
            self.kl_penalty.update(kl)
        self.meter.add(self.risk.update(progress))
        self.meter.add(self.adversary.update())
        self.meter.add(
            {
                metrics.LEARNING_RATE: now.learning_rate,
                metrics.CLIP_RANGE: now.clip_range,
                metrics.ENTROPY_COEFFICIENT: now.ent_coef,
                metrics.RETURN_MEAN: scale.mean,
                metrics.RETURN_STD: scale.std,
                metrics.N_UPDATES: float(self._n_updates),
                **self.rollout_figures(scale),
                **self.trading.figures(),
            }
        )
        if self.config.kl_penalty.target is not None:
            self.meter.add({metrics.KL_BETA: now.kl_beta})
        further = {**self.learner.figures(), **(state_figures(live) if live is not None else {})}
        further |= gradient_figures(self.learner.vector, self.meter.mean(metrics.GRAD_NORM))
        logged = self.meter.flush(self.logger)
        for name, value in further.items():
            self.logger.record(name, value)
        self.alerts.check(logged | further, self.logger)

    def rollout_figures(self, scale: Affine) -> Mapping[Metric, float]:
        """What the rollout says about policy and critics."""
        buffer = self.rollout_buffer
        return {**rollout_figures(self.policy, buffer, scale), **calibration_figures(buffer, self.config, scale)}

    # reading

    def predict_quantiles(
        self, observation: Any, state: Any = None, episode_start: Any = None
    ) -> NDArray[np.floating[Any]]:
        """Quantiles (n, Q) of the return from here on, in raw reward units, sorted.

        `state` is the memory before the observation: what the last `predict` returned, or None at an episode's start.
        """
        law = self.policy.predict_law(observation, state, episode_start).numpy(force=True)
        scale = self.return_scale.snapshot
        return np.sort(scale.mean + scale.std * law.astype(np.float64), -1)

    # saving (ppo/saving.py)

    def parts(self) -> dict[str, Stateful]:
        """All that makes this agent itself: save, load, resume and exploit walk this dict."""
        self.renew_learner()
        return {
            "policy": self.policy,
            "optimizer": self.learner.optimizer,
            "gradient_scaler": self.learner.gradient_scaler,
            "skipped_steps": self.learner.skipped,
            "return_scale": self.return_scale,
            "risk": self.risk,
            "obs_stats": self.obs_stats,
            "entropy": self.entropy,
            "kl_penalty": self.kl_penalty,
            "alerts": self.alerts,
            "randomness": self.randomness,
            "progress": Progress(self),
            "episodes": EpisodeWindow(self),
            **self.adversary.parts(),
        }
