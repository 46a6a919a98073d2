"""The callbacks: measuring over all ranks, resuming exactly, and stopping together."""

from lockstep.callbacks.epoch_monitor import EpochMonitor
from lockstep.callbacks.gil import GilMonitor
from lockstep.callbacks.resuming import EpochSeed, RewindEvents
from lockstep.callbacks.stopping import FailureNote, FiniteLoss, StopTogether
from lockstep.callbacks.timeline import StepTimeline

__all__ = [
    "EpochMonitor",
    "EpochSeed",
    "FailureNote",
    "FiniteLoss",
    "GilMonitor",
    "RewindEvents",
    "StepTimeline",
    "StopTogether",
]
