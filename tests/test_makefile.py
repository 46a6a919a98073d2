"""The Makefile's help, and its check of the Python version before anything is made."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from lockstep import config

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def make(tmp_path: Path):
    """Runs make in a folder that has a Makefile and the requirements, but no virtual environment."""
    for name in ("Makefile", "requirements.txt", "requirements-dev.txt", "pyproject.toml"):
        shutil.copy(config.PROJECT / name, tmp_path)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
        return subprocess.run(["make", *arguments], cwd=tmp_path, env=environ, capture_output=True, text=True)

    return run


def fake_python(folder: Path, version: str) -> str:
    python = folder / "fake-python"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize("target", ["setup", "test", "train"])
@pytest.mark.parametrize("version", ["3.10", "3.14"])
def test_another_python_is_refused_in_one_line(make, tmp_path: Path, target: str, version: str) -> None:
    python = fake_python(tmp_path, version)
    made = make(target, f"PYTHON={python}")
    assert made.returncode != 0
    (line,) = made.stderr.splitlines()
    assert f"needs Python 3.11, 3.12 or 3.13, and {python} is {version}; choose one with make PYTHON=python3.13" in line
    assert not (tmp_path / ".venv").exists()


def test_a_python_that_is_not_installed_is_refused(make, tmp_path: Path) -> None:
    made = make("setup", "PYTHON=python3.99")
    assert made.returncode != 0
    assert "python3.99 is not installed" in made.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_an_admitted_python_is_used(make, tmp_path: Path, version: str) -> None:
    python = fake_python(tmp_path, version)
    made = make("--dry-run", "setup", f"PYTHON={python}")
    assert made.returncode == 0
    assert f"{python} -m venv .venv" in made.stdout


def test_help_lists_every_target_in_one_column(make) -> None:
    lines = make().stdout.splitlines()
    targets = [line.split()[1] for line in lines]
    assert {"setup", "test", "test-all", "test-versions", "clean"} <= set(targets)
    starts = {line.index(line.split(maxsplit=2)[2]) for line in lines}
    assert len(starts) == 1
