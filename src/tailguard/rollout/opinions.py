"""What one critic says of a finished rollout: in compiled loops where they know it, in torch elsewhere."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.policy import Critic, Judged, Layout, State
from tailguard.policy.reading import Aside, Next, Passage, TrunkReader
from tailguard.rollout.buffer import RolloutBuffer

Bools = NDArray[np.bool_]


class Opinion(NamedTuple):
    """What one critic says of a rollout."""

    states: list[State]  # before each sequence
    after: State  # after the last step
    steps: Judged  # (T, N, *)
    ends: Judged  # (E, *) of truncated episodes' last observations
    follows: Judged  # (N, *) of the observations after the last step


@torch.inference_mode()
def opinion(critic: Critic, buffer: RolloutBuffer, state: State, next_starts: Bools, with_features: bool) -> Opinion:
    """From the state before the rollout; `next_starts` (N,) says where what follows is another episode.

    Features may be left out where nobody asks for them.
    """
    reader = critic.reader(buffer.sequence_length)
    if reader is None:
        return torch_opinion(critic, buffer, state, next_starts)
    return compiled_opinion(reader, critic, buffer, state, next_starts, with_features)


def compiled_opinion(
    reader: TrunkReader, critic: Critic, buffer: RolloutBuffer, state: State, next_starts: Bools, with_features: bool
) -> Opinion:
    """All of it in one call."""
    observations, following = (torch.from_numpy(part) for part in (buffer.observations, buffer.last_observations))
    ends = terminal_observations(buffer, slice(0, buffer.n_steps))
    read = reader.read(
        Passage(critic.sight(observations), buffer.starts, state),
        Aside(critic.sight(ends), np.argwhere(buffer.truncated)),
        Next(critic.sight(following), next_starts),
        with_features,
    )
    judged = [Judged(critic.head.quantiles(said.output), said.features) for said in (read.steps, read.aside, read.next)]
    return Opinion(read.states, read.after, *judged)


def torch_opinion(critic: Critic, buffer: RolloutBuffer, state: State, next_starts: Bools) -> Opinion:
    """The same sequence by sequence: the definition, and the path of everything the loops do not know."""
    states: list[State] = []
    steps: list[Judged] = []
    ends: list[Judged] = []
    for first in range(0, buffer.n_steps, buffer.sequence_length):
        rows = slice(first, min(first + buffer.sequence_length, buffer.n_steps))
        layout = Layout(buffer.starts[rows], buffer.truncated[rows])
        state = state.keep(torch.from_numpy(~layout.starts[0]).float())
        states.append(state)
        observations = torch.from_numpy(buffer.observations[rows])
        said, said_of_ends, state = critic.evaluate(observations, layout, state, terminal_observations(buffer, rows))
        steps.append(said)
        ends.append(said_of_ends)
    follow = state.keep(torch.from_numpy(~next_starts).float())
    follows, _ = critic.step(torch.from_numpy(buffer.last_observations), follow)
    return Opinion(states, state, joined(steps), joined(ends), follows)


def joined(parts: list[Judged]) -> Judged:
    return Judged(torch.cat([part.quantiles for part in parts]), torch.cat([part.features for part in parts]))


def terminal_observations(buffer: RolloutBuffer, rows: slice) -> Tensor:
    """(E, F) of the truncated episodes of some steps, in the order of np.nonzero."""
    found = [buffer.terminal_observations[rows.start + t, n] for t, n in np.argwhere(buffer.truncated[rows])]
    return torch.from_numpy(np.stack(found)) if found else torch.zeros(0, buffer.observations.shape[-1])
