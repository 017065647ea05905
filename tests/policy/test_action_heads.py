"""Action heads against torch.distributions and numerical integration."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import distributions
from torch.testing import assert_close

from tailguard.errors import EnvContractError
from tailguard.policy.action_heads import ActionHead, make_action_head

SPACES = [
    spaces.Box(-2.0, 3.0, (2,)),
    spaces.Discrete(4, start=1),
    spaces.MultiDiscrete([2, 3, 5]),
    spaces.MultiBinary(3),
]


def sampled(head: ActionHead, parameters: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    return head.sample(parameters, head.noise(tuple(parameters.shape[:-1]), generator))


@pytest.mark.parametrize("bounds", ["clip", "squash"])
@pytest.mark.parametrize("space", SPACES, ids=lambda s: type(s).__name__)
def test_every_sample_lies_in_its_space_with_its_shape_and_type(space: spaces.Space, bounds: str) -> None:
    head = make_action_head(8, space, bounds, 0.5)  # type: ignore[arg-type]
    parameters = head(torch.randn(200, 8) * 5)
    for action in (sampled(head, parameters), head.mode(parameters)):
        assert action.shape == (200, head.action_dim)
        assert all(space.contains(a) for a in head.to_env(action.detach().numpy()))
        assert torch.isfinite(head.log_prob(parameters, action)).all()
        assert torch.isfinite(head.entropy(parameters)).all()


def test_categorical_matches_torch() -> None:
    torch.manual_seed(0)
    head = make_action_head(8, spaces.Discrete(5), "clip", 0.0)
    features = torch.randn(30, 8)
    reference = distributions.Categorical(logits=head.logits(features))  # type: ignore[operator]
    parameters = head(features)
    action = sampled(head, parameters)
    assert_close(head.log_prob(parameters, action), reference.log_prob(action.squeeze(-1)))
    assert_close(head.entropy(parameters), reference.entropy())


def test_categorical_samples_have_their_probabilities() -> None:
    head = make_action_head(1, spaces.Discrete(3), "clip", 0.0)
    wanted = torch.tensor([0.2, 0.5, 0.3])
    parameters = wanted.log().expand(60_000, 3)
    action = sampled(head, parameters, torch.Generator().manual_seed(0)).long().squeeze(-1)
    assert_close(torch.bincount(action, minlength=3) / 60_000, wanted, atol=0.01, rtol=0)


def test_ragged_choices_never_pick_what_a_dimension_does_not_have() -> None:
    head = make_action_head(4, spaces.MultiDiscrete([2, 7]), "clip", 0.0)
    parameters = head(torch.randn(5000, 4))
    action = sampled(head, parameters)
    assert action[:, 0].max() == 1
    assert action[:, 1].max() == 6
    laws = [distributions.Categorical(logits=logits) for logits in (parameters[:, :2], parameters[:, 7:])]
    log_probs = [law.log_prob(chosen) for law, chosen in zip(laws, action.T, strict=True)]
    assert_close(head.log_prob(parameters, action), log_probs[0] + log_probs[1])
    assert_close(head.entropy(parameters), laws[0].entropy() + laws[1].entropy())


def test_bernoulli_matches_torch() -> None:
    head = make_action_head(8, spaces.MultiBinary(3), "clip", 0.0)
    parameters = torch.randn(30, 3)
    reference = distributions.Independent(distributions.Bernoulli(logits=parameters), 1)
    action = sampled(head, parameters)
    assert_close(head.log_prob(parameters, action), reference.log_prob(action))
    assert_close(head.entropy(parameters), reference.entropy())


def test_gaussian_matches_torch() -> None:
    head = make_action_head(8, spaces.Box(-1.0, 1.0, (2,)), "clip", -0.5)
    parameters = head(torch.randn(30, 8))
    mean, log_std = parameters.chunk(2, -1)
    reference = distributions.Independent(distributions.Normal(mean, log_std.exp()), 1)
    action = sampled(head, parameters)
    assert_close(head.log_prob(parameters, action), reference.log_prob(action))
    assert_close(head.entropy(parameters), reference.entropy())


def test_a_squashed_density_integrates_to_one_and_has_the_stated_entropy() -> None:
    head = make_action_head(8, spaces.Box(-1.0, 1.0, (1,)), "squash", 0.0)
    parameters = torch.tensor([0.7, float(np.log(0.6))], dtype=torch.float64)
    pre_squash = torch.linspace(-8.0, 8.0, 400_001, dtype=torch.float64).unsqueeze(-1)
    log_density = head.log_prob(parameters.expand(len(pre_squash), 2), pre_squash)
    action = torch.tanh(pre_squash.squeeze(-1))
    assert float(torch.trapezoid(log_density.exp(), action)) == pytest.approx(1.0, abs=1e-4)
    entropy = float(torch.trapezoid(-log_density.exp() * log_density, action))
    assert float(head.entropy(parameters.float())) == pytest.approx(entropy, abs=5e-3)


def test_bounds_are_reached_and_never_passed() -> None:
    space = spaces.Box(np.array([0.0, -5.0], np.float32), np.array([10.0, 5.0], np.float32))
    for bounds in ("clip", "squash"):
        head = make_action_head(4, space, bounds, 0.0)  # type: ignore[arg-type]
        extreme = head.to_env(np.array([[50.0, -50.0], [0.0, 0.0]], np.float32))
        np.testing.assert_allclose(extreme, [[10.0, -5.0], [5.0, 0.0]], atol=1e-6)


def test_spaces_that_cannot_be_acted_in_are_refused() -> None:
    with pytest.raises(EnvContractError, match="finite low and high"):
        make_action_head(4, spaces.Box(-np.inf, 1.0, (1,)), "clip", 0.0)
    with pytest.raises(EnvContractError, match="Supported"):
        make_action_head(4, spaces.Text(3), "clip", 0.0)
