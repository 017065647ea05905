"""Checks of any trading environment that can be built on prices we make: when it fills, what it shows, what it charges.

Nothing is assumed about actions but that they are few. One price at a time is changed a little; what an observation and
what the money of one decision depend on says which prices were seen and which were paid.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from tailguard.doctor.checks import Check, Verdict, healthy, judged, not_applicable, sick
from tailguard.doctor.patient import Patient, Prices

Actions = list[Any]
Maker = Callable[[Prices], gym.Env[Any, Any]]

N_BARS, N_STEPS = 96, 32
DECISIONS = (8, 13, 19)  # steps at which one action differs
NUDGE = 1.01  # one price, changed so much; ten times that of a sizing rule's second thoughts would still be seen
FIRST_ORDER = 0.2  # of the largest effect: a price that is paid, not one that only sized the trade
FEES = re.compile("fee|commission|cost|spread|slippage")
BOOKS = re.compile("profit|value|valuation|equity|balance|cash|worth|wealth|nav|portfolio")
NO_PRICES = "make_env has no argument `prices`, so its market is out of sight (docs/doctor.md says how to give it one)"


def made_prices(spread: float = 0.01, seed: int = 0) -> Prices:
    """Bars with a gap before each open, so that an open is not the close before it; all equal at spread 0."""
    rng = np.random.default_rng(seed)
    path = 100.0 * np.exp(np.cumsum(rng.normal(0.0, spread, 2 * N_BARS)))
    return bars_of(path[::2], path[1::2])


def bars_of(opened: NDArray[np.float64], closed: NDArray[np.float64]) -> Prices:
    return {
        "open": opened,
        "high": np.maximum(opened, closed),
        "low": np.minimum(opened, closed),
        "close": closed,
        "volume": np.full(len(closed), 1e6),
    }


def nudged(prices: Prices, moment: int) -> Prices:
    """The same bars with one price changed; moments count opens and closes in turn."""
    path = np.stack([prices["open"], prices["close"]], 1).reshape(-1)
    path[moment] *= NUDGE
    return bars_of(path[::2].copy(), path[1::2].copy())


@dataclass(frozen=True)
class Trip:
    """A course through an environment: what was seen before every step, what was earned, what was said at the end."""

    seen: list[NDArray[Any]]
    earned: float
    info: Mapping[str, Any]


def trip(make: Maker, prices: Prices, actions: Actions) -> Trip:
    """Take the actions; an episode that ends early earns no more."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (environments that draw from the global stream must repeat themselves here too)
    env = make(prices)
    try:
        observation, info = env.reset(seed=0)
        seen, earned = [], 0.0
        for action in actions:
            seen.append(np.array(spaces.flatten(env.observation_space, observation)))
            observation, reward, terminated, truncated, info = env.step(action)
            earned += float(reward)
            if terminated or truncated:
                break
        return Trip(seen, earned, dict(info))
    finally:
        env.close()


def choices(make: Maker) -> Actions:
    """A few actions that differ as much as possible; none for spaces we cannot read."""
    space = make(made_prices()).action_space
    if isinstance(space, spaces.Discrete):
        return [int(space.start) + n for n in range(min(int(space.n), 5))]
    if isinstance(space, spaces.Box):
        low, high = np.clip(space.low, -1.0, None), np.clip(space.high, None, 1.0)
        return [np.asarray(action, space.dtype) for action in (low, (low + high) / 2, high)]
    return []


def deviating(base: Any, other: Any, at: int | None) -> Actions:
    """The base action all the time, but for one step."""
    return [other if step == at else base for step in range(N_STEPS)]


@dataclass(frozen=True)
class Timing:
    """Moments (open, close, open, ...) relative to the decision's step: the newest in sight, the first that is paid."""

    seen: int
    paid: int

    @property
    def lag(self) -> int:
        """Half bars between what is seen and what is paid."""
        return self.paid - self.seen

    @property
    def price(self) -> str:
        return "close" if self.paid % 2 else "open"


def action_pairs(make: Maker) -> list[tuple[Any, Any]]:
    """The two pairs of actions whose difference in one step moves the money most; those that move none are left out."""
    prices = made_prices()

    def response(pair: tuple[Any, Any]) -> float:
        base = trip(make, prices, deviating(*pair, None)).earned
        return sum(abs(trip(make, prices, deviating(*pair, at)).earned - base) for at in DECISIONS)

    found = [(response(pair), pair) for pair in permutations(choices(make), 2)]
    ordered = sorted((item for item in found if item[0] > 0.0), key=lambda item: -item[0])
    return [pair for _, pair in ordered[:2]]


@lru_cache(maxsize=1)  # two lines ask the same
def timing(make: Maker) -> Timing | None:
    """Which price is paid, and which is seen, in a decision at step 0; None when no price moves the money of one."""
    found = [pair_timing(make, pair) for pair in action_pairs(make)]
    known = [(paid, seen) for paid, seen in found if paid is not None]
    if not known:
        return None
    return Timing(max(seen for _, seen in found), min(paid for paid, _ in known))


