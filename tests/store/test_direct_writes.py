"""Local files written past the page cache: aligned memory goes there, and every byte arrives in any case."""

import errno
import fcntl
import os
import subprocess
import sys
import threading

import pytest

from raycheck.errors import StorageError
from raycheck.store.local import LocalBackend
from raycheck.store.objects import Store
from raycheck.store.upload import upload

PAGE = 4096
SIZE = 3 * (4 << 20) + 5 * PAGE + 123


class Disk:
    """Writes like ``os.pwrite``, and counts; can be told to refuse direct writes or to cut them short."""

    def __init__(self, *, refuses=False, most_bytes=None, is_full_from=None):
        self.refuses, self.most_bytes, self.is_full_from = refuses, most_bytes, is_full_from
        self.num_direct_bytes = self.num_cached_bytes = self.num_fired = 0
        self._lock = threading.Lock()

    def __call__(self, descriptor, data, offset):
        # Two parts are written at a time.
        with self._lock:
            return self._write(descriptor, data, offset)

    def _write(self, descriptor, data, offset):
        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            count = os.pwrite(descriptor, data, offset)
            self.num_cached_bytes += count
            return count
        if self.refuses:
            self.num_fired += 1
            raise OSError(errno.EINVAL, "no direct writes")
        if self.is_full_from is not None and offset >= self.is_full_from:
            self.num_fired += 1
            raise OSError(errno.ENOSPC, "no space left")
        if self.most_bytes is not None and len(data) > self.most_bytes:
            self.num_fired += 1
            # The disk has taken it all and says it was less, as a signal makes it do.
            return min(os.pwrite(descriptor, data, offset), self.most_bytes)
        count = os.pwrite(descriptor, data, offset)
        self.num_direct_bytes += count
        return count


@pytest.fixture
def folder(tmp_path):
    """A folder that takes direct writes."""
    path = tmp_path / "probe"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of the temporary folder takes no direct writes")
    return tmp_path


def send(folder, make_source, never, disk, *, source_offset=PAGE):
    """Upload from an arena that begins at a page."""
    source, data = make_source(source_offset + SIZE)
    store = Store(str(folder / "run"), connect=lambda place, _: LocalBackend(place, pwrite=disk))
    upload(
        store,
        "shard",
        source,
        source_offset=source_offset,
        size_bytes=SIZE,
        chunk_bytes=1 << 20,
        parallel_parts=4,
        cancelled=never,
    )
    assert (folder / "run" / "shard").read_bytes() == data[source_offset:]


def test_an_arena_goes_past_the_page_cache(folder, make_source, never):
    """All but what does not fill a block."""
    disk = Disk()
    send(folder, make_source, never, disk)
    assert (disk.num_direct_bytes, disk.num_cached_bytes) == (SIZE - 123, 123)


def test_memory_that_is_not_aligned_is_written_as_ever(folder, make_source, never):
    """Nobody is asked for what the disk could not take."""
    disk = Disk()
    send(folder, make_source, never, disk, source_offset=PAGE + 8)
    assert (disk.num_direct_bytes, disk.num_cached_bytes) == (0, SIZE)


def test_a_file_system_that_refuses_is_asked_once(folder, make_source, never):
    """Some take the flag and no write; each of two writers may have asked."""
    disk = Disk(refuses=True)
    send(folder, make_source, never, disk)
    assert disk.num_fired in (1, 2)
    assert disk.num_cached_bytes == SIZE


@pytest.mark.parametrize("most_bytes", [PAGE, 100 * PAGE, 1000, 2 * PAGE + 7])
def test_writes_that_are_cut_short_go_on(folder, make_source, never, most_bytes):
    """At a block; what ends in the middle of one is written as ever from there."""
    disk = Disk(most_bytes=most_bytes)
    send(folder, make_source, never, disk)
    assert disk.num_fired


def test_a_disk_that_is_full_in_the_middle_is_a_soft_failure(folder, make_source, never):
    """Where no space could be reserved: one writer fails, the other ends, and nothing is left."""
    disk = Disk(is_full_from=8 << 20)
    with pytest.raises(StorageError, match=f"no space left: it needs {SIZE} bytes"):
        send(folder, make_source, never, disk)
    assert disk.num_fired
    assert [path for path in (folder / "run").rglob("*") if path.is_file()] == []


LIMITED = """
import os, resource, signal, sys, threading
from raycheck.store.objects import Store
from raycheck.store.upload import upload
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
source = os.memfd_create("arena")
os.truncate(source, 4096 + {size})
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))
upload(Store(sys.argv[1]), "shard", source, source_offset=4096, size_bytes={size}, chunk_bytes=1 << 20,
       parallel_parts=1, cancelled=threading.Event())
"""


def test_a_disk_that_takes_no_more_is_a_soft_failure(folder):
    """Refused by the kernel itself before anything is written: one clear error, and nothing is left."""
    code = LIMITED.format(size=SIZE, limit=6 << 20)
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder / "run")], capture_output=True, text=True, timeout=120
    )
    assert f"{StorageError.__name__}: cannot write" in done.stderr, done.stderr
    assert f"it needs {SIZE} bytes" in done.stderr
    left = [path for path in (folder / "run").rglob("*") if path.is_file()]
    assert left == []
