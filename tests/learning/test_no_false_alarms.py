"""A healthy training raises no alert: every preset, five seeds, long enough for every alert but one to fire.

The longest, `warn/cvar_limit_violated`, needs 200 updates: the whole trainings of test_markets.py and test_crash.py,
which hold to the same, are that long. One case: pytest -m slow tests/learning/test_no_false_alarms.py -k "crash and 3"
"""

from __future__ import annotations

import pytest

from tailguard.health.alerts import ALERTS
from tailguard.presets import PRESETS, preset
from tests.learning.seeds import SEEDS, heard_by

N_UPDATES = 64


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_in_good_health_raises_no_alert(name: str, seed: int) -> None:
    agent = preset(name).agent(seed)
    heard = heard_by(agent)
    agent.learn(N_UPDATES * agent.n_envs * agent.config.n_steps)  # schedules run to their end
    assert agent.alerts.updates == N_UPDATES
    assert heard == []


def test_the_training_is_long_enough_for_nearly_every_alert() -> None:
    slower = {alert.name for alert in ALERTS if alert.for_updates > N_UPDATES // 2}
    assert slower == {"warn/cvar_limit_violated"}
