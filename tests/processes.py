"""What runs on this machine, for tests that nothing is left running."""

import os
from pathlib import Path


def processes_in(folder: Path) -> list[str]:
    """The command lines of all processes whose working directory this is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd") == str(folder):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it has ended meanwhile
    return found
