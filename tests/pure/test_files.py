"""Files are replaced whole or not at all; events are one JSON object a line."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from hasten.base.errors import InputError
from hasten.base.events import EventLog
from hasten.base.files import atomic_file, locked, make_folder, sha256_of, write_atomically


def test_replaces_text_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_atomically(path, "grün")
    assert path.read_bytes() == "grün".encode()
    write_atomically(str(path), b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]
    assert sha256_of(path) == "b413f47d13ee2fe6c845b2ee141af81de858df4ec549a58b7970bb96645bc8d2"


def test_a_folder_is_made_or_refused_with_the_reason(tmp_path: Path) -> None:
    assert make_folder(tmp_path / "a" / "b", "x") == make_folder(str(tmp_path / "a" / "b"), "x")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    file = tmp_path / "file"
    file.write_text("")
    refused = {
        file: f"x: {file} is a file, not a folder",
        file / "below" / "it": f"x: {file} is a file, not a folder",
        tmp_path / ("n" * 300): "x: the name is too long",
    }
    if Path("/proc/self").exists():
        refused[Path("/proc/hasten")] = "x: no files can be made there"
        refused[Path("/proc")] = "x: no files can be made there"
    if os.geteuid():
        (tmp_path / "a").chmod(0o500)
        refused[tmp_path / "a" / "c"] = "x: permission denied"
    for folder, message in refused.items():
        with pytest.raises(InputError) as caught:
            make_folder(folder, "x")
        assert str(caught.value).startswith(message)


def test_permissions_are_those_of_an_ordinary_file(tmp_path: Path) -> None:
    (tmp_path / "ordinary").write_text("")
    write_atomically(tmp_path / "atomic", "")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ordinary", "atomic")}
    assert len(modes) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(
    number: int, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    write_atomically(path, "old")

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(InputError, match=r"cannot write .*a\.txt: .*the file that was there is unchanged"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="its folder is a file"):
        write_atomically(tmp_path / "file" / "a", "")


def test_an_error_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_atomically(path, "old")

    def write_half() -> None:
        with atomic_file(path) as handle:
            handle.write(b"half")
            raise KeyError("a mistake of the caller")

    with pytest.raises(KeyError):
        write_half()
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its folder does not exist"):
        write_atomically(tmp_path / "gone" / "a.txt", "")
    (tmp_path / "d").mkdir()
    with pytest.raises(InputError, match="it is a folder"):
        write_atomically(tmp_path / "d", "")


def test_a_locked_folder_is_refused_until_it_is_free(tmp_path: Path) -> None:
    with locked(tmp_path, "one"):
        with pytest.raises(InputError, match="in use by two"), locked(tmp_path, "two"):
            pass
        # Still held: a refused try does not free it.
        with pytest.raises(InputError, match="in use by three"), locked(tmp_path, "three"):
            pass
    with locked(tmp_path, "four"):
        pass
    with pytest.raises(InputError, match="cannot open folder"), locked(tmp_path / "none", "five"):
        pass


def test_other_errors_keep_their_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        write_atomically(tmp_path / "a", "")


def test_events_and_spans(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.event("step", loss=float("nan"), sizes=(1, 2))
        assert json.loads(path.read_text()) | {"time_s": 0} == {
            "time_s": 0,
            "event": "step",
            "loss": "nan",
            "sizes": [1, 2],
        }
        with log.span("capture", layer=3) as fields:
            fields["nodes"] = 66
        with pytest.raises(RuntimeError), log.span("fails"):
            raise RuntimeError("why")
    with EventLog(path) as log:
        log.event("again")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["step", "capture", "fails", "again"]
    assert (lines[1]["layer"], lines[1]["nodes"]) == (3, 66)
    assert lines[1]["duration_s"] >= 0
    assert lines[2]["error"] == "RuntimeError: why"
