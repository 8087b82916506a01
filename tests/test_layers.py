"""Imports point downwards only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "raycheck"
STDLIB_ONLY = {"ray", "torch", "fsspec", "s3fs", "pyarrow", "numpy", "safetensors", "crc32c", "rich", "typer"}
FORBIDDEN = {
    "core": STDLIB_ONLY,
    "config": STDLIB_ONLY,
    "errors": STDLIB_ONLY,
    "store": {"ray", "torch", "rich", "typer"},
    "observe": {"ray", "torch", "fsspec", "s3fs"},
    "state": {"ray", "fsspec", "s3fs", "rich", "typer"},
    "data": {"ray", "fsspec", "s3fs", "rich", "typer"},
    "testing": {"ray"},
    "runtime": {"fsspec", "s3fs", "typer"},
    "cli": {"fsspec", "s3fs"},
    "__main__": {"ray", "torch", "fsspec", "s3fs"},
}
BELOW = {
    "errors": set(),
    "config": {"errors"},
    "core": {"errors"},
    "store": {"core", "errors", "config"},
    "observe": {"core", "errors", "config", "store"},
    "state": {"core", "errors", "config"},
    "data": {"core", "errors", "config"},
    "testing": {"core", "store", "state", "errors", "config"},
    "runtime": {"core", "store", "observe", "state", "data", "errors", "config"},
    "cli": {"core", "store", "observe", "state", "data", "runtime", "errors", "config", "testing"},
    "__main__": {"cli"},
}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def layer_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            assert node.module
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_below(path):
    """Each module imports its own layer, lower layers and what its layer may use."""
    layer = layer_of(path)
    for name in imports_of(path):
        top, *rest = name.split(".")
        assert top not in FORBIDDEN[layer], f"{layer} must not import {name}"
        if top == "raycheck" and rest:
            assert rest[0] in BELOW[layer] | {layer}, f"{layer} must not import {name}"


def test_ray_train_internals_are_imported_in_one_file():
    """A new Ray version is a matter of one file."""
    users = {
        str(path.relative_to(PACKAGE))
        for path in MODULES
        if any(name.startswith("ray.train.v2") for name in imports_of(path))
    }
    assert users <= {"runtime/compat.py"}


def test_agent_and_coordinator_start_without_torch_and_ray():
    """A node agent is a small process: beneath its actor shell it needs neither."""
    code = (
        "import sys, raycheck.runtime.agent, raycheck.runtime.coordinator; "
        "assert not {'torch', 'ray'} & set(sys.modules), sorted({'torch', 'ray'} & set(sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)
