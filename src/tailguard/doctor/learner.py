"""Checks of the learner on the patient's own environment and settings: what must hold in every update."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tailguard.checkpoint import state_digest
from tailguard.doctor.checks import Check, Verdict, healthy, judged, not_applicable, sick
from tailguard.doctor.patient import N_ENVS, N_STEPS, Patient
from tailguard.health import metrics
from tailguard.population.exploit import exploit
from tailguard.ppo import DistributionalPPO
from tailguard.ppo.update import batch_gradient, gradient_source
from tailguard.rollout import SequenceBatch
from tailguard.schedules import Schedule, value_at

Floats = NDArray[np.floating[Any]]


def observations(agent: DistributionalPPO, n: int = 4) -> Floats:
    """(T, n, ...) of the rollout, as the environment gave them."""
    shape = agent.observation_space.shape or ()
    seen = agent.rollout_buffer.observations[:16, :n]
    return seen.reshape(*seen.shape[:2], *shape)


@torch.no_grad()
def listen_to_memory(agent: DistributionalPPO) -> None:
    """A fresh policy hardly looks at its features, so a wrong memory would hardly show: make it look."""
    for module in agent.policy.action_head.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.mul_(100.0)


def first_log_ratio(patient: Patient) -> Verdict:
    n_steps = min(patient.config.n_steps, N_STEPS)
    agent = patient.collected(prepare=listen_to_memory, batch_size=n_steps * N_ENVS, ev_reserve=0.0)  # all in one batch
    agent.train()
    value = float(agent.logger.name_to_value[metrics.FIRST_LOG_RATIO.name])
    return judged(
        value <= 1e-4,
        f"max |log ratio| before the first step is {value:.1e}",
        "The policy trains on other inputs or states than it acted on: look for a normalizer that moves during a "
        "rollout, dropout, or a state that is stored after the step.",
    )


def memory_isolation(patient: Patient) -> Verdict:
    agent = patient.collected()
    seen = observations(agent)
    together = alone = None
    worst = 0.0
    for t in range(len(seen)):
        actions, together = agent.predict(seen[t], together, np.full(len(seen[t]), t == 0), deterministic=True)
        single, alone = agent.predict(seen[t][:1], alone, np.array([t == 0]), deterministic=True)
        worst = max(worst, float(np.abs(np.asarray(actions[:1], float) - np.asarray(single, float)).max()))
    return judged(
        worst <= 1e-4,
        f"actions of one environment alone and among others differ by {worst:.1e}",
        "Environments see each other's recurrent state, or a layer mixes the batch (BatchNorm).",
    )


def memory_reset(patient: Patient) -> Verdict:
    agent = patient.collected()
    seen = observations(agent)
    state = None
    for t in range(len(seen)):
        _, state = agent.predict(seen[t], state, np.zeros(len(seen[t]), bool))
    starts = np.ones(len(seen[0]), bool)
    reset, _ = agent.predict(seen[0], state, starts, deterministic=True)
    fresh, _ = agent.predict(seen[0], None, starts, deterministic=True)
    gap = float(np.abs(np.asarray(reset, float) - np.asarray(fresh, float)).max())
    return judged(
        gap == 0.0, f"an old memory changes a new episode's action by {gap:.1e}", "Zero the state on episode starts."
    )


def gradient(agent: DistributionalPPO, batch: SequenceBatch, micro_sequences: int | None) -> torch.Tensor:
    """The gradient of one optimizer step, accumulated as the learner does it."""
    learner = agent.learner
    kept, learner.micro_sequences = learner.micro_sequences, micro_sequences
    batch_gradient(learner, batch, np.arange(batch.n_sequences), gradient_source(learner, batch, agent.schedules()))
    learner.micro_sequences = kept
    return learner.vector.gradient.clone()


def accumulation(patient: Patient) -> Verdict:
    agent = patient.collected()
    batch = agent.sequences()
    whole, parts = gradient(agent, batch, None), gradient(agent, batch, max(batch.n_sequences // 3, 1))
    error = float((whole - parts).norm() / whole.norm().clamp(min=1e-12))
    return judged(
        error <= 1e-4,
        f"the gradient of micro-batches differs by {error:.1e} from that of the batch",
        "Micro-batches must be weighted by their valid samples.",
    )


def every_gradient(patient: Patient) -> Verdict:
    agent = patient.collected()
    received, vector = gradient(agent, agent.sequences(), None), agent.learner.vector
    without = [
        name
        for name, parameter in agent.policy.named_parameters()
        if name.startswith("critics.") and not received[vector.where(parameter)].any()
    ]
    total = sum(name.startswith("critics.") for name, _ in agent.policy.named_parameters())
    return judged(
        not without,
        f"{total - len(without)} of {total} critic tensors receive gradient",
        f"{', '.join(without[:3])} are cut off from the value loss: look for detach() or a frozen layer.",
    )


def every_weight(patient: Patient) -> Verdict:
    agent = patient.collected()
    before = {name: parameter.detach().clone() for name, parameter in agent.policy.named_parameters()}
    agent.train()
    still = [name for name, parameter in agent.policy.named_parameters() if torch.equal(parameter, before[name])]
    return judged(
        not still,
        f"{len(before) - len(still)} of {len(before)} tensors moved in one update",
        f"{', '.join(still[:3])} did not: the optimizer does not know them, or their gradient is zero.",
    )


def learning_rate(patient: Patient) -> Verdict:
    agent = patient.collected()
    wanted = value_at(agent.config.learning_rate, 1.0 - agent._current_progress_remaining)
    agent.train()
    found = {float(group["lr"]) for group in agent.learner.optimizer.param_groups}
    return judged(
        all(abs(rate - wanted) <= 1e-12 + 1e-6 * wanted for rate in found),
        f"schedule says {wanted:.3g}, optimizer has {', '.join(f'{rate:.3g}' for rate in found)}",
        "Something overwrites the learning rate, or a param group is left out.",
    )


def scale_preserves(patient: Patient) -> Verdict:
    agent = patient.collected()
    agent.train()  # the first update lays the unit; the later ones must not move a decoded value
    agent.collect_rollouts(agent.env, agent._init_callback(None), agent.rollout_buffer, agent.config.n_steps)  # type: ignore[arg-type]
    seen = observations(agent)[0]
    before = agent.predict_quantiles(seen)
    agent.move_return_scale()
    after = agent.predict_quantiles(seen)
    error = float(np.abs(after - before).max() / max(np.abs(before).max(), 1e-12))
    return judged(
        error <= 1e-4,
        f"predicted returns move by {error:.1e} of their size when the return scale moves",
        "The last layer of every critic must be rescaled in the moment the scale moves.",
    )


def advantages_by_hand(patient: Patient) -> Verdict:
    agent = patient.collected(n_steps=256)  # long enough for most episodes to end in it
    buffer, gamma, lam = agent.rollout_buffer, agent.config.gamma, agent.config.gae_lambda
    expected = np.zeros_like(buffer.rewards)
    for n in range(buffer.n_envs):
        trace = 0.0
        for t in reversed(range(buffer.n_steps)):
            if buffer.terminated[t, n]:
                follows, trace = 0.0, 0.0
            elif buffer.truncated[t, n]:
                follows, trace = float(buffer.terminal_values[t, n]), 0.0
            else:
                follows = float(buffer.values[t + 1, n])
            trace = buffer.rewards[t, n] + gamma * follows - buffer.values[t, n] + gamma * lam * trace
            expected[t, n] = trace
    scale = max(float(np.abs(expected).max()), 1e-12)
    error = float(np.abs(buffer.advantages - expected).max()) / scale
    n_ends = int(buffer.dones.sum())
    return judged(
        error <= 1e-6,
        f"advantages differ by {error:.1e} from those computed by hand ({n_ends} episode ends in the rollout)",
        "A trace runs over an episode's end, or a truncated episode is not bootstrapped.",
    )


def quantile_sides(patient: Patient) -> Verdict:
    """Fit constant quantiles to a normal sample with the critic's own loss: high levels must come out high."""
    head = patient.agent().policy.critic_list[0].head
    if head.config.kind != "quantile" or len(head.levels) < 2:
        return not_applicable("the critic has no quantiles")
    target = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 4_000)).astype(np.float32))
    fitted = torch.zeros(1, len(head.levels), requires_grad=True)
    optimizer = torch.optim.Adam([fitted], lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        head.loss(fitted, target, None).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    low, high = float(fitted[0, 0].detach()), float(fitted[0, -1].detach())
    return judged(
        low < -1.0 < 1.0 < high,
        f"on N(0, 1) level {head.levels[0]:.3f} learns {low:.2f} and level {head.levels[-1]:.3f} learns {high:.2f}",
        "The sign of the error or of the level is turned round: the tails are swapped, and CVaR is that of the gains.",
    )


def repeatable(patient: Patient) -> Verdict:
    digests = set()
    for _ in range(2):
        agent = patient.collected()
        agent.train()
        digests.add(state_digest({name: part.state_dict() for name, part in agent.parts().items()}))
    return judged(
        len(digests) == 1,
        f"one update twice from one seed gives {len(digests)} result{'s' * (len(digests) > 1)}",
        "The environment is not deterministic per seed, or a random number is drawn elsewhere.",
    )


def same_actions(one: DistributionalPPO, two: DistributionalPPO, seen: Floats) -> bool:
    """Bit for bit, with memory."""
    states: list[Any] = [None, None]
    for t in range(len(seen)):
        starts = np.full(len(seen[t]), t == 0)
        first, states[0] = one.predict(seen[t], states[0], starts, deterministic=True)
        second, states[1] = two.predict(seen[t], states[1], starts, deterministic=True)
        if not np.array_equal(first, second):
            return False
    return True


def save_and_load(patient: Patient) -> Verdict:
    agent = patient.collected()
    agent.train()
    seen = observations(agent)
    with tempfile.TemporaryDirectory() as folder:
        agent.save(Path(folder) / "agent")
        loaded = DistributionalPPO.load(Path(folder) / "agent")
    same = same_actions(agent, loaded, seen) and np.array_equal(
        agent.predict_quantiles(seen[0]), loaded.predict_quantiles(seen[0])
    )
    return judged(
        same, f"a loaded agent acts {'identically' if same else 'differently'}", "A part is missing in the bundle."
    )


def rate_of(agent: DistributionalPPO) -> dict[str, float]:
    """The agent's own learning rate as a population would vary it: there is nothing to say about one that stays."""
    rate = agent.config.learning_rate
    if isinstance(rate, Schedule):
        return {"learning_rate.start": rate.start}
    return {"learning_rate": rate} if isinstance(rate, float) else {}


def exploit_is_whole(patient: Patient) -> Verdict:
    source, target = patient.collected(), patient.agent(seed=1)
    source.train()
    seen = observations(source)
    with tempfile.TemporaryDirectory() as folder:
        source.save(Path(folder) / "source")
        exploit(target, Path(folder) / "source", rate_of(target))
    same = same_actions(source, target, seen)
    return judged(
        same,
        f"after exploit both agents act {'identically' if same else 'differently'}",
        "Exploit must copy weights, optimizer and every normalizer together.",
    )


def short_training(patient: Patient) -> Verdict:
    agent = patient.agent()
    per_update = agent.config.n_steps * agent.n_envs
    agent.learn(4 * per_update)
    holding = [
        alert.name for alert in agent.alerts.alerts if agent.alerts.streaks.get(alert.name, 0) >= alert.for_updates
    ]
    if holding:
        return sick(f"four updates raise {', '.join(holding)}", "docs/metrics.md says what each means and what to do.")
    return healthy("four updates raise no alert")


CHECKS = (
    Check("learner/first_log_ratio", "Does the policy train on what it acted on?", first_log_ratio),
    Check("learner/memory_isolation", "Does no environment see another's memory?", memory_isolation),
    Check("learner/memory_reset", "Does an episode begin without memory?", memory_reset),
    Check("learner/advantages", "Do advantages stop at episode ends?", advantages_by_hand),
    Check("learner/accumulation", "Do micro-batches add up to the batch?", accumulation),
    Check("learner/critic_gradients", "Does every critic weight receive gradient?", every_gradient),
    Check("learner/weights_move", "Does every weight move in an update?", every_weight),
    Check("learner/learning_rate", "Is the learning rate the schedule's?", learning_rate),
    Check("learner/return_scale", "Do predictions survive a move of the return scale?", scale_preserves),
    Check("learner/quantile_sides", "Do low levels learn low quantiles?", quantile_sides),
    Check("learner/repeatable", "Does one seed give one result?", repeatable),
    Check("learner/save_load", "Does a loaded agent act the same?", save_and_load),
    Check("learner/exploit", "Does an exploited agent act as its source?", exploit_is_whole),
    Check("learner/alerts", "Do the first updates raise no alert?", short_training),
)
