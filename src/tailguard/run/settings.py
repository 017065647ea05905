"""When bundles are written and which are kept."""

from __future__ import annotations

from tailguard.configuration import Config, PositiveInt


class CheckpointConfig(Config):
    """Checkpoints of a run; there is always one at the end and one when the run is asked to stop."""

    every_updates: PositiveInt = 10
    """Updates between two checkpoints."""
    keep_last: PositiveInt = 3
    """How many of the newest are kept, besides the best one."""
    reset_at_checkpoint: bool = True
    """For environments that cannot save themselves: episodes restart at each checkpoint with seeds derived from the
    run's seed and the step, so that a resumed run is the uninterrupted one. Off: a resumed run is not exact."""
