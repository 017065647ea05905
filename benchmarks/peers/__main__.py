"""Environment steps per second, ours against other recurrent PPOs, on the same work.

`python -m benchmarks.peers` runs the grid hidden 64/256 x environments 8/64 x n_steps 128/2048. Every measurement is a
process of its own and the learners take turns, so that a busy spell of the machine hits all of them.
"""

from __future__ import annotations

import argparse
from itertools import product

from benchmarks.peers.apart import installable
from benchmarks.peers.cases import ENVS, Case
from benchmarks.peers.compare import Plan, compare
from benchmarks.peers.learners import LEARNERS, OWN
from benchmarks.peers.report import report
from benchmarks.results import parser_of, publish

MODULE = "benchmarks.peers"


def arguments() -> argparse.Namespace:
    parser = parser_of(MODULE, __doc__)
    parser.add_argument("--env", choices=ENVS, default="cartpole", help="what all learners step (default cartpole)")
    parser.add_argument("--learners", nargs="+", choices=list(LEARNERS), default=list(LEARNERS), help="default all")
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256], help="LSTM widths of the grid")
    parser.add_argument("--envs", type=int, nargs="+", default=[8, 64], help="numbers of environments of the grid")
    parser.add_argument("--n-steps", type=int, nargs="+", default=[128, 2048], help="rollout lengths of the grid")
    parser.add_argument("--threads", type=int, default=1, help="of ours, and of the peers unless they have their own")
    parser.add_argument("--peer-threads", type=int, nargs="+", help="of the peers; of several, the fastest counts")
    parser.add_argument("--rounds", type=int, default=3, help="measurements per cell and learner (default 3)")
    parser.add_argument("--seconds", type=float, default=3.0, help="least time per measurement (default 3)")
    parser.add_argument("--minutes", type=float, default=15.0, help="budget; only the first round is sure of its place")
    return parser.parse_args()


def plan_of(args: argparse.Namespace) -> Plan:
    peers = [who for who in args.learners if who not in OWN]
    threads = {who: (args.threads,) for who in OWN if who in args.learners}
    for who in peers:
        if installable(who):
            threads[who] = tuple(args.peer_threads or [args.threads])
        else:
            print(f"{who} is left out: {', '.join(LEARNERS[who].packages)} cannot be installed here", flush=True)
    cases = tuple(Case(args.env, *cell) for cell in product(args.hidden, args.envs, args.n_steps))
    return Plan(cases, threads, args.rounds, args.seconds, args.minutes)


def main() -> None:
    args = arguments()
    plan = plan_of(args)
    body = report(plan, compare(plan))
    key, title = f"peers-{args.env}-{args.threads}", f"Speed against other recurrent PPOs: {args.env}"
    if "recurrent_ppo" not in args.learners:  # a table of its own beside the one that has it
        key, title = f"{key}-others", f"{title}, the other peers"
    publish(key, f"{title}, {args.threads} thread(s)", MODULE, body, args.dry)


if __name__ == "__main__":
    main()
