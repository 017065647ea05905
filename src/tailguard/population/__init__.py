"""Population-based training: several agents learn side by side, and the worst go on as copies of the best."""

from tailguard.population.member import PopulationMember
from tailguard.population.scheduler import PBTConfig, PBTScheduler
from tailguard.population.space import HyperparamConfig

__all__ = ["HyperparamConfig", "PBTConfig", "PBTScheduler", "PopulationMember"]
