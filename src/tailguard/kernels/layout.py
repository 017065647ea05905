"""Where the weights of a trunk lie in the flat vector of all weights of a policy."""

from __future__ import annotations

from typing import NamedTuple


class TrunkLayout(NamedTuple):
    """LSTM layers (possibly none), then dense layers with an activation between them and none after the last.

    Gates in torch's order: input, forget, candidate, output; one bias. All matrices in C order.
    """

    n_inputs: int
    n_units: int
    """Of each recurrent layer; 0 without one."""
    recurrent: tuple[tuple[int, int, int], ...]
    """Per layer the offsets of input_weight (4H, inputs), hidden_weight (4H, H) and bias (4H,)."""
    dense: tuple[tuple[int, int, int, int], ...]
    """Per layer the offsets of weight (outputs, inputs) and bias (outputs,), the outputs and the inputs."""
    activation: str
    """`tanh` or `relu`."""

    @property
    def n_outputs(self) -> int:
        return self.dense[-1][2]

    @property
    def n_features(self) -> int:
        """Numbers that the last dense layer reads."""
        return self.dense[-1][3]

    def parts(self) -> list[tuple[int, tuple[int, ...]]]:
        """Offset and shape of each weight: per LSTM layer input, hidden, bias, then per dense layer weight and bias."""
        parts: list[tuple[int, tuple[int, ...]]] = []
        inputs = self.n_inputs
        for input_weight, hidden_weight, bias in self.recurrent:
            rows = 4 * self.n_units
            parts += [(input_weight, (rows, inputs)), (hidden_weight, (rows, self.n_units)), (bias, (rows,))]
            inputs = self.n_units
        for weight, bias, n_outputs, n_inputs in self.dense:
            parts += [(weight, (n_outputs, n_inputs)), (bias, (n_outputs,))]
        return parts

    def span(self) -> tuple[int, int]:
        """First offset of the trunk's weights and the one after the last."""
        ends = []
        for offset, shape in self.parts():
            count = 1
            for extent in shape:
                count *= extent
            ends.append(offset + count)
        return min(offset for offset, _ in self.parts()), max(ends)

    def shifted(self, by: int) -> TrunkLayout:
        """The layout with every offset moved."""
        recurrent = tuple((a + by, b + by, c + by) for a, b, c in self.recurrent)
        dense = tuple((a + by, b + by, outputs, inputs) for a, b, outputs, inputs in self.dense)
        return self._replace(recurrent=recurrent, dense=dense)
