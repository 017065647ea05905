"""What an environment that fails leaves behind: an error that says where training stands, an agent that can go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from tailguard.errors import EnvContractError, EnvStepError, EnvWorkerError, NonFiniteError

OF_ENVIRONMENTS = (EnvContractError, EnvStepError, EnvWorkerError, NonFiniteError)


class Interrupted(Protocol):
    """What is told and put right when training breaks off."""

    num_timesteps: int
    saved_at: Path | None
    in_update: bool
    _last_obs: Any


@contextmanager
def named_stop(agent: Interrupted) -> Iterator[None]:
    """Around a training: an error of its environments says how far it came and what was saved.

    Some environments have taken their step then and others have not, so episodes begin anew in the next training; a
    rollout that was broken off is forgotten.
    """
    try:
        yield
    except OF_ENVIRONMENTS as error:
        agent._last_obs = None
        saved = "nothing has been saved yet" if agent.saved_at is None else f"the last checkpoint is {agent.saved_at}"
        raise type(error)(f"{error} Training stopped at step {agent.num_timesteps:,}; {saved}.") from error
    finally:
        agent.in_update = False
