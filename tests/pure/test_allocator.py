"""The C library keeps freed blocks while it is asked to, and only then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hasten.base import allocator
from hasten.base.allocator import BufferReuse, refusal

# Page faults of four rounds of taking, filling and freeing 64 MiB: plain, with reuse (after one round that
# brings the pages in), and after switching it off again. A process of its own: pytest's has freed blocks of
# every size.
_FAULTS = """
import json, resource
from hasten.base import allocator

def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        bytearray(64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

faults(1)
plain = faults(4)
first = allocator.enable()
allocator.enable()
faults(1)
kept, held = faults(4), resident()
still = allocator.disable()
shared = faults(4)
last = allocator.disable()
off, left = faults(4), resident()
again = allocator.enable()
faults(1)
print(json.dumps({"plain": plain, "kept": kept, "shared": shared, "off": off, "again": faults(4),
    "held": held, "left": left, "states": [first.on, still.on, last.on, again.on]}))
"""


@pytest.mark.skipif(bool(refusal()), reason=f"buffers are not reused here: {refusal()}")
def test_pages_stay_and_go() -> None:
    here = Path(__file__).parents[2]
    command = [sys.executable, "-c", _FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=here, timeout=60)
    found = json.loads(done.stdout)
    pages = 4 * (64 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert found["plain"] >= pages
    assert found["kept"] < pages / 100
    assert found["shared"] < pages / 100
    assert found["off"] >= pages
    assert found["again"] < pages / 100
    assert found["states"] == [True, True, False, True]
    assert found["held"] - found["left"] > 60 << 20


# What 100 MB of small blocks leave behind under one that stays: given back on request, unless reuse is on.
_LEFT = """
import json, resource
from hasten.base import allocator

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def leave():
    blocks = [b"x" * (100_000 + i) for i in range(1000)]
    return blocks[-1]

pin = leave()
before = resident()
allocator.give_back()
after = resident()
allocator.enable()
pins = leave()
kept = resident()
allocator.give_back()
print(json.dumps({"returned": before - after, "returned_with_reuse": kept - resident()}))
"""


@pytest.mark.skipif(bool(refusal()), reason=f"buffers are not reused here: {refusal()}")
def test_freed_blocks_are_given_back_on_request() -> None:
    here = Path(__file__).parents[2]
    command = [sys.executable, "-c", _LEFT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=here, timeout=60)
    found = json.loads(done.stdout)
    assert found["returned"] > 80e6
    assert abs(found["returned_with_reuse"]) < 5e6


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """Records what would be set instead of setting it in the process that runs the tests."""
    made: list[dict[int, int]] = []

    def record(options: dict[int, int]) -> bool:
        made.append(options)
        return True

    monkeypatch.setattr(allocator, "_set", record)
    monkeypatch.setattr(allocator, "refusal", lambda: "")
    return made


def test_the_last_user_switches_off(calls: list[dict[int, int]]) -> None:
    reuse = BufferReuse()
    assert reuse.status().reason == "no optimised model uses it"
    assert not reuse.disable().on
    assert calls == []
    assert reuse.enable().on
    assert reuse.enable().users == 2
    assert reuse.disable().on
    assert len(calls) == 1
    status = reuse.disable()
    assert (status.on, status.users, status.settings_bytes) == (False, 0, {})
    assert len(calls) == 2
    assert str(reuse.enable()) == "on: glibc keeps freed blocks for reuse"
    assert len(calls) == 3


def test_many_threads(calls: list[dict[int, int]]) -> None:
    reuse = BufferReuse()
    threads = [threading.Thread(target=lambda: [reuse.enable() for _ in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reuse.status().users == 400
    assert len(calls) == 1
    for _ in range(400):
        reuse.disable()
    assert len(calls) == 2
    assert not reuse.status().on


def test_a_refusal_is_reported_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "refusal", lambda: "the C library is not glibc")
    reuse = BufferReuse()
    assert str(reuse.enable()) == "off: the C library is not glibc"
    assert reuse.status().users == 1
    assert reuse.disable().users == 0


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"MALLOC_TOP_PAD_": "1"}, "MALLOC_TOP_PAD_ is set"),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mmap_threshold=9"},
            "sets mmap_threshold",
        ),
        ({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}, ""),
        ({}, ""),
    ],
)
def test_the_users_own_settings_are_kept(
    environ: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "confstr", lambda _: "glibc 2.36")
    monkeypatch.setattr(allocator, "_provider_of_malloc", lambda: "libc.so.6")
    assert reason in refusal(environ)
    assert bool(refusal(environ)) is bool(reason)


def test_other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "confstr", lambda _: "glibc 2.36")
    monkeypatch.setattr(allocator, "_provider_of_malloc", lambda: "libjemalloc.so.2")
    assert refusal({}) == "malloc comes from libjemalloc.so.2, which keeps buffers by its own rules"

    def unknown(_: str) -> str:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "confstr", unknown)
    assert "not glibc" in refusal({})
