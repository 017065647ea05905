"""Where our own time goes, over the grid of benchmarks.peers: rollout, forward, backward, optimizer.

`python -m benchmarks.stages` times whole cycles on one thread. Forward and backward are one compiled call, so the
forward loop is run by itself on the batches of the last rollout, and its share of that call is what forward took.
"""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from statistics import median
from typing import Any

from benchmarks.peers.cases import N_EPOCHS, Case, Work, make_env
from benchmarks.peers.learners import LEARNERS, OURS
from benchmarks.peers.measure import Clock, run_cycles, watch_ours
from benchmarks.results import markdown_table, parser_of, publish
from tailguard.loops import compiled
from tailguard.policy.trunk_kernel import trunk_forward
from tailguard.ppo.lanes import N_LANES, lane_of, lane_size
from tailguard.ppo.update import Learner

MODULE = "benchmarks.stages"
STAGES = ("rollout", "judging", "forward", "backward", "optimizer", "rest")
REPEATS = 5


@compiled
def forward_alone(desks, chosen):  # type: ignore[no-untyped-def]
    """What the lanes of all trunks do before their losses."""
    for j in range(len(desks)):
        for i in range(N_LANES):
            shape, weights, packed, _, _, room, seen, start, end = lane_of(desks[j], i, chosen)
            for low in range(start, end, room.kept.shape[1]):
                trunk_forward(shape, weights, packed, room, seen, low, end)


def forward_share(model: Any) -> float:
    """Of the gradient of one batch: CPU time of the forward loops over that of the whole, by turns, medians."""
    learner: Learner = model.learner
    choice, *_ = model.sequences().whole.split(model.config.batch_size // model.config.sequence_length)
    size = lane_size(choice.n_sequences)
    desks, *_ = learner.compiled.shares(choice.batch, learner.compiled.known, 1, size)[0]

    def gradient() -> None:
        learner.vector.drop_gradients()
        learner.backward(choice, model.knobs(), 1.0)

    works = gradient, lambda: forward_alone(desks, choice.chosen)
    whole, forward = ([seconds(work) for _ in range(REPEATS)] for work in works)
    return median(forward) / median(whole)


def seconds(work: Any) -> float:
    work()
    began = time.process_time()
    work()
    return time.process_time() - began


def shares(case: Case, least: float) -> dict[str, float]:
    """Share of the CPU time per stage."""
    clock, model = Clock(), LEARNERS[OURS].make(case, make_env(case), Work(N_EPOCHS, case.rollout), 1)
    clock.wrap(model, "collect_rollouts", "rollout")
    watch_ours(model, clock)
    run_cycles(model, clock, case, least)
    spent = {name: clock.of(name, "cpu") / clock.of("total", "cpu") for name in clock.seconds}
    ahead = forward_share(model) * spent["gradients"]
    found = {
        "rollout": spent["rollout"] - spent["judging"],
        "judging": spent["judging"],
        "forward": ahead,
        "backward": spent["gradients"] - ahead,
        "optimizer": spent["optimizer"],
    }
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
        "environment and acting; judging: the critics' pass over the finished rollout; backward holds the losses."
    )
    publish("stages", "Where our time goes", MODULE, f"{words}\n\n{table}", options.dry)


if __name__ == "__main__":
    main()
