"""What this machine is, and what a process takes of it: cores, memory, GPUs."""

import ctypes
import os
import platform
import re
from pathlib import Path

import torch
from omegaconf import DictConfig

from lockstep.config import replicas
from lockstep.errors import ConfigError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


def take_resources(cfg: DictConfig) -> None:
    """Set the threads, memory and GPUs of this process, whatever ran in it or in its parent before."""
    torch.set_num_threads(num_threads(cfg))
    keep_freed_memory()
    if accelerator(cfg) == "cpu":
        # Before every step an optimizer asks torch for GPUs, and with Lightning imported torch opens NVML to answer.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def num_threads(cfg: DictConfig) -> int:
    """Return the intra-op threads of one replica: an even share of this machine's cores."""
    if cfg.launch.threads_per_process is not None:
        return cfg.launch.threads_per_process
    return max(1, num_cores() // (cfg.launch.nproc_per_node * replicas(cfg)))


def num_cores() -> int:
    """Return the cores that this process may use, or all of them on macOS, which cannot tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Let glibc, where that is the C library, keep the memory that a step frees for the next one (mallopt(3)).

    By default it returns large buffers to the system, which has to clear them before it gives them out again: up to a
    fifth of a step. At most 1 GiB is kept.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(option, 2**30)


def accelerator(cfg: DictConfig) -> str:
    """Return `trainer.accelerator`, with `auto` decided: the GPUs if there are enough of them, else the CPU.

    Raises:
        ConfigError: If GPUs are asked for by name and there are too few.
    """
    name, devices, available = cfg.trainer.accelerator, cfg.strategy.devices, torch.cuda.device_count()
    if name == "auto":
        return "cuda" if available >= devices else "cpu"
    if name in ("gpu", "cuda") and available < devices:
        raise ConfigError(
            f"trainer.accelerator={name} with strategy={cfg.strategy.name} needs {devices} GPUs and this machine has"
            f" {available}; allowed: a smaller trainer.devices, or trainer.accelerator=cpu"
        )
    return name


def device_name(device: torch.device) -> str:
    """Return a GPU's name, or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def hardware() -> str:
    """Return the cores and the processor in words."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return f"{num_cores()} cores of {names[0].strip() if names else platform.processor() or platform.machine()}"
