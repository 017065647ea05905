"""D1-D7, E1-E5 on real agents: gradients, clipping, micro-batches, skipped steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.logger import CSVOutputFormat, Logger

from tailguard.errors import TrainingDivergedError
from tailguard.health import metrics
from tailguard.policy import State
from tailguard.ppo.update import LOSSES, batch_loss
from tailguard.rollout.sequences import reserve
from tests.agents import collected, gradient_of, logged, step_on, tiny_agent


@pytest.mark.parametrize("kind", ["quantile", "categorical"])
@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpPolicy"])
def test_every_parameter_moves_in_one_update(policy: str, kind: str) -> None:
    agent = collected(tiny_agent(policy=policy, critic={"kind": kind}))
    before = {name: p.detach().clone() for name, p in agent.policy.named_parameters()}
    agent.train()
    still = [name for name, p in agent.policy.named_parameters() if torch.equal(p, before[name])]
    assert still == []


def test_critics_learn_from_the_value_loss_alone_and_the_actor_not_at_all_from_it() -> None:
    agent = collected(tiny_agent())
    batch, policy = agent.sequences(), agent.policy
    agent.learner.vector.zero_gradients()
    for critic, state in zip(policy.critics, batch.critic_states, strict=True):
        critic.head.loss(critic(batch.observations, batch.layout(), state), batch.target, None).mean().backward()
    without = [n for n, p in policy.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == [n for n, _ in policy.named_parameters() if not n.startswith("critics.")]


def test_monitoring_passes_leave_the_training_graph_alone() -> None:
    agent = collected(tiny_agent())
    for trunk in (agent.policy.actor, *(critic.trunk for critic in agent.policy.critic_list)):
        trunk.register_forward_hook(lambda *_: None)  # through torch
    batch = agent.sequences()
    expected = gradient_of(agent, batch, None)
    agent.learner.vector.zero_gradients()
    loss, _ = batch_loss(agent.learner, batch, agent.schedules())
    agent.predict_quantiles(np.zeros((3, 2), np.float32))  # between forward and backward
    agent.predict(np.ones((2, 2), np.float32))
    loss.backward()
    torch.testing.assert_close(agent.learner.vector.gradient, expected, atol=0, rtol=0)


def test_twin_critics_are_separate_and_start_apart() -> None:
    first, second = tiny_agent().policy.critics
    pairs = zip(first.named_parameters(), second.named_parameters(), strict=True)
    for (name, one), (_, two) in pairs:
        assert one.data_ptr() != two.data_ptr()
        if "weight" in name:
            assert not torch.equal(one, two), name


def test_old_quantiles_are_stored_per_critic() -> None:
    buffer = collected(tiny_agent()).rollout_buffer
    assert buffer.quantiles.shape == (2, 32, 4, 8)
    assert not np.allclose(buffer.quantiles[0], buffer.quantiles[1])


@pytest.mark.parametrize("mode", ["mean_only", "mean_and_variance", "per_quantile"])
def test_value_clipping_is_pessimistic_per_sample_and_never_clips_the_target(mode: str) -> None:
    agent = collected(tiny_agent(critic={"value_clip": 0.05, "value_clip_mode": mode}))
    batch, head = agent.sequences(), agent.policy.critics[0].head
    critic = agent.policy.critics[0]
    output = critic(batch.observations, batch.layout(), batch.critic_states[0]).detach()
    old = batch.old_quantiles[0]
    torch.testing.assert_close(head.loss(output, batch.target, old), head.loss(output, batch.target, None))
    moved = output + 1.0  # far outside the range
    clipped, plain = head.loss(moved, batch.target, old), head.loss(moved, batch.target, None)
    assert (clipped >= plain - 1e-6).all()
    assert (clipped > plain + 1e-3).any()
    far_target = batch.target + 100.0  # were the target clipped, the loss could not grow with it
    assert (head.loss(moved, far_target, old) > plain + 10.0).all()


def test_value_clipping_is_off_by_default() -> None:
    assert tiny_agent().config.critic.value_clip is None


def test_clipping_looks_at_each_critics_own_old_quantiles() -> None:
    agent = collected(tiny_agent(critic={"value_clip": 1e-4, "value_clip_mode": "per_quantile"}))
    batch = agent.sequences()
    swapped = replace(batch, old_quantiles=batch.old_quantiles.flip(0))
    value_loss = LOSSES.index(metrics.VALUE_LOSS)
    own, others = (batch_loss(agent.learner, each, agent.schedules())[1][value_loss] for each in (batch, swapped))
    assert others > own


def test_the_number_of_threads_changes_no_bit() -> None:
    gradients = [
        gradient_of(agent, agent.sequences(), None)
        for agent in (collected(tiny_agent(update_threads=n)) for n in (1, 2, 3))
    ]
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_gradient_norms_of_both_critics_are_logged_as_norms_with_their_ratio() -> None:
    agent = collected(tiny_agent(n_epochs=1, batch_size=128, ev_reserve=0.0))  # one batch, so one step
    squares: dict[str, list[float]] = {}
    for name, parameter in agent.policy.named_parameters():
        owner = name[:9] if name.startswith("critics.") else "actor"
        parameter.register_hook(lambda g, owner=owner: squares.setdefault(owner, []).append(float(g.square().sum())))
    agent.train()
    figures = logged(agent)
    first, second = (sum(squares[f"critics.{c}"]) ** 0.5 for c in range(2))
    assert figures["train/critic1_grad_norm"] == pytest.approx(first, rel=1e-4)
    assert figures["train/critic2_grad_norm"] == pytest.approx(second, rel=1e-4)
    assert figures["train/critics_grad_ratio"] == pytest.approx(first / second, rel=1e-4)
    assert figures["train/grad_norm"] == pytest.approx(sum(map(sum, squares.values())) ** 0.5, rel=1e-4)
    assert not [name for name in figures if name.startswith("warn/")]


def mute(agent: Any, critic: int, factor: float) -> None:
    """Scale every gradient of one critic."""
    for parameter in agent.policy.critics[critic].parameters():
        parameter.register_hook(lambda gradient: gradient * factor)


def test_a_starved_critic_raises_the_imbalance_alert() -> None:
    agent = collected(tiny_agent())
    mute(agent, 0, 1e-4)
    agent.train()
    assert logged(agent)["warn/twin_critics_gradient_imbalance"] == 1.0
    assert "warn/critic1_vanishing_gradients" not in logged(agent)


@pytest.mark.parametrize("critic", [0, 1])
def test_a_detached_critic_raises_the_vanishing_alert_and_no_ratio_is_logged(critic: int) -> None:
    agent = collected(tiny_agent())
    mute(agent, critic, 0.0)
    agent.train()
    figures = logged(agent)
    assert figures[f"warn/critic{critic + 1}_vanishing_gradients"] == 1.0
    assert f"warn/critic{2 - critic}_vanishing_gradients" not in figures
    assert "train/critics_grad_ratio" not in figures


def test_nothing_about_twins_is_logged_with_a_single_critic() -> None:
    agent = collected(tiny_agent(critic={"twin": False}))
    agent.train()
    assert not [name for name in logged(agent) if "critic1" in name or "critic2" in name or "critics" in name]


def test_the_reserve_never_enters_a_gradient() -> None:
    agent = collected(tiny_agent(ev_reserve=0.25))
    buffer = agent.rollout_buffer
    training, reserved = reserve(16, 0.25, np.random.default_rng(0))
    assert len(reserved) == 4
    assert not set(training) & set(reserved)
    agent.train()
    reference = {n: p.detach().clone() for n, p in agent.policy.named_parameters()}
    # the same update with the reserved sequences' actions spoiled gives the same weights
    twin = collected(tiny_agent(ev_reserve=0.25))
    for chunk, env in held_out(twin):
        twin.rollout_buffer.actions[8 * chunk : 8 * chunk + 8, env] = (
            1 - twin.rollout_buffer.actions[8 * chunk : 8 * chunk + 8, env]
        )
    twin.train()
    for name, parameter in twin.policy.named_parameters():
        assert torch.equal(parameter, reference[name]), name
    assert buffer.full


def held_out(agent: Any) -> list[tuple[int, int]]:
    """(chunk, environment) of the sequences that the next update sets aside, of 16."""
    probe = np.random.default_rng()
    probe.bit_generator.state = agent.randomness.batches.bit_generator.state
    return [divmod(int(sequence), 4) for sequence in reserve(16, 0.25, probe)[1]]


@torch.no_grad()
def explained(agent: Any, chosen: list[tuple[int, int]]) -> float:
    """Share of the returns' variance that the critics explain now, each step by step from its stored memory."""
    buffer, scale, values, returns = agent.rollout_buffer, agent.return_scale.snapshot, [], []
    for chunk, env in chosen:
        states = [state.select([env]) for state in buffer.critic_states[chunk]]
        for t in range(8 * chunk, 8 * chunk + 8):
            alive, laws = torch.from_numpy(~buffer.starts[t, [env]]).float(), []
            for c, critic in enumerate(agent.policy.critics):
                judged, states[c] = critic.step(torch.from_numpy(buffer.observations[t, [env]]), states[c].keep(alive))
                laws.append(judged.quantiles)
            values.append(scale.mean + scale.std * float(torch.stack(laws).mean()))
            returns.append(buffer.returns[t, env])
    return float(1.0 - np.var(np.subtract(returns, values)) / np.var(returns))


