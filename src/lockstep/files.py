"""Files that are either there in full or not at all, and their names as a person types them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under its name only once its content is on the disk.

    Whoever is killed in between, or finds the disk full, leaves the file that was there before.

    Args:
        path: The final name; its folder exists.
    """
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name too, not only the content
    finally:
        os.close(folder)


def shortest(path: Path) -> str:
    """As short as it can be typed from where the command was typed."""
    path, here = path.resolve(), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
