"""The demo: train on an embedded market, print the learning curve and the fraction of the optimum, write the report."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from stable_baselines3.common.callbacks import BaseCallback

from tailguard.cli.evaluate import summary
from tailguard.examination import examine, report_file
from tailguard.experiment import Experiment, experiment_config
from tailguard.presets import Preset
from tailguard.presets import preset as find_preset
from tailguard.run import RunFolder, train

BPS = 1e4


class LearningCurve(BaseCallback):
    """Reward per bar of every rollout, a line per tenth of the training, and a progress bar."""

    def __init__(self, preset: Preset, console: Console) -> None:
        super().__init__()
        self.preset, self.console = preset, console
        self.steps: list[int] = []
        self.reward_bps: list[float] = []
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )

    def _on_training_start(self) -> None:
        self.task = self.bar.add_task("steps", total=self.preset.total_timesteps)
        self.bar.start()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.steps.append(self.num_timesteps)
        self.reward_bps.append(float(self.model.rollout_buffer.rewards.mean()) * BPS)  # type: ignore[attr-defined]
        self.bar.update(self.task, completed=min(self.num_timesteps, self.preset.total_timesteps))
        n_rollouts = -(-self.preset.total_timesteps // (self.preset.n_envs * self.preset.config.n_steps))
        if len(self.steps) % max(n_rollouts // 10, 1) == 0:
            self.console.print(
                f"{self.num_timesteps:>9,} steps   {self.reward_bps[-1]:7.2f} bps per bar while exploring"
            )

    def _on_training_end(self) -> None:
        self.bar.stop()


def run_demo(name: str, seed: int, steps: int | None, out: Path) -> None:
    """Train, score out of sample, print, draw."""
    console = Console(highlight=False)
    preset = find_preset(name)
    if steps is not None:
        preset = replace(preset, total_timesteps=steps)
    best = preset.market.optimum.reward_per_step * BPS
    console.print(
        f"market {name}: the best policy earns {best:.2f} bps per bar after costs of {preset.market.cost_bps:g} bps"
    )
    experiment = Experiment(experiment_config({"preset": name, "seed": seed, "steps": preset.total_timesteps}))
    folder, env = RunFolder(out), experiment.training_env()
    began, curve = time.perf_counter(), LearningCurve(preset, console)
    with folder.lock():
        forget(out)
        agent = experiment.agent(env)
        folder.create(experiment.config.to_yaml(), experiment.manifest(env, sys.argv))
        train(agent, folder, preset.total_timesteps, experiment.config.checkpoint, callback=curve)
    seconds = time.perf_counter() - began
    result = preset.score(agent, seed)
    console.print(
        f"trained {agent.num_timesteps:,} steps in {seconds:.0f} s ({agent.num_timesteps / seconds:,.0f} per second)"
    )
    earned = f"{result.reward_per_step * BPS:.2f} bps per bar (standard error {result.stderr * BPS:.2f})"
    console.print(f"out of sample, {result.n_steps:,} bars: {earned}")
    if np.isfinite(result.fraction):
        console.print(f"fraction of the optimum: {result.fraction:.1%} (standard error {result.fraction_stderr:.1%})")
    draw(curve, best, result.reward_per_step * BPS, out / "learning_curve.svg")
    console.print(f"agent in {folder.last_checkpoint()}", soft_wrap=True)
    for line in summary(examine(folder)):
        console.print(line, soft_wrap=True)
    console.print(f"report in {report_file(folder)}", soft_wrap=True)


def forget(out: Path) -> None:
    """Remove what an earlier demo wrote there, and nothing else; the ledger of trials stays."""
    for name in ("config.yaml", "manifest.json", "metrics.jsonl", "alerts.jsonl", "learning_curve.svg", "report.html"):
        (out / name).unlink(missing_ok=True)
    for name in ("checkpoints", "tensorboard", "evaluation"):
        shutil.rmtree(out / name, ignore_errors=True)


def draw(curve: LearningCurve, best: float, final: float, path: Path) -> None:
    """Reward while learning, beside the optimum and the final deterministic policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.array(curve.steps) / 1e3, curve.reward_bps, color="#3b6ea8", label="while exploring")
    axes.axhline(best, color="#2a7f4f", linestyle="--", label="best possible")
    axes.plot(curve.steps[-1] / 1e3, final, "o", color="#c0392b", label="trained agent, out of sample")
    axes.set_xlabel("thousand steps")
    axes.set_ylabel("bps per bar, net of costs")
    axes.set_title(f"{curve.preset.name} market")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.25)
    figure.savefig(path)
