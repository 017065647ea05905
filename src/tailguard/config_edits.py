"""Edits of a run's config.yaml since its agent was trained: each is taken over with a line, or refused by its key.

What the agent was trained with stands in its checkpoint (the learner, the networks) and in `manifest.json` (the rest:
the configuration that the run was begun or last resumed with).

    edits = ConfigEdits(folder, config)
    agent = resumed(folder, make_env, make_agent, config.checkpoint, edits.settings_for)
    edits.accept(agent.num_timesteps)       # one line per key, and the manifest says it from now on
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tailguard.checkpoint import read_bundle, write_file
from tailguard.configuration import saved_config, with_value
from tailguard.errors import ConfigError
from tailguard.experiment import DataTask, Experiment, ExperimentConfig, saved_experiment
from tailguard.policy import PolicyConfig
from tailguard.ppo import PPOConfig
from tailguard.ppo.settings import inert_for_space, policy_config_from, restorable
from tailguard.ppo.spaces import build_space
from tailguard.run import RunFolder

FIXED: dict[str, str] = {
    "preset": "an agent belongs to the market it learned in",
    "gym_env": "an agent belongs to the environment it learned in",
    "seed": "its random streams began with the other",
    "n_envs": "its environments are saved as they stood, and there are so many of them",
    "policy": "its networks are of the other kind",
    "policy_kwargs": "its networks are built so",
    "ppo.n_steps": "updates and checkpoints are counted in rollouts of that length",
    "ppo.optimizer": "the state of one optimizer does not fit another",
    "ppo.optimizer_kwargs": "the optimizer's saved state holds its options",
    "ppo.hindsight": "what it has learned of the world's moves is saved, or missing",
    "ppo.adversary": "the state of the adversary is saved with it",
    "ppo.critic": "its critics have learned so",
    "ppo.return_scale.enabled": "its critics would be read in another unit than they learned",
    "ppo.risk": "it decides which heads and controllers there are, and what they have learned",
    "ppo.kl_penalty.beta": "it is only where the controller starts, and a trained agent is beyond it",
    "ppo.vgs.statistic": "statistics of one kind do not continue as another",
    "data": "its features, their scaler and the splits follow from it",
}
"""Keys that belong to what a trained agent is, with everything below them, and why."""
LIVE = (
    *("data.costs", "data.account.gross_cap", "data.account.no_trade_band", "data.account.no_trade_windows"),
    *("data.account.long_only", "data.files"),
    *("ppo.critic.value_clip", "ppo.critic.value_clip_mode", "ppo.critic.huber_kappa"),
    *("ppo.critic.aggregation", "ppo.risk.weight", "ppo.risk.cvar_limit", "ppo.risk.gae_lambda"),
    *("ppo.risk.dual_learning_rate", "ppo.risk.dual_delay"),
)
"""What of FIXED can change all the same. Files may have moved; that they hold the same bars is seen on reading them."""
SWITCHES = ("ppo.risk.weight", "ppo.risk.cvar_limit")
"""What of LIVE is another kind of agent where one of the two values is None."""
OF_THE_AGENT = ("policy", "policy_kwargs", "n_envs", "seed", "ppo")
"""What a checkpoint says; of the rest the manifest knows what the agent was trained with."""
OF_TRAINING = ("steps", "checkpoint", "ppo.update_threads", "ppo.torch_threads", "ppo.env_timeout")
"""What an agent that is only evaluated or attacked has nothing to do with."""


class Edit(NamedTuple):
    """A key of config.yaml, the value the agent was trained with, and the value that stands there now."""

    key: str
    trained: Any
    written: Any

    def __str__(self) -> str:
        return f"{self.key} was {self.trained!r} and is {self.written!r} in config.yaml"


class ConfigEdits:
    """How the configuration of a run's folder differs from the one that its agent was trained with."""

    def __init__(self, folder: RunFolder, config: ExperimentConfig) -> None:
        self.folder, self.config = folder, config
        self.edits: list[Edit] = self.of_the_manifest()

    def of_the_manifest(self) -> list[Edit]:
        """Edits since the run was begun or last resumed; none where an earlier version did not write it down."""
        begun = self.folder.manifest().get("config")
        return [*differences(begun, self.config.model_dump(mode="json"))] if isinstance(begun, Mapping) else []

    def of_the_agent(self, checkpoint: Path) -> list[Edit]:
        """Edits of what a checkpoint says: learner, networks, number of environments, seed."""
        tree, manifest = read_bundle(checkpoint)
        networks = policy_config_from(
            self.config.policy, self.config.policy_kwargs.model_dump(), self.config.ppo.risk.mode != "none"
        )
        learner = self.config.ppo
        for found in inert_for_space(networks, learner, build_space(tree["action_space"]))[0]:
            networks = with_value(networks, found.path.split("."), found.instead)  # as it gives way at loading
        trained = {
            "policy": manifest["policy"],
            "n_envs": tree["n_envs"],
            "seed": manifest["seed"],
            "policy_kwargs": saved_config(PolicyConfig, manifest["policy_config"], checkpoint).model_dump(mode="json"),
            "ppo": trained_learner(manifest, checkpoint).model_dump(mode="json"),
        }
        written = {
            "policy": self.config.policy,
            "n_envs": self.config.n_envs,
            "seed": self.config.seed,
            "policy_kwargs": networks.model_dump(mode="json"),
            "ppo": learner.model_dump(mode="json"),
        }
        said = {"ppo": manifest["config"], "policy_kwargs": manifest["policy_config"]}
        return [edit for edit in differences(trained, written) if known_to(said, edit.key)]

    def settings_for(self, checkpoint: Path) -> dict[str, Any]:
        """Settings of the learner that were edited since this checkpoint; what cannot change is refused."""
        of_agent = self.of_the_agent(checkpoint)
        rest = [edit for edit in self.of_the_manifest() if not below(edit.key, OF_THE_AGENT)]
        self.edits = [*of_agent, *rest]
        self.refuse_fixed(checkpoint)
        _, manifest = read_bundle(checkpoint)
        learner = with_edits(trained_learner(manifest, checkpoint), self.edits)
        changed = {edit.key.split(".")[1] for edit in self.edits if below(edit.key, ("ppo",))}
        return {name: getattr(learner, name) for name in changed}

    def refuse_fixed(self, checkpoint: Path) -> None:
        for edit in self.edits:
            why = reason_against(edit)
            if why is not None:
                raise ConfigError(
                    f"{self.folder.config_file}: {edit.key} is {edit.written!r}, but the agent of {checkpoint.name} "
                    f"was trained with {edit.trained!r}, and that cannot change: {why}. Set it back, or begin another "
                    f"run with these settings: `tailguard train {self.folder.config_file} --run NAME`."
                )

    def accept(self, step: int) -> list[str]:
        """A line per key that was taken over; the manifest keeps the configuration and what was edited when.

        At step 0 nothing is trained yet, so everything may have been edited.
        """
        lines = [
            f"config.yaml was edited: {edit.key} = {edit.written!r} from here on (it was {edit.trained!r})"
            for edit in self.edits
        ]
        said = self.folder.manifest()
        now = self.config.model_dump(mode="json")
        if self.edits or said.get("config") != now:
            rows = [{"step": step, **edit._asdict()} for edit in self.edits]
            said |= {"config": now, "edits": [*said.get("edits", []), *rows]}
            task = Experiment(self.config).task
            if step == 0 and isinstance(task, DataTask):
                said["data"] = {"bars": task.bars.digest()}
            write_file(self.folder.manifest_file, json.dumps(said, indent=1).encode())
        return lines


