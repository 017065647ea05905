"""Continual learning on permuted digits: which optimizers can still learn after 150 tasks.

    python -m benchmarks.continual [--seeds 5] [--tasks 150] [--only NAME ...] [--write]

Each task permutes the pixels (`input`) or the labels (`label`) of scikit-learn's digits anew; the network goes on with
the weights it has. Online accuracy is measured on every batch before it is learned from. Pixels are standardized with
one mean and one deviation.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from benchmarks.results import markdown_table, write_section
from tailguard.optim import UPGD, UPGDW, AdaptiveUPGD

Array = np.ndarray
LAYERS = (64, 64, 32, 10)
BATCH, STEPS_PER_TASK = 8, 120
PROBLEMS = ("input", "label")


class ShrinkAndPerturb(SGD):
    """The control without a gate: all weights decay and are shaken alike. sigma is in units of the gradient."""

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float, sigma: float) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.sigma = sigma

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.add_(torch.randn_like(param), alpha=self.sigma)
        return super().step(closure)


class AdamShrinkAndPerturb(Adam):
    """The same control on Adam's direction: sigma is in units of the normalized step."""

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float, sigma: float) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.sigma = sigma

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(torch.randn_like(param), alpha=-group["lr"] * self.sigma)
        return loss


Maker = Callable[[list[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Maker] = {
    "SGD, lr 0.1": lambda p: SGD(p, lr=0.1),
    "SGD + decay 0.01 + noise 0.1 (shrink and perturb)": lambda p: ShrinkAndPerturb(p, 0.1, 0.01, 0.1),
    "UPGD, the same + gate": lambda p: UPGD(p, lr=0.1, weight_decay=0.01, sigma=0.1),
    "Adam, lr 3e-3": lambda p: Adam(p, lr=3e-3),
    "AdaptiveUPGD, lr 3e-3, sigma 1e-3": lambda p: AdaptiveUPGD(p, lr=3e-3, sigma=1e-3),
    "AdaptiveUPGD, lr 3e-3, sigma 0.1": lambda p: AdaptiveUPGD(p, lr=3e-3, sigma=0.1),
    "Adam + decay 0.01": lambda p: Adam(p, lr=3e-3, weight_decay=0.01),
    "Adam + decay 0.01 + noise 0.1": lambda p: AdamShrinkAndPerturb(p, 3e-3, 0.01, 0.1),
    "AdaptiveUPGD, the same + gate": lambda p: AdaptiveUPGD(p, lr=3e-3, weight_decay=0.01, sigma=0.1),
    "AdamW, lr 3e-3, decay 0.1": lambda p: AdamW(p, lr=3e-3, weight_decay=0.1),
    "UPGDW, the same + noise 0.1 + gate": lambda p: UPGDW(p, lr=3e-3, weight_decay=0.1, sigma=0.1),
}


class Network:
    """A ReLU network on one flat parameter, written out: at this size autograd would cost five times the arithmetic."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        layers = [nn.Linear(n, m) for n, m in pairwise(LAYERS)]
        tensors = [tensor.detach() for layer in layers for tensor in (layer.weight, layer.bias)]
        self.flat = nn.Parameter(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        self.flat.grad = torch.zeros_like(self.flat)
        ends = np.cumsum([tensor.numel() for tensor in tensors])[:-1]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        split = lambda x: [part.reshape(shape) for part, shape in zip(np.split(x, ends), shapes, strict=True)]  # noqa: E731
        self.weights, self.grads = split(self.flat.detach().numpy()), split(self.flat.grad.numpy())

    def logits(self, x: Array) -> tuple[Array, list[Array]]:
        """(B, 10), and the input of every layer."""
        inputs = []
        for i in range(0, len(self.weights), 2):
            inputs.append(x)
            x = x @ self.weights[i].T + self.weights[i + 1]
            if i + 2 < len(self.weights):
                x = np.maximum(x, 0.0)
        return x, inputs

    def backward(self, logits: Array, inputs: list[Array], y: Array) -> None:
        """Gradient of the mean cross entropy, into `flat.grad`."""
        error = np.exp(logits - logits.max(1, keepdims=True))
        error /= error.sum(1, keepdims=True)
        error[np.arange(len(y)), y] -= 1.0
        error /= len(y)
        for i in range(len(self.weights) - 2, -1, -2):
            x = inputs[i // 2]
            np.matmul(error.T, x, out=self.grads[i])
            error.sum(0, out=self.grads[i + 1])
            if i:
                error = (error @ self.weights[i]) * (x > 0)


def run(make: Maker, problem: str, seed: int, tasks: int) -> Array:
    """Online accuracy per task of one network that goes through all of them."""
    digits = load_digits()
    images = ((digits.data - digits.data.mean()) / digits.data.std()).astype(np.float32)
    rng = np.random.default_rng(seed)
    network = Network(seed)
    optimizer = make([network.flat])
    return np.array(
        [learn(network, optimizer, *permuted(images, digits.target, problem, rng), rng) for _ in range(tasks)]
    )


def permuted(images: Array, labels: Array, problem: str, rng: np.random.Generator) -> tuple[Array, Array]:
    if problem == "input":
        return np.ascontiguousarray(images[:, rng.permutation(images.shape[1])]), labels
    return images, rng.permutation(10)[labels]


def learn(network: Network, optimizer: Optimizer, x: Array, y: Array, rng: np.random.Generator) -> float:
    """One task; returns the share of samples that were right before they were learned."""
    correct = 0
    for index in rng.permutation(len(x))[: BATCH * STEPS_PER_TASK].reshape(-1, BATCH):
        logits, inputs = network.logits(x[index])
        correct += int((logits.argmax(1) == y[index]).sum())
        network.backward(logits, inputs, y[index])
        optimizer.step()
    return correct / (BATCH * STEPS_PER_TASK)


def first_and_last(job: tuple[str, str, int, int]) -> tuple[float, float]:
    """Mean online accuracy of the first ten and the last twenty tasks."""
    name, problem, seed, tasks = job
    torch.set_num_threads(1)
    accuracy = run(OPTIMIZERS[name], problem, seed, tasks)
    first, last = float(accuracy[:10].mean()), float(accuracy[-20:].mean())
    print(f"{problem}, seed {seed}, {name}: {first:.3f} -> {last:.3f}", flush=True)
    return first, last


def measure(names: list[str], seeds: int, tasks: int, workers: int) -> dict[tuple[str, str, int], tuple[float, float]]:
    jobs = [(name, problem, seed, tasks) for seed in range(seeds) for name in names for problem in PROBLEMS]
    with ProcessPoolExecutor(workers) as pool:
        return {job[:3]: result for job, result in zip(jobs, pool.map(first_and_last, jobs), strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Online accuracy on permuted digits, first and last tasks.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=150)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", nargs="*", default=list(OPTIMIZERS), help="names of optimizers, as in the table")
    parser.add_argument("--write", action="store_true", help="write the table into benchmarks/RESULTS.md")
    options = parser.parse_args()
    results = measure(options.only, options.seeds, options.tasks, options.workers)
    rows = []
    for name in options.only:
        row = [name]
        for problem in PROBLEMS:
            pairs = [results[name, problem, seed] for seed in range(options.seeds)]
            row += [spread([first for first, _ in pairs]), spread([last for _, last in pairs])]
        rows.append(row)
    table = markdown_table(["optimizer", *(f"{p}: {part}" for p in PROBLEMS for part in ("first 10", "last 20"))], rows)
    print(f"\n{table}")
    if options.write:
        text = (
            f"Online accuracy over the first 10 and the last 20 of {options.tasks} tasks of {STEPS_PER_TASK} steps, "
            f"batch {BATCH}, {options.seeds} seeds: mean (lowest to highest). ReLU network {LAYERS}."
        )
        title = "Continual learning on permuted digits"
        command = f"python -m benchmarks.continual --seeds {options.seeds} --tasks {options.tasks} --write"
        write_section("continual", title, command, f"{text}\n\n{table}")


def spread(values: list[float]) -> str:
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
