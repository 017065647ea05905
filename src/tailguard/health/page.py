"""docs/metrics.md, generated from the declarations: `python -m tailguard.health.page > docs/metrics.md`."""

from __future__ import annotations

from tailguard.health.alerts import ALERTS, Alert
from tailguard.health.metrics import Metric, declared
from tailguard.health.population_alerts import POPULATION_ALERTS

HEAD = """# Metrics and alerts

Generated from `tailguard.health` by `python -m tailguard.health.page > docs/metrics.md`. Names are an API.

Every figure is averaged once per update and written to the SB3 logger (TensorBoard, CSV, stdout) and, in a run folder,
to `metrics.jsonl`. An alert is a figure too: `warn/...` is 1 while it holds. When it begins, the console and
`alerts.jsonl` say what, since when, and what to do. `tailguard train --fail-on-alert` ends with exit code 1 when one
began. All of it takes about 3 % of a training's CPU time (`make bench-health`, [figures](../benchmarks/RESULTS.md)).

Your own alert on any of these figures, and your own way to be told:

```python
from tailguard import DistributionalPPO
from tailguard.health import metrics
from tailguard.health.alerts import Alert, above

agent = DistributionalPPO("MlpLstmPolicy", "CartPole-v1", seed=0)
fast = Alert("warn/moves_fast", metrics.KL, above(0.05), "The policy moves fast.", "Lower the learning rate.")
agent.alerts.add(fast)
agent.alerts.listeners.append(lambda alert, value: print(alert.name, value))
```
"""

ALERT_TABLE = ("| alert | fires when | meaning | what to do |", "| --- | --- | --- | --- |")
POPULATION = """### Of a population

Judged once per round. A population's folder has `metrics.jsonl`, `alerts.jsonl` and `tensorboard/` of its own, in which
a round is a step; alerts that a member's own training raises are there too, with its number.
"""

PER_LAYER = Metric(
    "lstm/{actor,critic}_layer{i}[_cell]_{norm,mean,std}",
    "Hidden state (and cell) of each trunk's layer at the end of the rollout: mean norm per environment, mean and std.",
)


def cell(text: str) -> str:
    """Text inside a table."""
    return text.replace("|", "\\|")


def alert_row(alert: Alert, unit: str) -> str:
    lasting = f"{alert.for_updates} {unit} in a row" if alert.for_updates > 1 else "at once"
    fires = f"`{alert.metric.name}` {cell(alert.when)}, {lasting}"
    return f"| `{alert.name}` | {fires} | {cell(alert.meaning)} | {cell(alert.advice)} |"


def page() -> str:
    """The whole page."""
    figures = [*declared(), PER_LAYER]
    lines = [HEAD, "## Alerts", "", *ALERT_TABLE, *(alert_row(alert, "updates") for alert in ALERTS)]
    lines += ["", POPULATION, *ALERT_TABLE, *(alert_row(alert, "rounds") for alert in POPULATION_ALERTS)]
    lines += ["", "## Metrics", "", "| metric | meaning |", "| --- | --- |"]
    lines += [f"| `{metric.name}` | {cell(metric.meaning)} |" for metric in figures]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
