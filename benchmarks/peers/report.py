"""A comparison as markdown: medians, ratios, and where our time goes."""

from __future__ import annotations

from itertools import product
from statistics import geometric_mean

from benchmarks.peers.cases import BATCH_SIZE, LONG_ROLLOUT, N_EPOCHS, Case
from benchmarks.peers.compare import Measured, Plan
from benchmarks.peers.learners import LEARNERS, OWN
from benchmarks.peers.measure import STAGES
from benchmarks.results import markdown_table

HEAD = ["hidden", "envs", "n_steps"]
ENV_TITLES = {
    "trading": "The `regime` oracle market through our TradingVecEnv",
    "cartpole": "CartPole without velocities through SB3's DummyVecEnv",
}


def report(plan: Plan, measured: Measured) -> str:
    """All tables of one environment and thread setting."""
    own, peers = ([who for who in plan.threads if (who in OWN) == ours] for ours in (True, False))
    tables = [ratios_table(measured, plan.cases, who, peers[0]) for who in own]
    parts = [terms(plan, measured), *tables, summary_table(measured, plan, own, peers)]
    if len(peers) > 1:
        parts += ["Steps per second of wall time (per CPU second):", all_speeds(measured, plan.cases, [*own, *peers])]
    for who in own:
        if plan.threads[who] == (1,):
            parts += [
                f"{LEARNERS[who].title}, share of CPU time (judging: the critics' pass over the finished rollout; "
                "gradients: there and back):",
                stages_table(measured, plan.cases, who),
            ]
    return "\n\n".join(parts)


def terms(plan: Plan, measured: Measured) -> str:
    """What was compared and how."""
    few, many = measured.rounds()
    counts = str(few) if few == many else f"{few} to {many}"
    return (
        f"{ENV_TITLES[plan.cases[0].env]}; {N_EPOCHS} epochs, batches of {BATCH_SIZE:,} samples (or the whole rollout "
        "where that is less), layers of 64 and 64 after each LSTM. Every peer is a plain PPO: one actor, one scalar "
        f"critic, Adam. {' '.join(introduced(who, counts) for who, counts in plan.threads.items())} "
        f"Medians of {counts} interleaved measurements, each in a process of its own, both clocks in the same run. In "
        f"rollouts of {LONG_ROLLOUT:,} samples and more, {LONG_ROLLOUT:,} samples of a peer's update are timed and the "
        "rest is counted at the same rate."
    )


def introduced(who: str, threads: tuple[int, ...]) -> str:
    """A learner in a sentence; of several numbers of threads, its fastest counts in every cell."""
    learner = LEARNERS[who]
    versions = f" ({', '.join(learner.packages)})" if learner.packages else ""
    return f"{learner.title}{versions}: {learner.note}; {' or '.join(map(str, threads))} thread(s)."


def cells(case: Case) -> list[str]:
    return [str(size) for size in case.sizes]


def ratios_table(measured: Measured, cases: tuple[Case, ...], own: str, peer: str) -> str:
    """One of ours beside one peer, wall and CPU."""
    ours, title = LEARNERS[own].title.lower(), LEARNERS[peer].title
    header = [*HEAD]
    for unit in ("s", "CPU s"):
        header += [f"{ours}, steps/{unit}", f"{title}, steps/{unit}", "ratio" if unit == "s" else "CPU ratio"]
    rows = []
    for case in cases:
        row = cells(case)
        for key in ("wall", "cpu"):
            row += [f"{measured.best(who, case, key):,.0f}" for who in (own, peer)]
            row.append(f"{measured.ratio(own, case, peer, key):.1f}")
        rows.append(row)
    return markdown_table(header, rows)


def summary_table(measured: Measured, plan: Plan, own: list[str], peers: list[str]) -> str:
    """Ours over each peer: geometric means and the lowest ratios."""
    rows = []
    for who, peer in product(own, peers):
        row = [f"{LEARNERS[who].title.lower()} / {LEARNERS[peer].title}"]
        for key in ("wall", "cpu"):
            ratios = [measured.ratio(who, case, peer, key) for case in plan.cases]
            row += [f"**{geometric_mean(ratios):.1f}**", f"{min(ratios):.1f}"]
        rows.append(row)
    return markdown_table(["", "wall, geometric mean", "lowest", "CPU, geometric mean", "lowest"], rows)


def all_speeds(measured: Measured, cases: tuple[Case, ...], learners: list[str]) -> str:
    rows = [
        [
            *cells(case),
            *(f"{measured.best(w, case, 'wall'):,.0f} ({measured.best(w, case, 'cpu'):,.0f})" for w in learners),
        ]
        for case in cases
    ]
    return markdown_table([*HEAD, *(LEARNERS[who].title for who in learners)], rows)


def stages_table(measured: Measured, cases: tuple[Case, ...], own: str) -> str:
    rows = []
    for case in cases:
        parts = [measured.best(own, case, stage) for stage in STAGES]
        shares = [f"{share:.0%}" for share in (*parts, 1.0 - sum(parts))]
        rows.append([*cells(case), *shares, f"{measured.best(own, case, 'rollout'):,.0f}"])
    return markdown_table([*HEAD, *STAGES, "rest", "rollout alone, steps/s"], rows)
