"""K2: nothing that is loaded can run code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "tailguard"
MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    "torch.load",
    "np.load",
    "numpy.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "os.system",
    "os.popen",
}
"""Readers and runners that no module may use; `np.load` unpickles on request."""


def uses(tree: ast.AST) -> set[str]:
    """Forbidden names a module imports or calls."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & MODULES
        elif isinstance(node, ast.Call):
            found |= {ast.unparse(node.func)} & (CALLS | METHODS)
    return found


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_module_unpickles_or_evaluates(file: Path) -> None:
    assert uses(ast.parse(file.read_text())) == set()


def test_the_search_finds_what_it_looks_for() -> None:
    forbidden = "import pickle\nfrom cloudpickle import loads\ntorch.load(x)\neval('1')\nyaml.load(x)"
    found = uses(ast.parse(f"{forbidden}\nmodel.eval()\nre.compile('a')"))
    assert found == {"pickle", "cloudpickle", "torch.load", "eval", "yaml.load"}
