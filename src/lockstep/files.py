"""Files that are there in full or not at all, and paths as a person types them."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that gets its name only once its content is on the disk.

    If the process is killed or the disk is full before that, the previous file stays.

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


def write_json(path: Path, content: Any) -> None:
    """Write `content` as indented JSON, atomically."""
    with atomic_write(path) as file:
        file.write(f"{json.dumps(content, indent=2)}\n".encode())


def shortest_path(path: Path) -> str:
    """Return the shortest way to type a path from the working directory."""
    path, here = path.resolve(), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
