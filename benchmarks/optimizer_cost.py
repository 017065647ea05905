"""What one optimizer step costs beside torch.optim.AdamW(foreach=True), interleaved on the same machine.

    python -m benchmarks.optimizer_cost [--repeats 200] [--write]

`flat` is one tensor, as the learner keeps its parameters; `tensors` are the 24 tensors of three recurrent trunks. VGS
on top is the time of AdaptiveUPGD with a scaler that observes and commits, minus that of AdaptiveUPGD alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import product
from statistics import median

import torch
from torch import nn
from torch.optim import AdamW

from benchmarks.results import markdown_table, write_section
from tailguard.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler, scaled_step

SIZES = (100_000, 1_000_000)
TRUNKS = 3
BLOCKS = {"cold": 1, "warm": 20}


def shapes(total: int) -> list[tuple[int, ...]]:
    """Three LSTM trunks with their heads, about `total` numbers."""
    h = int((total / TRUNKS / 9.0) ** 0.5)
    trunk: list[tuple[int, ...]] = [(4 * h, h), (4 * h, h), (4 * h,), (4 * h,), (h, h), (h,), (8, h), (8,)]
    return trunk * TRUNKS


def parameters(total: int, layout: str) -> tuple[list[nn.Parameter], list[int]]:
    """Parameters with gradients, and the sizes of the tensors they hold."""
    tensors = [torch.randn(shape) for shape in shapes(total)]
    if layout == "flat":
        params = [nn.Parameter(torch.cat([tensor.reshape(-1) for tensor in tensors]))]
    else:
        params = [nn.Parameter(tensor) for tensor in tensors]
    for param in params:
        param.grad = torch.randn_like(param)
    return params, [tensor.numel() for tensor in tensors]


def contenders(total: int, layout: str) -> dict[str, Callable[[], object]]:
    def alone(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[], object]:
        return make(parameters(total, layout)[0]).step

    params, sizes = parameters(total, layout)
    optimizer = AdaptiveUPGD(params, sigma=1e-3)
    scaler = VarianceGradientScaler(params, segments=sizes if layout == "flat" else None)

    def with_scaler() -> None:
        factor = scaler.scale_gradients(optimizer)
        scaled_step(optimizer, factor)
        scaler.step()

    return {
        "AdamW(foreach)": alone(lambda p: AdamW(p, foreach=True)),
        "UPGD": alone(lambda p: UPGD(p)),
        "AdaptiveUPGD": alone(lambda p: AdaptiveUPGD(p)),
        "AdaptiveUPGD, torch path": alone(lambda p: AdaptiveUPGD(p, fused=False)),
        "UPGDW": alone(lambda p: UPGDW(p)),
        "AdaptiveUPGD + VGS": with_scaler,
    }


def measure(total: int, layout: str, repeats: int, block: int) -> dict[str, float]:
    """Median milliseconds of this thread.

    The contenders take turns, so that a busy machine slows all alike. In blocks of one step nobody finds its state in
    the cache, as after a large forward and backward pass; in longer blocks everybody does.
    """
    steps = contenders(total, layout)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():  # compile and allocate
        for _ in range(3):
            step()
    for _ in range(max(repeats // block, 1)):
        for name, step in steps.items():
            for _ in range(block):
                start = time.thread_time()
                step()
                times[name].append(1e3 * (time.thread_time() - start))
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of one optimizer step beside AdamW(foreach=True).")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--write", action="store_true", help="write the table into benchmarks/RESULTS.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for total, layout, cache in product(SIZES, ("flat", "tensors"), BLOCKS):
        result = measure(total, layout, options.repeats, BLOCKS[cache])
        result["VGS on top"] = result.pop("AdaptiveUPGD + VGS") - result["AdaptiveUPGD"]
        base = result["AdamW(foreach)"]
        cells = [f"{value:.3f} ms ({value / base:.2f})" for value in result.values()]
        rows.append([f"{total:,}", layout, cache, *cells])
        print(dict(zip(["size", "layout", "cache", *result], rows[-1], strict=True)), flush=True)
    table = markdown_table(["parameters", "layout", "cache", *result], rows)
    print(f"\n{table}")
    if options.write:
        text = (
            f"Median of {options.repeats} steps, CPU time of one thread, contenders taking turns every step (cold "
            "caches) or every 20 steps (warm); in brackets the ratio to AdamW. Goals: AdaptiveUPGD at most 1.5, VGS "
            "on top at most 0.3."
        )
        title, command = "Cost of one optimizer step", "python -m benchmarks.optimizer_cost"
        write_section("optimizer-cost", title, command, f"{text}\n\n{table}")


if __name__ == "__main__":
    main()