def test_explained_variance_uses_the_final_weights_on_the_reserve() -> None:
    agent = collected(tiny_agent(ev_reserve=0.25, learning_rate=1e-2, n_epochs=20))
    chosen = held_out(agent)
    before = explained(agent, chosen)
    agent.train()
    assert logged(agent)["train/explained_variance"] == pytest.approx(explained(agent, chosen), abs=1e-5)
    assert abs(logged(agent)["train/explained_variance"] - before) > 1e-2


def test_a_reserve_that_is_all_masked_is_counted_and_skipped() -> None:
    agent = collected(tiny_agent(ev_reserve=0.25))
    for chunk, env in held_out(agent):
        agent.rollout_buffer.valid[8 * chunk : 8 * chunk + 8, env] = False
    agent.train()
    figures = logged(agent)
    assert "train/explained_variance" not in figures
    assert figures["warn/ev_reserve_all_masked"] == 1.0


@pytest.mark.parametrize("micro", [1, 3, 5])
def test_micro_batches_give_the_full_batchs_gradient_also_with_unequal_masks(micro: int) -> None:
    agent = collected(tiny_agent())
    rng = np.random.default_rng(0)
    agent.rollout_buffer.valid[:] = rng.random((32, 4)) < rng.random(4)
    agent.rollout_buffer.valid[:8, 1] = False  # one whole sequence without a valid sample
    batch = agent.sequences()
    whole, pieces = gradient_of(agent, batch, None), gradient_of(agent, batch, micro)
    assert float((whole - pieces).norm() / whole.norm()) <= 1e-5


