"""A file is there in full or not at all."""

import json
import os
from pathlib import Path

import pytest

from lockstep.files import atomic_write, shortest_path, write_json


def test_a_file_is_whole_or_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_write(path) as file:
        file.write(b"old")

    def fill_the_disk() -> None:
        with atomic_write(path) as file:
            file.write(b"half of the new")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fill_the_disk()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_content_reaches_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.exists()))
    )
    with atomic_write(path) as file:
        file.write(b"content")
    assert synced == [(str(tmp_path / ".file.tmp"), False), (str(tmp_path), True)]


def test_json_is_indented_and_written_atomically(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    content = {"test/acc": 0.99, "data/source": "files", "lengths": [1, None]}
    write_json(path, content)
    assert json.loads(path.read_text()) == content
    assert path.read_text().startswith('{\n  "test/acc": 0.99,\n')
    assert path.read_text().endswith("}\n")
    written = path.read_bytes()
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_json(path, {"test/acc": 0.5, "bad": object()})
    assert path.read_bytes() == written
    assert list(tmp_path.iterdir()) == [path]


def test_paths_are_as_short_as_they_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shortest_path(tmp_path / "a" / "b") == "a/b"
    assert shortest_path(Path("/")) == "/"
