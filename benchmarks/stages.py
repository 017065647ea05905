"""Where our own time goes, over the grid of benchmarks.peers: rollout, evaluation, gradients, optimizer.

`python -m benchmarks.stages` times whole cycles on one thread.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context

from benchmarks.peers.cases import N_EPOCHS, Case, Work, make_env
from benchmarks.peers.learners import LEARNERS, OURS
from benchmarks.peers.measure import Clock, run_cycles, watch_ours
from benchmarks.results import markdown_table, parser_of, publish

MODULE = "benchmarks.stages"
STAGES = ("rollout", "evaluating", "gradients", "optimizer", "rest")


def shares(case: Case, least: float) -> dict[str, float]:
    """Share of the CPU time per stage."""
    clock, model = Clock(), LEARNERS[OURS].make(case, make_env(case), Work(N_EPOCHS, case.rollout), 1)
    clock.wrap(model, "collect_rollouts", "rollout")
    watch_ours(model, clock)
    run_cycles(model, clock, case, least)
    spent = {name: clock.of(name, "cpu") / clock.of("total", "cpu") for name in clock.seconds}
    found = {name: spent[name] for name in ("evaluating", "gradients", "optimizer")}
    found["rollout"] = spent["rollout"] - spent["evaluating"]
    return {**found, "rest": 1.0 - sum(found.values())}


def main() -> None:
    parser = parser_of(MODULE, __doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="least time per cell (default 3)")
    options = parser.parse_args()
    rows = []
    for cell in product((64, 256), (8, 64), (128, 2048)):
        with ProcessPoolExecutor(1, get_context("spawn")) as alone:  # watching changes modules
            found = alone.submit(shares, Case("trading", *cell), options.seconds).result()
        rows.append([*map(str, cell), *(f"{found[stage]:.0%}" for stage in STAGES)])
        print(rows[-1], flush=True)
    table = markdown_table(["hidden", "envs", "n_steps", *STAGES], rows)
    words = (
        "Share of CPU time of whole cycles on the `regime` market, one thread, settings of benchmarks.peers. Rollout: "
        "environment and acting; evaluating: the critics' pass over the finished rollout; gradients hold the losses."
    )
    publish("stages", "Where our time goes", MODULE, f"{words}\n\n{table}", options.dry)


if __name__ == "__main__":
    main()
