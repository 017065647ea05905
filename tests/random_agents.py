"""Random configurations of agents, and an environment of any spaces to train them in."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from tailguard import DistributionalPPO
from tests.environments import OneShot

ACTIVATIONS = ("tanh", "relu", "elu", "gelu", "silu", "leaky_relu")


class AnySpaces(OneShot):
    """Rewards follow from action and observation; episodes end by either kind at random; says what the world did."""

    def __init__(self, n_envs: int, seed: int, n_features: int, action_space: spaces.Space[Any]) -> None:
        super().__init__(n_envs, spaces.Box(-8.0, 8.0, (n_features,), np.float32), action_space)
        self.rng = np.random.default_rng(seed)
        self.exogenous = np.zeros((n_envs, 1))
        self.obs = self.reset()

    def has_attr(self, attr_name: str) -> bool:
        return hasattr(self, attr_name)

    def reset(self) -> Any:
        self.obs = self.rng.normal(size=(self.num_envs, *self.observation_space.shape)).astype(np.float32).clip(-8, 8)
        return self.obs

    def step_async(self, actions: Any) -> None:
        self.actions = np.asarray(actions, np.float64).reshape(self.num_envs, -1)

    def step_wait(self) -> Any:
        assert all(self.action_space.contains(self.shaped(row)) for row in self.actions)
        self.exogenous = self.rng.normal(size=(self.num_envs, 1))
        before = self.obs
        rewards = self.exogenous[:, 0] * self.actions.mean(1) + before.mean(1)
        after = self.reset()
        over, cut = self.rng.random(self.num_envs) < 0.1, self.rng.random(self.num_envs) < 0.5
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for n in over.nonzero()[0]:
            infos[n] = {"terminal_observation": before[n], "TimeLimit.truncated": bool(cut[n])}
            infos[n]["episode"] = {"r": float(rewards[n]), "l": 1, "t": 0.0}
        return after, rewards.astype(np.float32), over, infos

    def shaped(self, row: Any) -> Any:
        space = self.action_space
        if isinstance(space, spaces.Discrete):
            return int(row[0])
        return row.reshape(space.shape).astype(space.dtype)


class Settings(NamedTuple):
    """All that an agent is built from."""

    policy: str
    policy_kwargs: dict[str, Any]
    ppo: dict[str, Any]
    n_features: int
    action_space: spaces.Space[Any]
    n_envs: int
    normalized: bool

    def env(self, seed: int) -> VecEnv:
        env: VecEnv = AnySpaces(self.n_envs, seed, self.n_features, self.action_space)
        return VecNormalize(env, norm_reward=False) if self.normalized else env

    def agent(self) -> DistributionalPPO:
        return DistributionalPPO(self.policy, self.env(0), policy_kwargs=self.policy_kwargs, seed=1, **self.ppo)


def random_settings(rng: Random, largest: int) -> Settings:
    """Widths from 1 to `largest`, small ones as often as large ones; some of these configurations are refused."""
    n_features, space = rng.randint(1, 6), random_space(rng)
    policy = rng.choice(("MlpPolicy", "MlpLstmPolicy", "MlpLstmPolicy", "GRU"))
    n_envs, n_steps = rng.randint(1, 6), rng.randint(2, 24)
    ppo: dict[str, Any] = {
        "n_steps": n_steps,
        "sequence_length": rng.randint(1, n_steps),
        "n_epochs": rng.randint(1, 3),
        "gamma": rng.choice((0.5, 0.99, 1.0)),
        "gae_lambda": rng.choice((0.0, 0.9, 1.0)),
        "learning_rate": 10 ** rng.uniform(-5, -2),
        "ent_coef": rng.choice((0.0, 0.01)),
        "ev_reserve": rng.choice((0.0, 0.1, 0.5)),
        "normalize_advantage": rng.random() < 0.8,
        "hindsight": rng.random() < 0.2,
        "critic": random_critic(rng, largest),
        "risk": random_risk(rng, largest),
        "adversary": random_adversary(rng, n_features, space),
        "update_threads": rng.choice((1, 2)),
        **random_optimizer(rng),
        **maybe(rng, batch_size=rng.randint(1, n_steps * n_envs)),
        **maybe(rng, microbatch_size=rng.randint(1, n_steps)),
        **maybe(rng, target_kl=10 ** rng.uniform(-4, 0)),
        **maybe(rng, kl_penalty={"target": 10 ** rng.uniform(-4, 0)}),
        **maybe(rng, return_scale=rng.choice(({"enabled": False}, {"max_change": 2.0}))),
    }
    if ppo["ent_coef"]:
        ppo |= maybe(rng, entropy={"decay_updates": 3, "plateau_window": rng.choice((0, 2)), "ent_coef_min": 0.001})
    name = "MlpLstmPolicy" if policy == "GRU" else policy
    kwargs = random_policy(rng, policy, n_features, space, largest)
    return Settings(name, kwargs, ppo, n_features, space, n_envs, rng.random() < 0.3)


def maybe(rng: Random, **settings: Any) -> dict[str, Any]:
    return settings if rng.random() < 0.25 else {}


def width(rng: Random, largest: int) -> int:
    return max(1, round(largest ** rng.random()))


def random_space(rng: Random) -> spaces.Space[Any]:
    kind = rng.choice(("Box", "Discrete", "MultiDiscrete", "MultiBinary"))
    if kind == "Box":
        shape = rng.choice(((1,), (3,), (2, 2)))
        low, high = rng.choice(((-1.0, 1.0), (0.0, 3.0), (-2.0, 5.0)))
        return spaces.Box(low, high, shape, np.float32)
    if kind == "Discrete":
        return spaces.Discrete(rng.randint(1, 9), start=rng.choice((0, -2, 5)))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete([rng.randint(1, 6) for _ in range(rng.randint(1, 4))])
    return spaces.MultiBinary(rng.randint(1, 5))


def random_policy(rng: Random, policy: str, n_features: int, space: spaces.Space[Any], largest: int) -> dict[str, Any]:
    layers = [[width(rng, largest) for _ in range(rng.choice((0, 1, 1, 2, 3)))] for _ in range(2)]
    kwargs: dict[str, Any] = {
        "net_arch": rng.choice((layers[0], {"pi": layers[0], "vf": layers[1]})),
        "ortho_init": rng.random() < 0.8,
        **maybe(rng, hidden_from_critics=[rng.randrange(n_features)]),
    }
    if any(layers[0] + layers[1]) and rng.random() < 0.5:
        kwargs["activation_fn"] = rng.choice(ACTIVATIONS)
    if policy != "MlpPolicy":
        kwargs |= {"lstm_hidden_size": width(rng, largest), "n_lstm_layers": rng.choice((1, 1, 1, 2, 3))}
        kwargs |= {"memory": "gru"} if policy == "GRU" else {}
        kwargs |= maybe(rng, recurrent_init=rng.choice(("orthogonal", "uniform", "mixed")))
    if isinstance(space, spaces.Box):
        kwargs |= {"log_std_init": rng.uniform(-3, 1), "action_bounds": rng.choice(("clip", "squash"))}
        kwargs |= maybe(rng, log_std_end=-3.0)
    return kwargs


def random_critic(rng: Random, largest: int) -> dict[str, Any]:
    critic: dict[str, Any] = {"n_quantiles": width(rng, min(largest, 64)), "twin": rng.random() < 0.5}
    if rng.random() < 0.4:
        critic |= {"kind": "categorical", "n_atoms": rng.randint(11, 11 + largest), **maybe(rng, support=4.0)}
    else:
        critic |= maybe(rng, huber_kappa=rng.choice((0.0, 1.0)))
        mode = rng.choice(("mean_only", "mean_and_variance", "per_quantile"))
        critic |= maybe(rng, value_clip=rng.choice((0.0, 0.2)), value_clip_mode=mode)
    if critic["twin"] and rng.random() < 0.5:
        critic["aggregation"] = "min"
    if rng.random() < 0.4:
        critic |= {"grid": "tail", "tail_alpha": rng.choice((0.05, 0.5, 1.0))}
    return critic


def random_risk(rng: Random, largest: int) -> dict[str, Any]:
    mode = rng.choice(("none", "none", "episode", "nested"))
    if mode == "none":
        return {}
    risk: dict[str, Any] = {"mode": mode, "alpha": rng.choice((0.05, 0.5, 1.0)), "weight": rng.choice((0.0, 0.5, 1.0))}
    if mode == "episode":
        risk |= {"units": width(rng, largest), **maybe(rng, horizon=rng.randint(1, 12), window=rng.randint(1, 30))}
        if rng.random() < 0.5:
            risk = {**risk, "weight": None, "cvar_limit": rng.uniform(-2, 1), **maybe(rng, dual_delay=0.0)}
    return risk


def random_adversary(rng: Random, n_features: int, space: spaces.Space[Any]) -> dict[str, Any] | None:
    if rng.random() < 0.75:
        return None
    mode = rng.choice(("regulariser", "mixed"))
    adversary = {"mode": mode, "epsilon": rng.choice((0.0, 0.1)), "norm": rng.choice(("linf", "l2")), "steps": 2}
    adversary |= {"weight": 0.5} if mode == "regulariser" else {"ratio": rng.choice((0.0, 0.5, 1.0))}
    adversary |= {"method": rng.choice(("pgd", "sgld")), "restarts": rng.choice((1, 2))}
    return adversary | maybe(rng, spare=[rng.randrange(n_features)])


def random_optimizer(rng: Random) -> dict[str, Any]:
    optimizer = rng.choice(("adam", "adamw", "upgd", "adaptive_upgd", "upgdw"))
    options: dict[str, Any] = {}
    if optimizer.startswith("adam"):
        options |= maybe(rng, weight_decay=0.01) | maybe(rng, amsgrad=True) | maybe(rng, betas=[0.8, 0.9])
        options |= maybe(rng, fused=False, foreach=rng.random() < 0.5)
    else:
        options |= maybe(rng, sigma=rng.choice((0.0, 0.01))) | maybe(rng, gate="minmax")
        options |= maybe(rng, adaptive_noise=True) | maybe(rng, protect="noise") | maybe(rng, fused=False)
    vgs = maybe(rng, vgs={"warmup_steps": rng.choice((0, 2)), "statistic": rng.choice(("elementwise", "mean", "norm"))})
    return {"optimizer": optimizer, **({"optimizer_kwargs": options} if options else {}), **vgs}
