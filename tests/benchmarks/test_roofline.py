"""Work is counted from shapes, so it has a closed form."""

from __future__ import annotations

from benchmarks.roofline import flops_per_sample
from tests.agents import tiny_agent


def test_the_work_of_a_sample_is_that_of_its_layers() -> None:
    hidden, inputs, layer, quantiles, actions = 8, 2, 8, 8, 2  # of tiny_agent on CartPole without velocities
    memory = 2 * (3 * hidden * 4 * hidden + 2 * inputs * 4 * hidden)

    def trunk(outputs: int) -> int:
        return memory + 2 * 3 * (hidden * layer + layer * outputs)

    assert flops_per_sample(tiny_agent().policy) == trunk(actions) + 2 * trunk(quantiles)
