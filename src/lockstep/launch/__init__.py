"""Everything about processes: where a job's workers come from, how they meet, and how they end.

`command` prepares the command line and runs its jobs; `agent` starts the workers of a job and watches them; `worker` is
the life of one of them. Importing this package stays light: a mistyped command line must be answered at once.
"""

from typing import TYPE_CHECKING

from lockstep.launch.origin import external_launcher, remove_leftovers, restart_count
from lockstep.launch.signals import STOP_SIGNALS, StopSignals, handle_stop_signals

if TYPE_CHECKING:
    from lockstep.launch.command import Command

__all__ = [
    "STOP_SIGNALS",
    "external_launcher",
    "handle_stop_signals",
    "prepare",
    "remove_leftovers",
    "restart_count",
]


def prepare(preload: str) -> "Command":
    """Prepare this interpreter to run jobs: signals first, then the fork server.

    Args:
        preload: Module that imports what every worker needs.
    """
    stop_signals = StopSignals()
    from lockstep.launch.command import Command  # takes time; a signal during it is answered already

    return Command(stop_signals, preload)
