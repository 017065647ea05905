"""Environment steps per second, ours against sb3-contrib's RecurrentPPO, on the same work.

`python -m benchmarks.peers` runs the grid hidden 64/256 x environments 8/64 x n_steps 128/2048. Every measurement is a
process of its own and the two learners take turns, so that a busy spell of the machine hits both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from importlib.metadata import version
from itertools import product
from statistics import geometric_mean, median
from typing import Any

from benchmarks.results import markdown_table, write_section

N_EPOCHS = 4
BATCH_SIZE = 1024
NET_ARCH = {"pi": [64, 64], "vf": [64, 64]}
LONG_ROLLOUT = 16_384  # samples from which one of the peer's epochs is timed and counted N_EPOCHS times
LEARNERS = ("ours", "peer")
PHASES = ("environment", "acting", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Case:
    """One cell of the grid."""

    hidden: int
    n_envs: int
    n_steps: int

    @property
    def rollout(self) -> int:
        return self.n_envs * self.n_steps


# measuring, in a process of its own


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Clock:
    """Seconds spent inside wrapped functions."""

    def __init__(self, kind: str) -> None:
        self.now = CLOCKS[kind]
        self.seconds: dict[str, float] = {}

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        began = self.now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - began

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Time every call of `owner.attribute`; the library itself carries no timing code."""
        original: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.running(name):
                return original(*args, **kwargs)

        setattr(owner, attribute, timed)


def make_ours(case: Case, threads: int) -> Any:
    """Our learner with its twin quantile critics on; everything that is not named here is the default."""
    from tailguard import DistributionalPPO
    from tests.environments import cartpole

    return DistributionalPPO(
        "MlpLstmPolicy",
        cartpole(case.n_envs, seed=0),
        n_steps=case.n_steps,
        batch_size=min(BATCH_SIZE, case.rollout),
        n_epochs=N_EPOCHS,
        critic={"n_quantiles": 32, "twin": True},
        policy_kwargs={"lstm_hidden_size": case.hidden, "net_arch": NET_ARCH},
        update_threads=threads,
        seed=0,
    )


def make_peer(case: Case, threads: int) -> Any:
    """RecurrentPPO with its defaults otherwise: one actor, one scalar critic, each with an LSTM."""
    import torch
    from sb3_contrib import RecurrentPPO

    from tests.environments import cartpole

    torch.set_num_threads(threads)
    return RecurrentPPO(
        "MlpLstmPolicy",
        cartpole(case.n_envs, seed=0),
        n_steps=case.n_steps,
        batch_size=min(BATCH_SIZE, case.rollout),
        n_epochs=1 if case.rollout >= LONG_ROLLOUT else N_EPOCHS,
        policy_kwargs={"lstm_hidden_size": case.hidden, "net_arch": NET_ARCH},
        seed=0,
        device="cpu",
    )


def watch_ours(model: Any, clock: Clock) -> None:
    """Split our time by phase; called once per process, because two of the functions belong to modules."""
    import torch

    from tailguard.ppo import update

    clock.wrap(model.env, "step", "environment")
    clock.wrap(update, "actor_losses", "forward")
    clock.wrap(update, "critic_loss", "forward")
    clock.wrap(torch.Tensor, "backward", "backward")
    clock.wrap(update.Learner, "apply_gradients", "optimizer")


