"""What one critic says of a rollout: in compiled loops where they know it, in torch elsewhere."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.policy import Critic, Judged, Layout, State
from tailguard.policy.reading import NOWHERE, TrunkReader
from tailguard.rollout.buffer import RolloutBuffer

Bools = NDArray[np.bool_]


class Opinion(NamedTuple):
    """What one critic says of a rollout."""

    states: list[State]  # before each sequence
    after: State  # after the last step
    steps: Judged  # (T, N, *)
    ends: Judged  # (E, *) of truncated episodes' last observations
    follows: Judged  # (N, *) of the observations after the last step


class Listener:
    """One critic that follows a rollout."""

    n_weights = 0  # that reading a step ahead goes through

    def __init__(self, critic: Critic, buffer: RolloutBuffer, state: State) -> None:
        """`state` is that before the rollout."""
        self.critic, self.buffer, self.state = critic, buffer, state

    def follow(self, n_steps: int) -> None:
        """Read ahead: so many steps, whole sequences, are complete. Any thread may ask, nobody has to."""

    def conclude(self, next_starts: Bools) -> Opinion:
        """Of the finished rollout; `next_starts` (N,) says where what follows is another episode."""
        raise NotImplementedError


class TorchListener(Listener):
    """Sequence by sequence when all is there: the definition, and the path of everything the loops do not know."""

    @torch.inference_mode()
    def conclude(self, next_starts: Bools) -> Opinion:
        critic, buffer, state = self.critic, self.buffer, self.state
        states: list[State] = []
        steps: list[Judged] = []
        ends: list[Judged] = []
        for first in range(0, buffer.n_steps, buffer.sequence_length):
            rows = slice(first, min(first + buffer.sequence_length, buffer.n_steps))
            layout = Layout(buffer.starts[rows], buffer.truncated[rows])
            state = state.keep(torch.from_numpy(~layout.starts[0]).float())
            states.append(state)
            observations = torch.from_numpy(buffer.observations[rows])
            extra = terminal_observations(buffer, rows)
            said, said_of_ends, state = critic.evaluate(observations, layout, state, extra)
            steps.append(said)
            ends.append(said_of_ends)
        follow = state.keep(torch.from_numpy(~next_starts).float())
        follows, _ = critic.step(torch.from_numpy(buffer.last_observations), follow)
        return Opinion(states, state, joined(steps), joined(ends), follows)


class CompiledListener(Listener):
    """Whole sequences in one compiled call, as soon as they are complete."""

    def __init__(
        self, reader: TrunkReader, critic: Critic, buffer: RolloutBuffer, state: State, with_features: bool
    ) -> None:
        super().__init__(critic, buffer, state)
        self.reading, self.lock = reader.begin(state, buffer.n_steps, with_features), threading.Lock()
        self.n_weights = reader.flat.size

    def follow(self, n_steps: int) -> None:
        if self.lock.acquire(blocking=False):  # otherwise somebody else is at it
            try:
                self.read_on(n_steps)
            finally:
                self.lock.release()

    @torch.inference_mode()
    def read_on(self, n_steps: int) -> None:
        """What has not been read of the first so many steps."""
        buffer, rows = self.buffer, slice(self.reading.position, n_steps)
        if rows.start < rows.stop:
            observations = self.critic.sight(torch.from_numpy(buffer.observations[rows]))
            self.reading.read(observations, buffer.starts[rows], np.argwhere(buffer.truncated[rows]))

    @torch.inference_mode()
    def conclude(self, next_starts: Bools) -> Opinion:
        with self.lock:
            self.read_on(self.buffer.n_steps)
        buffer, sight = self.buffer, self.critic.sight
        ends = sight(terminal_observations(buffer, slice(0, buffer.n_steps)))
        read = self.reading.conclude(ends, sight(torch.from_numpy(buffer.last_observations)), next_starts)
        said = read.steps, read.aside, read.next
        judged = [Judged(self.critic.head.quantiles(part.output), part.features) for part in said]
        return Opinion(read.states, read.after, *judged)


def listener(critic: Critic, buffer: RolloutBuffer, state: State, with_features: bool) -> Listener:
    """With the weights of this moment; features may be left out where nobody asks for them."""
    reader = critic.reader(buffer.sequence_length)
    if reader is None:
        return TorchListener(critic, buffer, state)
    return CompiledListener(reader, critic, buffer, state, with_features)


@torch.inference_mode()
def laws_of_sequences(critic: Critic, observations: Tensor, starts: Bools, state: State) -> Tensor:
    """(L, B, Q) what a critic says of whole sequences, each with a state before it."""
    reader = critic.reader(len(starts))
    if reader is None:
        return critic.head.quantiles(critic(observations, Layout(starts), state))
    reading = reader.begin(state, len(starts), with_features=False)
    reading.read(critic.sight(observations), starts, NOWHERE)
    return critic.head.quantiles(torch.from_numpy(reading.found.output))


def joined(parts: list[Judged]) -> Judged:
    return Judged(torch.cat([part.quantiles for part in parts]), torch.cat([part.features for part in parts]))


def terminal_observations(buffer: RolloutBuffer, rows: slice) -> Tensor:
    """(E, F) of the truncated episodes of some steps, in the order of np.nonzero."""
    found = [buffer.terminal_observations[rows.start + t, n] for t, n in np.argwhere(buffer.truncated[rows])]
    return torch.from_numpy(np.stack(found)) if found else torch.zeros(0, buffer.observations.shape[-1])