def as_trained(folder: RunFolder, config: ExperimentConfig, checkpoint: Path) -> tuple[ExperimentConfig, list[str]]:
    """The configuration to evaluate or attack an agent with, and a line per key that was edited since its training.

    The learner is the one that trained it; data settings that can change, such as costs, are those of config.yaml.
    """
    edits = ConfigEdits(folder, config)
    edits.settings_for(checkpoint)
    found = [edit for edit in edits.edits if not below(edit.key, OF_TRAINING)]
    kept = "the agent was trained with {0!r}, which is what counts; config.yaml says {1!r}"
    taken = "config.yaml was edited to {1!r}, which is taken; the agent was trained with {0!r}"
    lines = [
        f"{folder.config_file}: {edit.key}: {(kept if below(edit.key, ('ppo',)) else taken).format(*edit[1:])}"
        for edit in found
    ]
    back = [Edit(edit.key, edit.written, edit.trained) for edit in edits.edits]
    return config.replace(ppo=with_edits(config.ppo, back)), lines


def trained_experiment(folder: RunFolder, checkpoint: Path) -> Experiment:
    """What a run's folder describes, with a warning per key of its config.yaml that was edited since the training."""
    config, lines = as_trained(folder, saved_experiment(folder.config_file), checkpoint)
    for line in lines:
        warnings.warn(line, stacklevel=3)
    return Experiment(config)


def refuse_edits(folder: RunFolder, config: ExperimentConfig, checkpoint: Path) -> dict[str, Any]:
    """For runs of which many are trained alike, such as seeds and folds: every edit is refused by its key."""
    edits = ConfigEdits(folder, config)
    found = [edit for edit in edits.of_the_agent(checkpoint) if not below(edit.key, OF_TRAINING)]
    if found:
        raise ConfigError(
            f"{folder.path} holds an agent of other settings: {'; '.join(map(str, found))}. Set them back, or choose "
            "another --run."
        )
    return {}


def trained_learner(manifest: Mapping[str, Any], checkpoint: Path) -> PPOConfig:
    """The learner's configuration in a checkpoint."""
    return saved_config(PPOConfig, restorable(manifest["config"], {}), checkpoint)


def with_edits(learner: PPOConfig, edits: list[Edit]) -> PPOConfig:
    """A checked copy with the edits of the learner made, all at once."""
    tree = learner.model_dump()
    for edit in edits:
        if below(edit.key, ("ppo",)):
            tree = with_value(tree, edit.key.split(".")[1:], edit.written)
    return PPOConfig(**tree)


def differences(trained: Any, written: Any, key: str = "") -> Iterator[Edit]:
    """Where two trees of plain values differ; options of an optimizer are one value."""
    if isinstance(trained, Mapping) and isinstance(written, Mapping) and not key.endswith("optimizer_kwargs"):
        for name in written:
            if name in trained:
                yield from differences(trained[name], written[name], f"{key}.{name}" if key else name)
    elif trained != written:
        yield Edit(key, trained, written)


def known_to(said: Mapping[str, Any], key: str) -> bool:
    """Whether what was written down knows this key; an earlier version did not know all of today's."""
    head, *path = key.split(".")
    at: Any = said.get(head)
    for name in path if head in said else []:
        if not isinstance(at, Mapping) or name not in at:
            return False
        at = at[name]
    return True


def reason_against(edit: Edit) -> str | None:
    """Why an edit cannot be made in a trained agent; None where it can."""
    switched = below(edit.key, SWITCHES) and None in (edit.trained, edit.written)
    if below(edit.key, LIVE) and not switched:
        return None
    return next((why for fixed, why in FIXED.items() if below(edit.key, (fixed,))), None)


def below(key: str, heads: tuple[str, ...]) -> bool:
    """Whether a key is one of these, or stands below one of them."""
    return any(key == head or key.startswith(f"{head}.") for head in heads)