def measure(who: str, case: Case, seconds: float, kind: str, threads: int) -> dict[str, float]:
    """Steps per second of whole rollout-and-update cycles over at least `seconds`, after a small warm-up."""
    make = {"ours": make_ours, "peer": make_peer}[who]
    make(Case(case.hidden, case.n_envs, 16), threads).learn(16 * case.n_envs)  # compiled kernels, allocator, imports
    clock, model = Clock(kind), make(case, threads)
    clock.wrap(model, "collect_rollouts", "rollout")
    clock.wrap(model, "train", "update")
    if who == "ours" and threads == 1:  # phases of two threads overlap
        watch_ours(model, clock)
    with clock.running("total"):
        model.learn(case.rollout)
    cycles = max(1, round(seconds / clock.seconds["total"]))
    if cycles > 1:
        with clock.running("total"):
            model.learn((cycles - 1) * case.rollout, reset_num_timesteps=False)
    uncounted = (N_EPOCHS / model.n_epochs - 1.0) * clock.seconds["update"] if who == "peer" else 0.0
    return {"steps_per_second": cycles * case.rollout / (clock.seconds["total"] + uncounted), **shares(clock.seconds)}


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Share of the total per phase; only our learner is split."""
    if "forward" not in seconds:
        return {}
    parts = dict(seconds, acting=seconds["rollout"] - seconds["environment"])
    return {phase: parts[phase] / seconds["total"] for phase in PHASES}


# comparing

Measured = dict[Case, dict[str, list[dict[str, float]]]]  # [case][learner], one entry per repeat


def measure_apart(who: str, case: Case, seconds: float, kind: str, threads: int) -> dict[str, float]:
    """The same in a fresh process with that many threads."""
    command = [sys.executable, "-m", "benchmarks.peers", "--seconds", str(seconds), "--clock", kind]
    command += ["--threads", str(threads), "--measure", who, *(str(number) for number in astuple(case))]
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    done = subprocess.run(command, env={**os.environ, **limits}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{who} failed on {case}:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(cases: list[Case], repeats: int, seconds: float, kind: str, threads: dict[str, int]) -> Measured:
    """All measurements, interleaved: every repeat visits every case, and in it both learners."""
    measured: Measured = {case: {who: [] for who in LEARNERS} for case in cases}
    began = time.perf_counter()
    for repeat, case in product(range(repeats), cases):
        for who in LEARNERS:
            measured[case][who].append(measure_apart(who, case, seconds, kind, threads[who]))
        ours, peer = (measured[case][who][-1]["steps_per_second"] for who in LEARNERS)
        print(
            f"{time.perf_counter() - began:6.0f} s  repeat {repeat + 1}/{repeats}  hidden {case.hidden:3d}  "
            f"envs {case.n_envs:2d}  n_steps {case.n_steps:4d}  ours {ours:7,.0f}/s  peer {peer:6,.0f}/s  "
            f"ratio {ours / peer:4.1f}",
            flush=True,
        )
    return measured


def middle(runs: list[dict[str, float]], key: str) -> float:
    return median(run[key] for run in runs)


def report(
    measured: Measured, split: dict[Case, dict[str, float]], repeats: int, kind: str, threads: dict[str, int]
) -> str:
    """Medians, ratios and shares as markdown."""
    speeds, phases, ratios = [], [], []
    for case, runs in measured.items():
        ours, peer = (middle(runs[who], "steps_per_second") for who in LEARNERS)
        ratios.append(ours / peer)
        cell = [str(number) for number in astuple(case)]
        speeds.append([*cell, f"{ours:,.0f}", f"{peer:,.0f}", f"{ours / peer:.1f}"])
        shares_of = [split[case][phase] for phase in PHASES]
        phases.append([*cell, *(f"{share:.0%}" for share in (*shares_of, 1.0 - sum(shares_of)))])
    head = ["hidden", "envs", "n_steps"]
    return "\n\n".join(
        [
            f"CartPole without velocities through DummyVecEnv, {N_EPOCHS} epochs, batches of "
            f"{BATCH_SIZE:,} samples (or the whole rollout where that is less), layers of 64 and 64 after the LSTM. "
            "Ours trains twin critics of 32 quantiles, each with an LSTM of its own; RecurrentPPO "
            f"(sb3-contrib {version('sb3-contrib')}) one scalar critic with an LSTM. "
            f"Ours shares its update among {threads['ours']} threads (actor and critics have no weight in common), "
            f"RecurrentPPO has {threads['peer']} torch threads. "
            f"Medians of {repeats} interleaved measurements of {kind} time, each in its own process. In rollouts of "
            f"{LONG_ROLLOUT:,} samples and more, one of RecurrentPPO's epochs is timed and counted {N_EPOCHS} times.",
            markdown_table([*head, "ours, steps/s", "RecurrentPPO, steps/s", "ratio"], speeds),
            f"Geometric mean of the ratios **{geometric_mean(ratios):.1f}**, lowest **{min(ratios):.1f}**.",
            "Where our time goes on one thread (acting includes the critics' pass over the finished rollout):",
            markdown_table([*head, *PHASES, "rest"], phases),
        ]
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256], help="LSTM widths of the grid")
    parser.add_argument("--envs", type=int, nargs="+", default=[8, 64], help="numbers of environments of the grid")
    parser.add_argument("--n-steps", type=int, nargs="+", default=[128, 2048], help="rollout lengths of the grid")
    parser.add_argument("--repeats", type=int, default=3, help="measurements per cell and learner (default 3)")
    parser.add_argument("--seconds", type=float, default=3.0, help="least time per measurement (default 3)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu forgives a busy machine (default wall)")
    parser.add_argument("--threads", type=int, default=1, help="of ours, and of RecurrentPPO unless it has its own")
    parser.add_argument("--peer-threads", type=int, help="of RecurrentPPO, where another number is faster for it")
    parser.add_argument("--dry", action="store_true", help="print the tables without writing RESULTS.md")
    parser.add_argument("--measure", nargs=4, metavar=("WHO", "HIDDEN", "ENVS", "N_STEPS"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.measure:
        who, *numbers = args.measure
        print(json.dumps(measure(who, Case(*map(int, numbers)), args.seconds, args.clock, args.threads)))
        return
    cases = [Case(*cell) for cell in product(args.hidden, args.envs, args.n_steps)]
    threads = {"ours": args.threads, "peer": args.peer_threads or args.threads}
    measured = compare(cases, args.repeats, args.seconds, args.clock, threads)
    split = {case: measure_apart("ours", case, args.seconds, args.clock, 1) for case in cases}
    body = report(measured, split, args.repeats, args.clock, threads)
    print(f"\n{body}")
    if not args.dry:
        command = " ".join(["python -m benchmarks.peers", *sys.argv[1:]])
        name, title = f"peers-{args.threads}", f"Speed against RecurrentPPO, {args.threads} threads"
        write_section(name, title, command, body)


if __name__ == "__main__":
    main()
