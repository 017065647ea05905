"""A run: a folder that holds a training from its configuration to its last checkpoint, and goes on after any stop."""

from tailguard.run.folder import RunFolder, run_path
from tailguard.run.settings import CheckpointConfig
from tailguard.run.training import Outcome, train

__all__ = ["CheckpointConfig", "Outcome", "RunFolder", "run_path", "train"]
