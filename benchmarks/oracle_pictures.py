"""Pictures of the oracle markets and their optima, into docs/img/.

python -m benchmarks.oracle_pictures
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from tailguard.env import replay
from tailguard.env.oracle import stretches_env
from tailguard.market.oracles import CrashMarket, OracleMarket, RegimeMarket, oracle_market
from tailguard.market.oracles.base import solved

IMG = Path(__file__).resolve().parents[1] / "docs" / "img"
BARS = 300
plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
plt.rcParams.update(
    {"svg.hashsalt": "tailguard", "svg.fonttype": "none"}
)  # the same picture is the same file, and small


def save(figure: plt.Figure, name: str) -> None:
    """SVG, without the date that would change it every time."""
    figure.tight_layout()
    figure.savefig(IMG / f"oracle-{name}.svg", metadata={"Date": None})
    plt.close(figure)


def band(axis: plt.Axes, market: OracleMarket, state: str) -> None:
    """The no-trade region over the information state."""
    best = solved(market)[1].band
    axis.fill_between(best.grid, best.low, best.high, alpha=0.3, label="do nothing")
    axis.plot(best.grid, best.low, lw=1, label="buy up to")
    axis.plot(best.grid, best.high, lw=1, label="sell down to")
    axis.set(xlabel=state, ylabel="weight held", ylim=(-1.1, 1.1))
    axis.legend(frameon=False, fontsize=8)


def played(market: OracleMarket, n_bars: int = BARS) -> tuple[np.ndarray, np.ndarray]:
    """Prices and the weights of the optimal policy over one stretch."""
    env = stretches_env(market, 3, 1, n_bars)
    record = replay(env, market.policy(), n_bars)
    return env.bars.close[record.bar[:, 0]], record.weights[:, 0]


def pair_of_axes() -> tuple[plt.Figure, np.ndarray]:
    return plt.subplots(1, 2, figsize=(8.4, 2.8))


def signal() -> None:
    market = oracle_market("signal")
    figure, (left, right) = pair_of_axes()
    band(left, market, "signal, in standard deviations")
    left.set_xlim(-3, 3)
    z = market.path(BARS + 2, 3).hidden["signal"]
    _, weights = played(market)
    right.plot(z[1 : BARS + 1], lw=0.8, label="signal")
    right.plot(weights[:, 0], lw=1, label="weight of the optimum")
    right.set(xlabel="bar")
    right.legend(frameon=False, fontsize=8)
    save(figure, "signal")


def regime() -> None:
    market = RegimeMarket()
    figure, (left, right) = pair_of_axes()
    band(left, market, "log-odds that the next bar's drift is up")
    path = market.path(BARS + 2, 3)
    belief, beliefs = np.zeros(1), []
    for r in path.returns[1 : BARS + 1]:
        belief = market.learned(belief, r)
        beliefs.append(belief[0])
    _, weights = played(market)
    right.fill_between(range(BARS), -1, path.hidden["state"][1 : BARS + 1], alpha=0.2, lw=0, label="drift up (hidden)")
    right.plot(np.tanh(np.array(beliefs) / 2), lw=0.8, label="belief, -1 to 1")
    right.plot(weights[:, 0], lw=1, label="weight of the optimum")
    right.set(xlabel="bar")
    right.legend(frameon=False, fontsize=8, loc="lower right")
    save(figure, "regime")


def crash() -> None:
    market = CrashMarket()
    limited, constant = market.cvar_limited(0.05, -0.04), market.constant_weight(0.05, -0.04)
    figure, (left, right) = pair_of_axes()
    x = np.linspace(-0.15, 0.12, 200)
    for left_bars in (250, 150, 50, 10):
        step = np.full(len(x), 250 - left_bars)
        left.plot(100 * x, limited.policy.table.weight(step, x, 0 * x), lw=1, label=f"{left_bars} bars left")
    left.axhline(constant.weight, color="grey", lw=0.8, ls="--", label="best constant weight")
    left.set(xlabel="return of the episode so far, %", ylabel="weight", title="5 % CVaR at -4 % or better")
    left.legend(frameon=False, fontsize=8)
    totals = {
        "optimum without a limit": replay(stretches_env(market, 1, 4000, 250), market.policy(), 250),
        "optimum under the limit": replay(stretches_env(market, 1, 4000, 250), limited.policy, 250),
    }
    for name, record in totals.items():
        total = 100 * record.reward.sum(axis=0)
        right.hist(total, bins=np.linspace(-40, 25, 66), histtype="step", label=name)
    right.set(xlabel="return of an episode, %", yticks=[])
    right.legend(frameon=False, fontsize=8, loc="upper left")
    save(figure, "crash")


def pairs() -> None:
    market = oracle_market("pairs")
    figure, (left, right) = pair_of_axes()
    band(left, market, "spread, in standard deviations")
    left.set(xlim=(-3, 3), ylabel="weight of A, minus that of B")
    prices, weights = played(market)
    right.plot(100 * np.log(prices[:, 0] / prices[:, 1]), lw=0.8, label="log spread, %")
    right.plot(weights[:, 0], lw=1, label="weight of A")
    right.plot(weights[:, 1], lw=1, label="weight of B")
    right.set(xlabel="bar")
    right.legend(frameon=False, fontsize=8)
    save(figure, "pairs")


def main() -> None:
    IMG.mkdir(parents=True, exist_ok=True)
    for draw in (signal, regime, crash, pairs):
        draw()
    for file in sorted(IMG.glob("oracle-*.svg")):
        print(f"{file.name}: {file.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
