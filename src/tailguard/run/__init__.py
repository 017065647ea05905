"""A run: a folder that holds a training from its configuration to its last checkpoint, and goes on after any stop."""

from tailguard.run.checkpoints import newest_checkpoint
from tailguard.run.folder import RunFolder, run_path
from tailguard.run.settings import CheckpointConfig
from tailguard.run.signals import StoppedNow
from tailguard.run.training import Listener, Outcome, Update, figures_of, resumed, train

__all__ = [
    "CheckpointConfig",
    "Listener",
    "Outcome",
    "RunFolder",
    "StoppedNow",
    "Update",
    "figures_of",
    "newest_checkpoint",
    "resumed",
    "run_path",
    "train",
]