def pair_timing(make: Maker, pair: tuple[Any, Any]) -> tuple[int | None, int]:
    """(first moment paid, newest moment seen), relative to the step of the decision."""
    courses = [deviating(*pair, at) for at in (None, *DECISIONS)]
    prices = made_prices()
    before = [trip(make, prices, course) for course in courses]
    effect = np.zeros((len(DECISIONS), 2 * N_BARS))  # of each moment on the money of each decision
    newest = dict.fromkeys(DECISIONS, -(10**6))
    for moment in range(2 * N_BARS):
        after = [trip(make, nudged(prices, moment), course) for course in courses]
        gained = np.array([now.earned - then.earned for now, then in zip(after, before, strict=True)])
        effect[:, moment] = np.abs(gained[1:] - gained[0])
        for at in DECISIONS:
            if not np.array_equal(after[0].seen[at], before[0].seen[at], equal_nan=True):
                newest[at] = moment
    large = effect > FIRST_ORDER * effect.max()
    paid = [{int(moment) - 2 * at for moment in np.flatnonzero(row)} for at, row in zip(DECISIONS, large, strict=True)]
    common = set.intersection(*paid) if effect.max() > 0.0 else set()  # what moves with the decision
    return min(common, default=None), max(moment - 2 * at for at, moment in newest.items())


def on_prices(examine: Callable[[Maker], Verdict]) -> Callable[[Patient], Verdict]:
    """A check of an environment built on our prices; not applicable where it cannot be."""

    def check(patient: Patient) -> Verdict:
        if patient.market is not None:
            return not_applicable("the market/ lines look into a market of ours")
        if patient.on_prices is None:
            return not_applicable(NO_PRICES)
        if not choices(patient.on_prices):
            return not_applicable(f"actions of {type(patient.action_space).__name__} are not tried")
        return examine(patient.on_prices)

    return check


def bars(moments: int) -> str:
    """A span of opens and closes in words."""
    return {1: "half a bar", 2: "one bar"}.get(moments, f"{moments / 2:g} bars")


def look_ahead(make: Maker) -> Verdict:
    found = timing(make)
    if found is None:
        return not_applicable("no price moves the money of a single decision")
    return judged(
        found.lag >= 0,
        "no observation holds a price later than the first one paid"
        if found.lag >= 0
        else f"observations hold prices up to {bars(-found.lag)} later than the first one paid",
        "The observation holds prices from after the trade: shift the features, or fit scalers on the past alone.",
    )


def fills(make: Maker) -> Verdict:
    found = timing(make)
    if found is None:
        return not_applicable("no price moves the money of a single decision")
    if found.lag < 0:
        return sick("trades fill at prices from before the observation", "See prices/look_ahead.")
    if found.lag == 0:
        return sick(
            f"a decision is filled at the newest {found.price} in its own observation",
            "That price is history when the decision is made; it pays in full for whatever happens until the next "
            "one. Fill at the next open, or shift the observation by one bar.",
        )
    return healthy(
        f"a decision is filled at the {found.price} that comes {bars(found.lag)} after the newest price it saw"
    )


def costs(make: Maker) -> Verdict:
    """On prices that never move nothing can be earned, so all that trading changes is its cost."""
    prices, rng = made_prices(spread=0.0), np.random.default_rng(0)
    tried = choices(make)
    held = [trip(make, prices, deviating(action, action, None)) for action in tried]
    turned = trip(make, prices, [tried[rng.integers(len(tried))] for _ in range(N_STEPS)])
    paid = min(still.earned for still in held) - turned.earned
    if paid > 1e-12:
        return healthy(f"on prices that never move {N_STEPS} random actions cost {paid:.3g} of reward")
    said = [*losses(turned.info, [still.info for still in held]), *declared_fees(make(prices))]
    where = f", but the environment has costs: {', '.join(said)}" if said else ""
    return sick(
        f"on prices that never move {N_STEPS} random actions cost nothing of the reward{where}",
        "Trading is free to the agent: whatever trades most looks best. "
        + ("Reward the change of the account after costs." if said else "Charge fees and spread in the reward."),
    )


def losses(turned: Mapping[str, Any], held: list[Mapping[str, Any]]) -> Iterator[str]:
    """Accounts in the last info that random trading made smaller than any steady action did."""
    for name, value in turned.items():
        steady = [info.get(name) for info in held]
        if BOOKS.search(name.lower()) and all(isinstance(x, int | float | np.number) for x in (value, *steady)):
            least = min(float(x) for x in steady if x is not None)
            if float(value) < least - 1e-9 * abs(least):
                yield f"{name} falls from {least:.4g} to {float(value):.4g}"


def declared_fees(env: gym.Env[Any, Any]) -> Iterator[str]:
    """Attributes of the environment that are named like costs and are not zero."""
    env = env.unwrapped
    for name, value in sorted(vars(env).items()):
        if FEES.search(name.lower()) and isinstance(value, int | float | np.number) and value:
            yield f"{name} = {value:g}"


CHECKS = (
    Check("prices/look_ahead", "Is no price seen before it is paid?", on_prices(look_ahead)),
    Check("prices/fills", "Are trades filled at prices not yet seen?", on_prices(fills)),
    Check("prices/costs", "Are the costs of trading in the reward?", on_prices(costs)),
)
