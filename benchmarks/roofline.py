"""How much of the machine's matrix-product rate an update reaches, on one thread.

`python -m benchmarks.roofline` measures products of the sizes an update consists of by torch, counts the products'
floating point operations of an update from the layers' shapes, and times whole updates. Everything else that an update
does (gates, losses, optimizer) counts as time but not as work.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.peers.cases import LAYERS, Case, make_env
from benchmarks.results import markdown_table, parser_of, publish
from tailguard import DistributionalPPO
from tailguard.kernels import available_cores

MODULE = "benchmarks.roofline"
GIGA = 1e9
LARGE = 1024  # a square product this large runs at the machine's full rate
N_SHARDS = 2  # the native core cuts every batch into


@dataclass(frozen=True)
class Product:
    """(rows, inner) @ (inner, columns)."""

    what: str
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inner * self.columns


def products(hidden: int, n_inputs: int, n_sequences: int, n_samples: int) -> list[Product]:
    """Those of one trunk's update, and a large one."""
    joined = hidden + n_inputs + 1
    return [
        Product("large", LARGE, LARGE, LARGE),
        Product("gates of a step", n_sequences, joined, 4 * hidden),
        Product("back through a step", n_sequences, 4 * hidden, hidden),
        Product("weights of the memory", joined, n_samples, 4 * hidden),
        Product("first layer", n_samples, hidden, LAYERS[0]),
    ]


def rate(run: Callable[[int], None], flops: int, seconds: float) -> float:
    """Floating point operations per CPU second of run(times): the best of five spells, after a warm-up."""
    run(1)
    began = time.process_time()
    run(3)
    times = max(1, round(3 * seconds / 5 / max(time.process_time() - began, 1e-7)))

    def spell() -> float:
        began = time.process_time()
        run(times)
        return times * flops / (time.process_time() - began)

    return max(spell() for _ in range(5))


def torch_rate(of: Product, seconds: float) -> float:
    """Floating point operations per second of a product by torch."""
    left, right = torch.randn(of.rows, of.inner), torch.randn(of.inner, of.columns)
    result = torch.empty(of.rows, of.columns)

    def run(times: int) -> None:
        for _ in range(times):
            torch.mm(left, right, out=result)

    return rate(run, of.flops, seconds)


def gain_of_cores(cores: int, seconds: float) -> float:
    """How many times one core's rate all of them reach together in large products, by wall time: medians of five."""

    def products_per_second(_: int) -> float:
        torch.set_num_threads(1)
        left, result, done = torch.ones(LARGE, LARGE), torch.empty(LARGE, LARGE), 0
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            torch.mm(left, left, out=result)
            done += 1
        return done / (time.perf_counter() - began)

    with ThreadPoolExecutor(cores) as pool:
        pairs = [[sum(pool.map(products_per_second, range(n))) for n in (1, cores)] for _ in range(5)]
    return median(together / alone for alone, together in pairs)


def flops_per_sample(policy: torch.nn.Module) -> int:
    """Products of one sample, there and back, from the shapes of all weight matrices.

    Each matrix is multiplied with what comes in, with what comes back, and both give its own gradient: three products.
    The observations need no gradient, so matrices that read them have two.
    """
    matrices = {name: weight for name, weight in policy.named_parameters() if weight.dim() == 2}
    return sum((2 if "input_weight.0" in name else 3) * 2 * weight.numel() for name, weight in matrices.items())


def make_agent(case: Case, epochs: int) -> DistributionalPPO:
    """Twin critics of 32 quantiles on one thread; no sequence is held back, so all samples are work."""
    return DistributionalPPO(
        "MlpLstmPolicy",
        make_env(case),
        n_steps=case.n_steps,
        batch_size=case.batch,
        n_epochs=epochs,
        critic={"n_quantiles": 32, "twin": True},
        optimizer="adaptive_upgd",
        ev_reserve=0.0,
        update_threads=1,
        policy_kwargs={"lstm_hidden_size": case.hidden, "net_arch": list(LAYERS)},
        seed=0,
    )


def update_seconds(agent: DistributionalPPO, case: Case, rounds: int) -> float:
    """CPU seconds of one update: the best of some."""
    spent: list[float] = []
    train = agent.train

    def timed() -> None:
        began = time.process_time()
        train()
        spent.append(time.process_time() - began)

    agent.train = timed  # type: ignore[method-assign]
    agent.learn((rounds + 1) * case.rollout)
    return min(spent[1:])


def section(hidden: int, args: argparse.Namespace) -> tuple[list[list[str]], list[str]]:
    """Rates of the products, and the row of the update, at one width."""
    case = Case("trading", hidden, args.envs, args.n_steps)
    agent = make_agent(case, args.epochs)
    sizes = products(hidden, agent.policy.obs_features, case.batch // case.sequence // N_SHARDS, case.batch // N_SHARDS)
    found = [(size, torch_rate(size, args.seconds)) for size in sizes]
    table = [
        [str(hidden), size.what, f"{size.rows} x {size.inner} x {size.columns}", f"{speed / GIGA:.1f}"]
        for size, speed in found
    ]
    work = flops_per_sample(agent.policy) * case.rollout * args.epochs
    limit = max(speed for _, speed in found)
    seconds = update_seconds(agent, case, args.rounds)
    figures = f"{work / GIGA:.1f}", f"{seconds:.2f}", f"{work / seconds / GIGA:.1f}", f"{limit / GIGA:.1f}"
    return table, [str(hidden), *figures, f"**{work / seconds / limit:.0%}**"]


def arguments() -> argparse.Namespace:
    parser = parser_of(MODULE, __doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256], help="LSTM widths")
    parser.add_argument("--envs", type=int, default=64, help="environments (default 64)")
    parser.add_argument("--n-steps", type=int, default=128, help="steps per rollout (default 128)")
    parser.add_argument("--epochs", type=int, default=2, help="epochs per update (default 2)")
    parser.add_argument("--rounds", type=int, default=3, help="updates timed (default 3)")
    parser.add_argument("--seconds", type=float, default=0.5, help="time per product (default 0.5)")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    found = [section(hidden, args) for hidden in args.hidden]
    cores = available_cores()
    gain = gain_of_cores(cores, args.seconds)
    body = "\n\n".join(
        [
            f"One thread, CPU time. Updates of {args.envs} environments x {args.n_steps} steps, {args.epochs} "
            "epochs, batches of 1,024 samples in sequences of 32, actor and twin critics of 32 quantiles. The limit is "
            "the fastest product; work counts matrix products only. By wall time, "
            f"{cores} cores together make **{gain:.2f}** times the large products of one.",
            markdown_table(
                ["hidden", "product", "size", "torch, GFLOP/s"],
                [row for table, _ in found for row in table],
            ),
            markdown_table(
                ["hidden", "GFLOP per update", "seconds", "GFLOP/s", "limit, GFLOP/s", "reached"],
                [row for _, row in found],
            ),
        ]
    )
    publish("roofline", "Roofline", MODULE, body, args.dry)


if __name__ == "__main__":
    main()
