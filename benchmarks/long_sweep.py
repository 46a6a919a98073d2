"""What a long sweep leaves behind: memory, open files and start-up time of job after job, as a figure.

python benchmarks/long_sweep.py              200 jobs; writes docs/reliability/long_sweep.png
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib

from lockstep import config, tags

matplotlib.use("agg")
import matplotlib.pyplot as plt

SMALLEST = (
    *("data=mnist_sample", "trainer.accelerator=cpu", "trainer.max_steps=1", "trainer.enable_progress_bar=false"),
    *("trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "trainer.devices=2"),
)


@dataclass(frozen=True)
class Sample:
    """The command and its fork server when a job had just ended.

    Attributes:
        job: Number in the sweep.
        startup_sec: From the job's beginning to its first training batch, s.
        memory: Resident set of the command and of the fork server, MiB.
        files: Open file descriptors of both.
        shared: Entries in /dev/shm.
    """

    job: int
    startup_sec: float
    memory: tuple[float, ...]
    files: tuple[int, ...]
    shared: int


def measure(jobs: int, folder: Path) -> list[Sample]:
    """Run one sweep of small jobs, single and ddp in turn, in `folder`.

    Raises:
        RuntimeError: If the sweep fails.
    """
    sweep = [f"hydra.sweep.dir={folder}", f"seed=range({jobs // 2})", "strategy=single,ddp"]
    command = [sys.executable, str(config.PROJECT / "train.py"), "-m", *SMALLEST, *sweep]
    samples = []
    with (folder.with_suffix(".log")).open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=folder.parent)
        for job in range(jobs):
            metrics = folder / str(job) / "metrics.json"
            while not metrics.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"the sweep ended at job {job} with exit code {process.returncode}")
                time.sleep(0.05)
            samples.append(_sample(job, json.loads(metrics.read_text())[tags.STARTUP_SEC], process.pid))
        if process.wait():
            raise RuntimeError(f"the sweep ended with exit code {process.returncode}")
    return samples


def _sample(job: int, startup_sec: float, pid: int) -> Sample:
    both = [pid, _forkserver(pid)]
    memory = tuple(_resident(each) for each in both)
    files = tuple(len(os.listdir(f"/proc/{each}/fd")) for each in both)
    return Sample(job, startup_sec, memory, files, len(os.listdir("/dev/shm")))


def _forkserver(pid: int) -> int:
    """The command's child that has imported torch; another one only tracks shared memory."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return max(map(int, children), key=_resident)


def _resident(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def draw(samples: list[Sample], path: Path) -> None:
    """Memory, open files and start-up time against the job's number."""
    jobs = [sample.job for sample in samples]
    figure, (memory, files, startup) = plt.subplots(3, 1, sharex=True, figsize=(7, 6), layout="constrained")
    for index, name in enumerate(("command", "fork server")):
        memory.plot(jobs, [sample.memory[index] for sample in samples], label=name)
        # how many the present job has open depends on the moment, so the most of ten jobs are shown
        tens = [samples[start : start + 10] for start in range(0, len(samples), 10)]
        files.plot([ten[0].job for ten in tens], [max(s.files[index] for s in ten) for ten in tens], label=name)
    memory.set(ylabel="resident memory, MiB", ylim=(0, None), title=f"One sweep of {len(samples)} jobs")
    files.set(ylabel="open files, at most", ylim=(0, None))
    startup.plot(jobs, [sample.startup_sec for sample in samples], ".", color="tab:green")
    startup.set(ylabel="start of a job, s", xlabel="job", ylim=(0, None))
    memory.legend(loc="lower right")
    for axes in (memory, files, startup):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--figure", type=Path, default=config.PROJECT / "docs" / "reliability" / "long_sweep.png")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples = measure(arguments.jobs, Path(folder) / "sweep")
    draw(samples, arguments.figure)
    for sample in (samples[1], samples[-1]):
        command, server = sample.memory
        print(f"job {sample.job}: command {command:.0f} MiB, fork server {server:.0f} MiB, {sample.startup_sec:.2f} s")


if __name__ == "__main__":
    main()
