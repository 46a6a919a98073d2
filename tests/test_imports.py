"""The rooms of src/lockstep: who may import whom, and what stays light."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from lockstep import config

PACKAGE = config.PROJECT / "src" / "lockstep"
GROUND = {"errors", "config", "tags", "files", "position"}
# What each room may import, beside itself and the ground floor. `preload` names what workers need; nobody imports it.
ROOMS: dict[str, set[str]] = {
    **dict.fromkeys(GROUND, set()),
    **dict.fromkeys(("host", "model", "strategies", "loggers", "plugins", "data", "launch", "report"), set()),
    "callbacks": {"launch"},
    "training": {"host", "data", "model", "strategies", "callbacks", "loggers", "launch"},
    "preload": {"training", "data", "model", "plugins", "callbacks", "loggers"},
}
# Of launch, those that import no torch and start nothing.
PUBLIC_TO_CALLBACKS = {"lockstep.launch"}


def modules() -> dict[str, Path]:
    """Every module's dotted name and file."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ("lockstep", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports_of(path: Path, names: set[str]) -> set[str]:
    """The project's modules that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & names
            found |= inner or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name in names and name != "lockstep"}


def room_of(module: str) -> str:
    return module.split(".")[1]


MODULES = modules()


@pytest.mark.parametrize("module", sorted(name for name in MODULES if name != "lockstep"))
def test_imports_run_one_way(module: str) -> None:
    room = room_of(module)
    allowed = ROOMS[room] | {room} | (GROUND if room not in GROUND else set())
    for imported in imports_of(MODULES[module], set(MODULES)):
        if room in GROUND and room_of(imported) in GROUND:
            continue  # within the ground floor only circles are forbidden
        assert room_of(imported) in allowed, f"{module} imports {imported}"
        if room == "callbacks" and room_of(imported) == "launch":
            assert imported in PUBLIC_TO_CALLBACKS, f"{module} imports {imported}"


def test_there_is_no_circle() -> None:
    graph = {name: imports_of(path, set(MODULES)) for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_strategies_can_be_copied_alone() -> None:
    assert imports_of(MODULES["lockstep.strategies"], set(MODULES)) == set()


@pytest.mark.parametrize("module", ["lockstep.launch", "lockstep.launch.command", "lockstep.report", *sorted(GROUND)])
def test_what_a_command_line_needs_is_light(module: str) -> None:
    name = module if "." in module else f"lockstep.{module}"
    code = f"import sys, {name}; print(*({{'torch', 'lightning', 'numpy', 'matplotlib'}} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_train_py_is_short() -> None:
    lines = (config.PROJECT / "train.py").read_text().splitlines()
    assert len(lines) <= 50
