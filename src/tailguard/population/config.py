"""A population's configuration: an experiment, and how its members vary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from tailguard.configuration import Config, saved_config
from tailguard.errors import ConfigError
from tailguard.experiment import ExperimentConfig, experiment_config, merged, on_shared_paths, parsed_override, task_of
from tailguard.population.scheduler import PBTConfig, PBTScheduler
from tailguard.population.space import check_space, refuse_what_no_member_reads
from tailguard.yaml_files import read_yaml, write_yaml


class PopulationConfig(Config):
    """What every member does, and how the population is judged. In YAML: an experiment with a `population` section."""

    experiment: ExperimentConfig
    """`steps` are those of one member; `seed` is the root of the whole population."""
    population: PBTConfig
    """Its `hyperparams` name settings below the experiment's `ppo`."""

    @model_validator(mode="after")
    def members_can_vary_so(self) -> Self:
        check_space(self.population.hyperparams, self.experiment.ppo)
        return self

    @property
    def rollout_steps(self) -> int:
        """Environment steps of one update."""
        return self.experiment.n_envs * self.experiment.ppo.n_steps

    @property
    def n_rounds(self) -> int:
        """Segments of a member: enough for its steps."""
        return ceil(self.experiment.steps / (self.rollout_steps * self.population.perturbation_interval))

    @property
    def total_steps(self) -> int:
        """Environment steps of a member in all its rounds; schedules run over these."""
        return self.n_rounds * self.population.perturbation_interval * self.rollout_steps

    def scheduler(self) -> PBTScheduler:
        """A scheduler before its first event."""
        return PBTScheduler(self.population, self.n_rounds, self.experiment.seed)

    def to_yaml(self) -> str:
        """The whole configuration as YAML that `load_population` reads back unchanged."""
        population = self.population.model_dump(mode="json")
        return write_yaml({**self.experiment.model_dump(mode="json"), "population": population})


def population_config(given: Mapping[str, Any], overrides: Sequence[str] = ()) -> PopulationConfig:
    """Checked settings; `key.path=value` overrides reach both halves."""
    settings, population = halves(given)
    ours = [text for text in overrides if text.startswith("population.")]
    experiment = on_shared_paths(experiment_config(settings, [text for text in overrides if text not in ours]))
    for text in ours:
        population = merged(population, parsed_override(text.removeprefix("population.")))
    config = PopulationConfig(experiment=experiment, population=PBTConfig(**population))
    refuse_what_no_member_reads(config.population.hyperparams, config.experiment.ppo)
    return config


def saved_population(given: Mapping[str, Any], where: Any) -> PopulationConfig:
    """What a population wrote down: an earlier version may have accepted settings that do nothing, which give way."""
    settings, population = halves(given)
    experiment = saved_config(ExperimentConfig, merged(task_of(settings).defaults(), settings), where)
    return PopulationConfig(
        experiment=on_shared_paths(experiment), population=saved_config(PBTConfig, population, where)
    )


def halves(given: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The experiment's settings and the population's."""
    settings = dict(given)
    population = settings.pop("population", None)
    if not isinstance(population, Mapping):
        raise ConfigError(
            "A population needs a `population` section with `hyperparams`, the settings that its members vary "
            "(docs/population.md)."
        )
    return settings, population


def load_population(path: str | Path, overrides: Sequence[str] = ()) -> PopulationConfig:
    """Settings from a YAML file."""
    return population_config(read_yaml(path), overrides)


def load_saved_population(path: str | Path) -> PopulationConfig:
    """Settings that a population wrote into its folder."""
    return saved_population(read_yaml(path), path)
