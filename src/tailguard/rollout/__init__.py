"""Experience: collecting it, judging it, cutting it into sequences."""

from tailguard.rollout.buffer import RolloutBuffer
from tailguard.rollout.sequences import SequenceBatch

__all__ = ["RolloutBuffer", "SequenceBatch"]
