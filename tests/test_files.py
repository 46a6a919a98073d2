"""A file is there in full or not at all."""

import os
from pathlib import Path

import pytest

from lockstep.files import shortest, whole_file


def test_a_file_is_whole_or_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with whole_file(path) as file:
        file.write(b"old")

    def fill_the_disk() -> None:
        with whole_file(path) as file:
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
    with whole_file(path) as file:
        file.write(b"content")
    assert synced == [(str(tmp_path / ".file.tmp"), False), (str(tmp_path), True)]


def test_paths_are_as_short_as_they_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shortest(tmp_path / "a" / "b") == "a/b"
    assert shortest(Path("/")) == "/"
