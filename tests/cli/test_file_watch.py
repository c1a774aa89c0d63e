"""A change of a file is reported once, whole, and however it was written."""

import os
from pathlib import Path

from cacheaware.file_watch import FileWatch


def test_new_content_is_reported_once_when_two_looks_agree(tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    file.write_bytes(b"one")
    watch = FileWatch(file, b"one")
    assert watch.poll() is None
    file.write_bytes(b"two")
    assert [watch.poll() for _ in range(4)] == [None, b"two", None, None]


def test_a_half_written_file_is_not_reported(tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    watch = FileWatch(file, b"one")
    seen = []
    for content in (b"t", b"tw", b"two", b"two"):
        file.write_bytes(content)
        seen.append(watch.poll())
    assert seen == [None, None, None, b"two"]


def test_a_missing_file_is_no_change_and_its_return_with_equal_content_neither(tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    watch = FileWatch(file, b"one")
    assert [watch.poll(), watch.poll()] == [None, None]
    file.write_bytes(b"one")
    assert [watch.poll(), watch.poll()] == [None, None]


def test_a_mounted_config_map_that_changes_its_symlink_is_followed(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pool.yaml").write_text(name)
    (tmp_path / "data").symlink_to("one")
    watch = FileWatch(tmp_path / "data" / "pool.yaml", b"one")
    (tmp_path / "new").symlink_to("two")
    os.replace(tmp_path / "new", tmp_path / "data")
    assert [watch.poll(), watch.poll()] == [None, b"two"]


def test_an_edit_that_is_undone_at_once_is_no_change(tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    watch = FileWatch(file, b"one")
    file.write_bytes(b"two")
    assert watch.poll() is None
    file.write_bytes(b"one")
    assert [watch.poll(), watch.poll()] == [None, None]
