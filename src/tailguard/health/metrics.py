"""Metrics declared as data, and the meter that averages them once per update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from stable_baselines3.common.logger import Logger


@dataclass(frozen=True, eq=False)  # one object per metric: comparing names at every look-up took longer than adding
class Metric:
    """A number the learner logs: its name is an API, its meaning is the documentation."""

    name: str
    meaning: str


TRUNK_NAMES = {"actor": "the actor", "critic": "the only critic", "critic1": "critic 1", "critic2": "critic 2"}
"""Names of the trunks in metrics and alerts, and in a sentence: `critic1` and `critic2` are twins."""


def per_trunk(name: str, meaning: str) -> dict[str, Metric]:
    """One metric for each trunk; `{trunk}` and `{of}` stand for its name, as in metrics and in a sentence."""
    return {trunk: Metric(name.format(trunk=trunk), meaning.format(of=of)) for trunk, of in TRUNK_NAMES.items()}


POLICY_LOSS = Metric("train/policy_gradient_loss", "Clipped surrogate loss, mean over the update's batches.")
VALUE_LOSS = Metric("train/value_loss", "Value loss, mean over critics and batches, in normalized units.")
ENTROPY = Metric("train/entropy", "Entropy of the policy, mean over samples.")
ENTROPY_COEFFICIENT = Metric("train/ent_coef", "Weight of the entropy bonus in this update.")
LOSS = Metric("train/loss", "The whole objective, mean over batches.")
KL = Metric("train/approx_kl", "Low-variance estimate of the divergence from the policy that acted, last epoch.")
KL_BETA = Metric("train/kl_beta", "Weight of the KL penalty; logged when the penalty is on.")
CLIP_FRACTION = Metric("train/clip_fraction", "Share of samples whose probability ratio left the clip range.")
FIRST_LOG_RATIO = Metric(
    "train/first_log_ratio_max_abs", "Largest |log ratio| of the first batch, before any step: zero up to rounding."
)
EXPLAINED_VARIANCE = Metric(
    "train/explained_variance", "Share of the variance of lambda-returns explained by the values, on the reserve."
)
HINDSIGHT = Metric(
    "train/hindsight_explained", "Share of the variance of advantages that the world's own moves explain, taken out."
)
LEARNING_RATE = Metric("train/learning_rate", "Learning rate of this update.")
CLIP_RANGE = Metric("train/clip_range", "Clip range of this update.")
N_UPDATES = Metric("train/n_updates", "Epochs of gradient steps taken so far.")
GRAD_NORM = Metric("train/grad_norm", "Norm of the whole gradient before clipping, mean over steps.")
CRITIC1_GRAD_NORM = Metric("train/critic1_grad_norm", "Gradient norm of critic 1, mean over steps.")
CRITIC2_GRAD_NORM = Metric("train/critic2_grad_norm", "Gradient norm of critic 2, mean over steps.")
CRITICS_GRAD_RATIO = Metric("train/critics_grad_ratio", "Gradient norm of critic 1 over critic 2, when both > 1e-8.")
TWIN_GAP = Metric("train/twin_critics_gap", "Mean |difference| of the critics' values over the return scale's std.")
RETURN_MEAN = Metric("train/return_scale_mean", "Mean of the returns, the critics' zero.")
RETURN_STD = Metric("train/return_scale_std", "Std of the returns, the critics' unit.")
RETURN_SCALE_RATIO = Metric(
    "train/return_scale_ratio",
    "Std of the return scale over that of the rollout's returns; times critic.huber_kappa it is the width, in spreads, "
    "within which quantiles are pulled to the mean.",
)
STD = Metric("train/std", "Mean spread of a Gaussian policy, in units where the bounds are -1 and 1.")
SKIPPED_STEPS = Metric("train/skipped_steps", "Optimizer steps skipped because loss or gradient was not finite.")
EMPTY_EPOCHS = Metric("train/empty_epochs", "Epochs in which no batch held a valid sample.")
RESERVE_ALL_MASKED = Metric(
    "train/ev_reserve_all_masked", "Updates whose reserve held fewer than two valid samples, so far."
)
MEAN_DRIFT = Metric("debug/vecnormalize_mean_drift", "Largest move of an observation's mean, in units of its old std.")
STD_DRIFT = Metric("debug/vecnormalize_std_drift", "Largest relative move of an observation's std.")
QUANTILE_CROSSING = Metric("train/quantile_crossing", "Share of neighbouring quantiles in the wrong order.")

RISK_VALUE_LOSS = Metric("train/risk_value_loss", "Halved squared error of the risk value, in its own units.")
ADVERSARY_EPSILON = Metric("adversary/epsilon", "Size of the adversary's perturbations in this update.")
ADVERSARY_DIVERGENCE = Metric(
    "adversary/divergence",
    "KL between the policy's action laws on clean and on attacked observations, mean over batches.",
)
PERIOD_MEAN = Metric("risk/period_mean", "Mean return of the recent risk periods.")
PERIOD_CVAR = Metric("risk/period_cvar", "Empirical CVaR of the recent risk periods' returns: what a limit is about.")
THRESHOLD = Metric("risk/threshold", "nu: the alpha-quantile of the recent risk periods' returns.")
TAIL_SAMPLES = Metric("risk/tail_samples", "Recent risk periods in the tail: alpha times their number.")
DUAL = Metric("risk/dual", "Price of the CVaR limit in this update: return given up per unit of CVaR.")
VIOLATION = Metric("risk/violation", "By how much the empirical CVaR is below the limit; 0 when it holds.")
PREDICTED_CVAR = Metric(
    "risk/predicted_cvar", "CVaR of the return from a step on, as predicted; mean over a sample of the rollout."
)
EMPIRICAL_CVAR = Metric(
    "risk/empirical_cvar", "The same from the returns realised, with the predicted threshold; equal when calibrated."
)
COVERAGE = {
    level: Metric(
        f"risk/coverage_{round(100 * level):02d}",
        f"Share of realised returns below the predicted {round(100 * level)} % quantile.",
    )
    for level in (0.05, 0.25, 0.5, 0.75, 0.95)
}
COVERAGE_ERROR = Metric(
    "risk/coverage_error",
    "Largest difference between such a share and its level; returns within 2 % of their spread in this rollout from a "
    "quantile may lie on either side of it. Absent where the spread is below 2 % of the return scale.",
)

ACTION_SATURATION = Metric("train/action_saturation", "Share of a Gaussian policy's actions beyond their bounds.")
ACTION_SPREAD = Metric(
    "train/action_spread", "Std over the rollout of the actions the environment received, bounds -1 and 1."
)
ENTROPY_SHARE = Metric("train/entropy_share", "Entropy of a discrete policy over that of a uniform one.")
EXPLAINED_VARIANCE_DROP = Metric(
    "train/explained_variance_drop", "How far the average of explained variance has fallen from its best."
)
RETURN_SCALE_CHANGE = Metric("train/return_scale_change", "|log| of the factor by which the return scale's std moved.")
CELL_MAX = Metric("lstm/cell_max_abs", "Largest |cell| of any trunk at the end of the rollout.")
SATURATED_SHARE = Metric("lstm/saturated_share", "Share of hidden units with |h| > 0.99 at the end of the rollout.")
DEAD_SHARE = Metric("lstm/dead_share", "Share of hidden units with |h| < 1e-6 at the end of the rollout.")
TRUNK_DEAD_SHARE = per_trunk(
    "lstm/{trunk}_dead_share", "Share of hidden units with |h| < 1e-6 in the memory of {of}; its worst layer."
)
TRUNK_SATURATED_SHARE = per_trunk(
    "lstm/{trunk}_saturated_share", "Share of hidden units with |h| > 0.99 in the memory of {of}; its worst layer."
)
TRUNK_CELL_MAX = per_trunk("lstm/{trunk}_cell_max_abs", "Largest |cell| in the memory of {of}.")
TRUNK_GRAD_NORM = per_trunk("train/{trunk}_trunk_grad_norm", "Gradient norm of memory and layers of {of}.")
HEAD_GRAD_NORM = per_trunk("train/{trunk}_head_grad_norm", "Gradient norm of the head of {of}.")
TRUNK_GRAD_SHARE = per_trunk(
    "train/{trunk}_trunk_grad_share",
    "Gradient norm of the layer in the trunk of {of} that receives least, over that of its head.",
)
TURNOVER = Metric("market/turnover", "Traded notional over equity, per step, on a sample of steps.")
COST_SHARE = Metric(
    "market/cost_share", "Costs over gross profit on a sample of steps; only where the gross profit is significant."
)

MEAN_GATE = Metric("train/upgd_mean_gate", "Mean of the utility gate: 1 is the base optimizer's step.")
FAILED_READY_CHECKS = Metric(
    "pbt/failed_ready_checks", "Readiness checks at which a population had to wait for late members, so far."
)
EXPLOIT_VALUE_RATIO = Metric(
    "pbt/exploit_value_ratio", "Value loss in a copy's first updates over its source's last; the round's largest."
)
EXPLOIT_EXPLAINED_VARIANCE_DROP = Metric(
    "pbt/exploit_explained_variance_drop",
    "Explained variance in its source's last updates minus that in a copy's first; the round's largest.",
)
BEST_SCORE = Metric("pbt/best_score", "Best score of a round.")
BEST_SCORE_GAIN = Metric(
    "pbt/best_score_gain", "Rise of the best score over that of all earlier rounds, as a share of its size."
)
SCORE_SPREAD = Metric("pbt/score_spread", "Best minus worst score of a round, as a share of the larger size.")
MEMBERS_ALIKE = Metric(
    "pbt/members_alike",
    "1 when all members of a round have the same score, unless they once were worse and it stays their best.",
)
VGS_FACTOR = Metric("vgs/scaling_factor", "Factor on the next step; 1 when switched off or warming up.")
VGS_VARIANCE = Metric("vgs/normalized_variance", "Noise-to-signal ratio of raw gradients over time.")
VGS_STEPS = Metric("vgs/step_count", "Steps the noise statistics have seen.")
VGS_WARMUP = Metric("vgs/warmup_active", "1 while the factor is held at 1.")
VGS_PINNED = Metric("vgs/pinned", "1 while the factor is at its lower bound.")


def declared() -> tuple[Metric, ...]:
    """Every metric of this page, by name."""
    single = [value for value in globals().values() if isinstance(value, Metric)]
    listed = [m for value in globals().values() if isinstance(value, dict) for m in value.values()]
    return tuple(sorted({*single, *(m for m in listed if isinstance(m, Metric))}, key=lambda metric: metric.name))


class Meter:
    """Sums of what each batch measured; the means are logged once per update."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)

    def add(self, values: Mapping[Metric, float]) -> None:
        """Take in one batch's figures."""
        for metric, value in values.items():
            self.sums[metric.name] += value
            self.counts[metric.name] += 1

    def restart(self, metric: Metric) -> None:
        """Forget one metric, for means over the last epoch only."""
        self.sums.pop(metric.name, None)
        self.counts.pop(metric.name, None)

    def mean(self, metric: Metric) -> float | None:
        """Mean so far, None when nothing was measured."""
        count = self.counts.get(metric.name, 0)
        return self.sums[metric.name] / count if count else None

    def flush(self, logger: Logger) -> dict[str, float]:
        """Log all means and start again; returns them by name."""
        means = {name: total / self.counts[name] for name, total in self.sums.items()}
        for name, value in means.items():
            logger.record(name, value)
        self.sums.clear()
        self.counts.clear()
        return means
