"""Exporting an agent as a frozen policy: contract, weights, test vector and checksums in one folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors.numpy import save as render_arrays

from tailguard.checkpoint import DIGEST, read_bundle, write_folder
from tailguard.config_edits import trained_experiment
from tailguard.frozen.agent import describe, make_test_vector, refuse_own_classes, weights_of
from tailguard.frozen.market import market_of_agent, market_of_run
from tailguard.ppo import DistributionalPPO
from tailguard.run import RunFolder, newest_checkpoint, run_path

FORMAT, SCHEMA_VERSION = "tailguard-frozen-policy", 1
CONTRACT, WEIGHTS, TEST_VECTOR, GRAPH, CHECKSUMS = (
    *("contract.json", "weights.safetensors", "test_vector.safetensors"),
    *("step.onnx", "SHA256SUMS"),
)
VERSIONS = ("tailguard", "torch", "numpy")


def export(what: DistributionalPPO | str | Path, folder: str | Path) -> Path:
    """Write the frozen policy of an agent, or of the newest agent of a run (a name under runs/, or a path).

    Where the package onnx is installed (`tailguard[onnx]`) the folder also has `step.onnx`, the graph of one step.
    A frozen policy that the folder held before is replaced whole; anything else there is refused. Read it with
    `tailguard_runtime.FrozenPolicy.load`.
    """
    if isinstance(what, DistributionalPPO):
        source: dict[str, Any] = {"num_timesteps": what.num_timesteps, "run": None, "checkpoint_sha256": None}
        return write(what, what.obs_stats.state_dict(), market_of_agent(what), source, Path(folder))
    run = RunFolder(run_path(what))
    run.require_single_agent()
    checkpoint = newest_checkpoint(run)
    agent, moments = DistributionalPPO.load(checkpoint), read_bundle(checkpoint)[0]["parts"]["obs_stats"]
    source = {
        "num_timesteps": agent.num_timesteps,
        "run": run.name,
        "checkpoint_sha256": (checkpoint / DIGEST).read_text(encoding="ascii").strip(),
    }
    return write(agent, moments, market_of_run(trained_experiment(run, checkpoint), run), source, Path(folder))


def write(
    agent: DistributionalPPO,
    moments: Mapping[str, Any],
    market: Mapping[str, Any] | None,
    source: Mapping[str, Any],
    folder: Path,
) -> Path:
    """One folder, atomically; `market` is the part of the contract of agents that trade bars."""
    policy = agent.policy
    refuse_own_classes(policy)
    names = None if market is None else tuple(market["observation"])
    contract = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        **describe(policy, moments, names),
        "market": None if market is None else {name: said for name, said in market.items() if name != "observation"},
        "source": {**source, "versions": {name: version(name) for name in VERSIONS}},
    }
    weights = weights_of(policy, moments)
    files = {
        CONTRACT: json.dumps(contract, indent=1, allow_nan=False).encode(),
        WEIGHTS: render_arrays(weights),
        TEST_VECTOR: render_arrays(make_test_vector(policy, moments)),
    }
    if find_spec("onnx") is not None:
        from tailguard.frozen.graph import step_graph

        files[GRAPH] = step_graph(contract, weights)
    files[CHECKSUMS] = "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in files).encode()
    return write_folder(folder, files, CHECKSUMS, "frozen policy")
