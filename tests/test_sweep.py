"""Many jobs in one command: the last is like the second."""

import importlib.util
from pathlib import Path
from statistics import median
from types import ModuleType

import pytest

from lockstep import config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

JOBS = 200


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_hundred_jobs_leave_nothing_behind(tmp_path: Path) -> None:
    samples = load(config.PROJECT / "benchmarks" / "long_sweep.py").measure(JOBS, tmp_path / "sweep")
    early, late = samples[10:30], samples[-20:]  # the first jobs fill caches
    for which, name in enumerate(("command", "fork server")):
        before, after = (median(sample.memory[which] for sample in part) for part in (early, late))
        assert after < before + 15, f"{name}: {before} MiB, then {after} MiB"
        # how many the present job has open depends on the moment
        assert max(sample.files[which] for sample in late) <= max(sample.files[which] for sample in early) + 3, name
    assert max(sample.shared for sample in late) <= max(sample.shared for sample in early) + 3
    before, after = (median(sample.startup_sec for sample in part) for part in (early, late))
    assert after < 3 * before  # the machine drifts by a factor of two