def test_microbatch_size_changes_nothing_but_rounding() -> None:
    plain, split = collected(tiny_agent()), collected(tiny_agent(microbatch_size=16))
    plain.train()
    split.train()
    for one, two in zip(plain.policy.parameters(), split.policy.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


def test_a_batch_without_valid_samples_takes_no_step() -> None:
    agent = collected(tiny_agent())
    agent.rollout_buffer.valid[:] = False
    before = agent.learner.vector.flat.detach().clone()
    assert step_on(agent, agent.sequences()) is None
    assert torch.equal(agent.learner.vector.flat, before)


def test_an_update_of_empty_epochs_steps_nowhere_counts_nothing_and_warns() -> None:
    agent = collected(tiny_agent())
    agent.rollout_buffer.valid[:] = False
    before = agent.learner.vector.flat.detach().clone()
    agent.train()
    assert torch.equal(agent.learner.vector.flat, before)
    assert agent._n_updates == 0
    assert logged(agent)["warn/empty_epoch"] == 1.0


def test_masked_samples_do_not_enter_the_gradient() -> None:
    agent = collected(tiny_agent())
    agent.rollout_buffer.valid[3:6, 2] = False
    batch = agent.sequences()
    expected = gradient_of(agent, batch, None)
    spoiled = replace(
        batch, target=torch.where(batch.valid.unsqueeze(-1), batch.target, torch.full_like(batch.target, 1e6))
    )
    torch.testing.assert_close(gradient_of(agent, spoiled, None), expected, atol=0, rtol=0)


def test_a_gradient_that_is_not_finite_skips_the_step_and_leaves_weights_finite() -> None:
    agent = collected(tiny_agent(n_epochs=1))
    spoiled = {"left": 1}

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        if spoiled["left"]:
            spoiled["left"] -= 1
            return gradient * float("nan")
        return gradient

    agent.policy.actor.layers[0].weight.register_hook(spoil)
    agent.train()
    assert agent.learner.skipped.total == 1
    assert agent.learner.skipped.in_a_row == 0
    assert torch.isfinite(agent.learner.vector.flat).all()
    assert logged(agent)["warn/nonfinite_steps"] == 1.0


def test_training_stops_after_too_many_skipped_steps_in_a_row_with_weights_as_they_were() -> None:
    agent = collected(tiny_agent(max_skipped_steps=3, n_epochs=4))
    agent.policy.actor.layers[0].weight.register_hook(lambda gradient: gradient * float("inf"))
    before = agent.learner.vector.flat.detach().clone()
    seen = np.zeros((1, 2), np.float32)
    law = agent.predict_quantiles(seen)
    with pytest.raises(TrainingDivergedError, match="3 optimizer steps in a row"):
        agent.train()
    span = agent.learner.vector.span("actor")
    assert torch.equal(agent.learner.vector.flat[span], before[span])
    np.testing.assert_allclose(agent.predict_quantiles(seen), law, rtol=1e-4)


def test_the_whole_gradient_is_clipped_to_its_norm() -> None:
    agent = collected(tiny_agent(max_grad_norm=0.01))
    step_on(agent, agent.sequences())
    assert agent.learner.vector.flat.grad is not None
    assert float(agent.learner.vector.flat.grad.norm()) == pytest.approx(0.01, rel=1e-4)


def test_an_update_stops_after_the_epoch_that_went_too_far() -> None:
    agent = tiny_agent(target_kl=1e-9, n_epochs=7, learning_rate=1e-2)
    collected(agent)
    agent.train()
    assert agent._n_updates == 1
    free = collected(tiny_agent(n_epochs=7, learning_rate=1e-2))
    free.train()
    assert free._n_updates == 7


def test_the_kl_penalty_pulls_the_policy_back() -> None:
    def divergence(**settings: Any) -> float:
        agent = collected(tiny_agent(n_epochs=10, learning_rate=1e-2, **settings))
        agent.train()
        return float(logged(agent)["train/approx_kl"])

    free = divergence()
    held = divergence(kl_penalty={"target": 1e-4, "beta": 100.0})
    assert held < 0.5 * free


def test_the_learning_rate_is_told_at_every_update() -> None:
    agent = collected(tiny_agent())
    agent.config = agent.config.replace(learning_rate=5e-4)
    agent.train()
    assert {group["lr"] for group in agent.learner.optimizer.param_groups} == {5e-4}
    assert logged(agent)["train/learning_rate"] == 5e-4


def test_lstm_figures_are_logged_per_trunk_and_layer() -> None:
    agent = tiny_agent(policy_kwargs={"n_lstm_layers": 2})
    collected(agent)
    agent.train()
    figures = logged(agent)
    for trunk in ("actor", "critic"):
        for layer in range(2):
            for part in ("", "_cell"):
                for figure in ("norm", "mean", "std"):
                    assert np.isfinite(figures[f"lstm/{trunk}_layer{layer}{part}_{figure}"])
    assert not [name for name in figures if name.startswith("warn/")]


def test_saturated_and_exploding_memories_raise_their_alerts() -> None:
    agent = collected(tiny_agent())
    assert agent.live is not None
    ones = torch.ones_like(agent.live.actor_state.hidden)
    agent.live.actor_state = State(ones, 1e4 * ones)
    agent.live.critic_states = [State(-ones, ones), State(-ones, ones)]
    agent.train()
    assert logged(agent)["warn/lstm_explosion"] == 1.0
    assert logged(agent)["warn/lstm_saturation"] == 1.0


def test_alerts_reach_a_csv_reader(tmp_path: Any) -> None:
    agent = tiny_agent()
    agent.set_logger(Logger(str(tmp_path), [CSVOutputFormat(str(tmp_path / "progress.csv"))]))
    collected(agent)
    mute(agent, 0, 0.0)
    agent.train()
    agent.logger.dump(1)
    agent.logger.close()
    assert "warn/critic1_vanishing_gradients" in (tmp_path / "progress.csv").read_text()
