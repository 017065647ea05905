"""One step of a frozen policy as an ONNX graph: observation and recurrent state in, action and the state after out.

Recurrent cells are written as products, sigmoids and tanhs, not as ONNX's LSTM and GRU, which run whole sequences.
Inputs are `observation` (n, ...), and `hidden` and `cell` (layers, n, H) where the policy has them; outputs are
`action` (n, ...), `hidden_after` and `cell_after`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET, IR_VERSION = 17, 8
"""Of 2022: what runtimes of today read."""


class Graph:
    """Nodes and constants of a graph, added one after the other."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: Any, dtype: type[Any]) -> str:
        """The name of a constant array."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(value, dtype=dtype), name))
        return name

    def add(self, kind: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        """The name of the first output of a new node."""
        name = output or f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def linear(self, x: str, weight: NDArray[Any], bias: NDArray[Any] | None = None) -> str:
        """x @ weight.T + bias."""
        out = self.add("MatMul", x, self.constant(weight.T, np.float32))
        return out if bias is None else self.add("Add", out, self.constant(bias, np.float32))

    def columns(self, x: str, first: int, stop: int) -> str:
        """Columns first .. stop - 1 of x (n, ...)."""
        ends = (self.constant([value], np.int64) for value in (first, stop, 1))
        return self.add("Slice", x, *ends)

    def row(self, x: str, index: int) -> str:
        """x[index] of x (layers, n, H)."""
        return self.add("Gather", x, self.constant(index, np.int64), axis=0)

    def cast(self, x: str, dtype: str, output: str | None = None) -> str:
        """x in another type."""
        return self.add("Cast", x, output=output, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def step_graph(contract: Mapping[str, Any], weights: Mapping[str, NDArray[Any]]) -> bytes:
    """The graph of the policy that a contract describes, as the bytes of an ONNX file."""
    graph, policy, observation = Graph(), contract["policy"], contract["observation"]
    x = normalized(graph, observation, weights)
    parts = {"lstm": ("hidden", "cell"), "gru": ("hidden",), "none": ()}[policy["rnn"]]
    after: dict[str, list[str]] = {part: [] for part in parts}
    for i in range(policy["n_rnn_layers"]):
        before = {part: graph.row(part, i) for part in parts}
        gates = [weights[f"rnn.{i}.{name}"] for name in ("input_weight", "hidden_weight", "bias")]
        state = (lstm if policy["rnn"] == "lstm" else gru)(graph, x, before, gates, policy["hidden_size"])
        x = state["hidden"]
        for part in parts:
            after[part].append(graph.add("Unsqueeze", state[part], graph.constant([0], np.int64)))
    for part, layers in after.items():
        graph.add("Concat", *layers, output=f"{part}_after", axis=0)
    for i in range(len(policy["layers"])):
        x = graph.linear(x, weights[f"layers.{i}.weight"], weights[f"layers.{i}.bias"])
        x = activated(graph, x, policy["activation"])
    output = graph.linear(x, weights["head.weight"], weights["head.bias"])
    add_actions(graph, output, contract["action"], weights)

    size, n_layers = policy["hidden_size"], policy["n_rnn_layers"]
    seen = TensorProto.DOUBLE if observation["normalizer"] else TensorProto.FLOAT
    acted = helper.np_dtype_to_tensor_dtype(np.dtype(contract["action"]["dtype"]))
    info, state_shape = helper.make_tensor_value_info, [n_layers, "n", size]
    inputs = [info("observation", seen, ["n", *observation["shape"]])]
    outputs = [info("action", acted, ["n", *contract["action"]["shape"]])]
    inputs += [info(part, TensorProto.FLOAT, state_shape) for part in parts]
    outputs += [info(f"{part}_after", TensorProto.FLOAT, state_shape) for part in parts]
    made = helper.make_graph(graph.nodes, "step", inputs, outputs, graph.constants)
    opset = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(made, opset_imports=opset, ir_version=IR_VERSION, producer_name="tailguard")
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def normalized(graph: Graph, observation: Mapping[str, Any], weights: Mapping[str, NDArray[Any]]) -> str:
    """What the network takes, (n, F), of raw observations."""
    x, normalizer = "observation", observation["normalizer"]
    if normalizer is not None:
        deviation = np.sqrt(weights["normalizer.var"] + normalizer["epsilon"])
        x = graph.add("Sub", x, graph.constant(weights["normalizer.mean"], np.float64))
        x = graph.add("Div", x, graph.constant(deviation, np.float64))
        x = graph.add("Max", x, graph.constant(-normalizer["clip"], np.float64))
        x = graph.cast(graph.add("Min", x, graph.constant(normalizer["clip"], np.float64)), "float32")
    return graph.add("Reshape", x, graph.constant([-1, int(np.prod(observation["shape"]))], np.int64))


def lstm(graph: Graph, x: str, before: Mapping[str, str], gates: list[NDArray[Any]], size: int) -> dict[str, str]:
    """Hidden and cell after one step; gates in the order input, forget, candidate, output."""
    z = graph.add("Add", graph.linear(x, gates[0], gates[2]), graph.linear(before["hidden"], gates[1]))
    enter, forget, candidate, leave = (graph.columns(z, k * size, (k + 1) * size) for k in range(4))
    kept = graph.add("Mul", graph.add("Sigmoid", forget), before["cell"])
    new = graph.add("Mul", graph.add("Sigmoid", enter), graph.add("Tanh", candidate))
    cell = graph.add("Add", kept, new)
    return {"hidden": graph.add("Mul", graph.add("Sigmoid", leave), graph.add("Tanh", cell)), "cell": cell}


def gru(graph: Graph, x: str, before: Mapping[str, str], gates: list[NDArray[Any]], size: int) -> dict[str, str]:
    """Hidden after one step; gates in the order reset, update, candidate."""
    from_input, from_hidden = graph.linear(x, gates[0], gates[2]), graph.linear(before["hidden"], gates[1])
    z = [[graph.columns(part, k * size, (k + 1) * size) for part in (from_input, from_hidden)] for k in range(3)]
    reset, update = (graph.add("Sigmoid", graph.add("Add", *z[k])) for k in range(2))
    candidate = graph.add("Tanh", graph.add("Add", z[2][0], graph.add("Mul", reset, z[2][1])))
    kept = graph.add("Mul", update, graph.add("Sub", before["hidden"], candidate))
    return {"hidden": graph.add("Add", candidate, kept)}


def activated(graph: Graph, x: str, activation: str) -> str:
    """The activation of a layer."""
    if activation == "silu":
        return graph.add("Mul", x, graph.add("Sigmoid", x))
    if activation == "gelu":
        below = graph.add("Erf", graph.add("Mul", x, graph.constant(0.5**0.5, np.float32)))
        probability = graph.add("Add", below, graph.constant(1.0, np.float32))
        return graph.add("Mul", graph.add("Mul", x, graph.constant(0.5, np.float32)), probability)
    if activation == "leaky_relu":
        return graph.add("LeakyRelu", x, alpha=0.01)
    return graph.add({"tanh": "Tanh", "relu": "Relu", "elu": "Elu"}[activation], x)


def add_actions(graph: Graph, output: str, action: Mapping[str, Any], weights: Mapping[str, NDArray[Any]]) -> None:
    """The output `action` of the graph: deterministic, in the units of the environment."""
    shape = graph.constant([-1, *action["shape"]], np.int64)
    if action["kind"] == "Box":
        low, high = weights["action.low"], weights["action.high"]
        x = graph.add("Reshape", graph.cast(output, "float64"), shape)
        if action["bounds"] == "squash":
            x = graph.add("Tanh", x)
        else:
            x = graph.add("Min", graph.add("Max", x, graph.constant(-1.0, np.float64)), graph.constant(1.0, np.float64))
        x = graph.add("Mul", x, graph.constant((high - low) / 2, np.float64))
        x = graph.add("Add", x, graph.constant((high + low) / 2, np.float64))
        bounded = graph.add("Max", x, graph.constant(low, np.float64))
        graph.cast(graph.add("Min", bounded, graph.constant(high, np.float64)), action["dtype"], "action")
        return
    if action["kind"] == "Discrete":
        width = max(action["counts"])
        forbidden = np.where(np.arange(width) >= np.array(action["counts"])[:, None], -np.inf, 0.0)
        choices = graph.add("Reshape", output, graph.constant([-1, *forbidden.shape], np.int64))
        chosen = graph.add(
            "ArgMax", graph.add("Add", choices, graph.constant(forbidden, np.float32)), axis=-1, keepdims=0
        )
        number = graph.add("Reshape", graph.add("Add", chosen, graph.constant(action["start"], np.int64)), shape)
        graph.cast(number, action["dtype"], "action")
        return
    on = graph.add("Greater", output, graph.constant(0.0, np.float32))
    graph.cast(graph.add("Reshape", on, shape), action["dtype"], "action")
