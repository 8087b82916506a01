"""What one checkpoint costs: ours against every other way, on the same state in the same run.

    python benchmarks/checkpoint_cost.py [--state gpt|large] [--mib 1024] [--runs 5]
                                         [--store disk|discard|seaweedfs] [--folder DIR] [--core N]
                                         [--device cpu|cuda] [--step-s 0.25]

"discard" is an S3 server on loopback that throws bodies away, and so shows what
the client can do; it cannot show that what was saved is right. "seaweedfs" is a
real one, which takes most of the processor for itself.

One process trains: it computes on one core, all other threads run wherever the
system puts them, and updates its whole state with AdamW after each save has had
its forward and backward. All peers take turns, so that a disturbance of the
machine hits all alike. Peers that are not installed are left out.

With a GPU, the state lies there, and it computes. A column more says for how
long the GPU stood still, by events on its stream, and a line how fast our
copies were beside those into memory that the driver has pinned itself.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import logging
import mmap
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from checkpoint_device import Cuda, Host, device_named
from checkpoint_peers import Peer, Place, all_peers
from checkpoint_servers import SERVERS, start_s3
from checkpoint_state import MIB, fingerprint, make_state, tensors_of

GIB = 1 << 30
_libc = ctypes.CDLL(None)
FREE_S = 0.4
NO_SAVE_S = 1.0


@dataclasses.dataclass
class Cost:
    stall_s: float
    durable_s: float
    cpu_s: float
    slowdown: float | None
    device_stall_s: float | None
    """On the device's clock: what it took longer for than it would without the save."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--state", choices=["gpt", "large"], default="gpt")
    arguments.add_argument("--mib", type=int, default=1024)
    arguments.add_argument("--runs", type=int, default=5)
    arguments.add_argument("--store", choices=["disk", "discard", "seaweedfs"], default="disk")
    arguments.add_argument(
        "--only", nargs="+", metavar="NAME", help="ways to save whose names contain one of these"
    )
    arguments.add_argument(
        "--core", type=int, default=min(os.sched_getaffinity(0)), help="where the training thread computes"
    )
    arguments.add_argument("--folder", help="on the disk to be measured", default=None)
    arguments.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    arguments.add_argument(
        "--step-s", type=float, default=0.25, help="what a forward and backward take, before the update"
    )
    given = arguments.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    model, optimizer = make_state(given.state, given.mib * MIB, given.device)
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="raycheck-benchmark-", dir=given.folder))
        )
        place = Place(folder) if given.store == "disk" else start_s3(stack, given.store, folder)
        device = device_named(given.device)
        Bench(model, optimizer, place, device, given).run()


class NoSave(Peer):
    """Saves nothing: what the column of the slow-down says where there is none."""

    name = "limit: no save"

    def begin(self, number: int) -> None:
        threading.Timer(NO_SAVE_S, self._end).start()

    def _end(self) -> None:
        self.durable_at_s = time.monotonic()

    def load(self, number: int) -> dict[str, torch.Tensor]:
        return {}

    def delete(self, number: int) -> None:
        pass


class Bench:
    """All peers on one state."""

    def __init__(
        self, model, optimizer, place: Place, device: Host | Cuda, given: argparse.Namespace
    ) -> None:
        self._model, self._optimizer, self._place, self._device = model, optimizer, place, device
        self._runs, self._only, self._core, self._step_s = given.runs, given.only, given.core, given.step_s
        self._tensors = tensors_of(model, optimizer)
        self._num_bytes = sum(tensor.nbytes for tensor in self._tensors.values())
        self._number = 0
        width = 384 if device.name == "cpu" else 4096
        self._matrix = torch.randn(width, width, device=device.name)
        self._plain_update_s: float | None = None

    def run(self) -> None:
        peers: list[Peer] = []
        first: dict[str, Cost] = {}
        memory: dict[str, int] = {}
        exact: dict[str, bool] = {}
        self._train_for(num_steps=3)
        self._plain_update_s = self._device.seconds_between(*self._marks_around(self._optimizer.step))
        for kind in all_peers():
            if kind.is_local_only and self._place.url:
                continue
            if self._only and not any(word in kind.name for word in self._only):
                continue
            # What the checks read and freed is nobody's memory. Only for this: a way to save may go on
            # with memory that it has freed.
            _libc.malloc_trim(0)
            before_bytes = resident_bytes()
            peer = kind(self._model, self._optimizer, self._place, self._device)
            self._train_for(num_steps=4)
            first[peer.name], exact[peer.name] = self._save(peer)
            peak = Peak()
            _libc.malloc_trim(0)
            _, is_exact = self._save(peer, peak)
            exact[peer.name] &= is_exact
            memory[peer.name] = peak.num_bytes - before_bytes
            peers.append(peer)
        costs: dict[str, list[Cost]] = {peer.name: [] for peer in peers}
        no_save, undisturbed = NoSave(self._model, self._optimizer, self._place, self._device), []
        copies, writes, copied = [], [], []
        copier = self._device.copier()
        if copier is not None:
            copier.take_copy_s()
        with RawWrite(self._num_bytes, self._place.folder) as raw:
            for _ in range(self._runs):
                copies.append(self._device.copy_s(list(self._tensors.values())))
                writes.append(raw.write_s())
                undisturbed.append(self._save(no_save)[0])
                for peer in peers:
                    cost, is_exact = self._save(peer)
                    costs[peer.name].append(cost)
                    exact[peer.name] &= is_exact
                if copier is not None:
                    copied.append(copier.take_copy_s())
        self._print(first, costs, memory, exact)
        ours = Row.of(costs["raycheck"])
        copy_s, write_s = statistics.median(copies), statistics.median(writes)
        print(
            f"| limit: memory copy | {copy_s / ours.stall_s:.1f} | | | {copy_s * 1e3:.1f} | | | | | | |\n"
            f"| limit: raw write | | | {write_s / ours.durable_s:.1f} | | | | {write_s:.2f} | | | |\n"
            f"| {no_save.name} | | | | | | | | {slowed(undisturbed)} | | |"
        )
        if copied:
            ours_s, limit_s = statistics.median(copied), statistics.median(copies)
            print(f"\ncopied out of the device in {ours_s:.3f} s, {limit_s / ours_s:.2f} of the limit's rate")
        for peer in reversed(peers):
            peer.close()

    def _train_for(self, num_steps: int) -> None:
        for _ in range(num_steps):
            end_s = time.monotonic() + self._step_s
            self._compute(lambda end_s=end_s: time.monotonic() > end_s)
            self._optimizer.step()

    def _save(self, peer: Peer, peak: Peak | None = None) -> tuple[Cost, bool]:
        """Save once while training goes on; check what was saved against the state at the boundary."""
        self._number += 1
        free = Rate()
        self._compute_freely(free)
        expected = fingerprint(self._tensors)
        peer.durable_at_s = None
        if peak:
            peak.start()
        cpu_before_s, main_s = cpu_seconds(), 0.0
        self._device.synchronize()
        began_s = time.monotonic()
        at_boundary = self._marks_around(lambda: peer.begin(self._number))
        stall_s = time.monotonic() - began_s
        busy = Rate()
        main_before_s = time.thread_time()
        end_s = time.monotonic() + self._step_s
        self._compute(lambda: time.monotonic() > end_s, peer, busy)
        main_s += time.thread_time() - main_before_s
        before_update = self._device.mark()
        stall_s += timed(peer.before_update)
        main_before_s = time.thread_time()
        self._optimizer.step()
        main_s += time.thread_time() - main_before_s
        at_update = before_update, self._device.mark()
        waited_s: list[float] = []
        stall_s += timed(lambda: waited_s.append(peer.after_update()))
        stall_s += waited_s[0]
        main_before_s = time.thread_time()
        self._compute(lambda: peer.durable_at_s is not None, peer, busy)
        main_s += time.thread_time() - main_before_s
        cpu_s = cpu_seconds() - cpu_before_s - main_s
        assert peer.durable_at_s is not None
        if peak:
            peak.stop()
        # Before and after: the machine itself changes its speed by more than what is looked for.
        self._compute_freely(free)
        slowdown = 1 - busy.per_s / free.per_s if busy.seconds > 0.1 else None
        is_exact = not self._place.keeps or fingerprint(peer.load(self._number)) == expected
        peer.delete(self._number)
        durable_s = peer.durable_at_s - began_s
        return Cost(
            stall_s, durable_s, cpu_s, slowdown, self._device_stall_s(at_boundary, at_update)
        ), is_exact

    def _marks_around(self, action: Callable[[], object]) -> tuple[Any, Any]:
        before = self._device.mark()
        action()
        return before, self._device.mark()

    def _device_stall_s(self, at_boundary: tuple[Any, Any], at_update: tuple[Any, Any]) -> float | None:
        boundary_s, update_s = (self._device.seconds_between(*each) for each in (at_boundary, at_update))
        if boundary_s is None or update_s is None or self._plain_update_s is None:
            return None
        return boundary_s + max(0.0, update_s - self._plain_update_s)

    def _compute_freely(self, rate: Rate) -> None:
        end_s = time.monotonic() + FREE_S
        self._compute(lambda: time.monotonic() > end_s, rate=rate)

    def _compute(self, is_over: Callable[[], bool], peer: Peer | None = None, rate: Rate | None = None):
        """Multiply matrices until it is over; count those made while the peer's save was under way."""
        rate = rate or Rate()
        with on_core(self._core):
            while not is_over():
                started_s = time.monotonic()
                for _ in range(4):
                    torch.mm(self._matrix, self._matrix)
                self._device.synchronize()
                if peer is None or peer.durable_at_s is None:
                    rate.num += 1
                    rate.seconds += time.monotonic() - started_s

    def _print(self, first, costs, memory, exact) -> None:
        gib = self._num_bytes / GIB
        print(
            f"{gib:.2f} GiB in {len(self._tensors)} tensors, median of {self._runs}, "
            f"{os.cpu_count()} cores, torch {torch.__version__}, "
            f"computing on core {self._core}, to {self._place.url or 'a local disk'}\n"
        )
        ours = Row.of(costs["raycheck"])
        print(
            "| | stall : ours | CPU : ours | durable : ours | stall median (min-max) ms | first ms "
            "| CPU s/GiB | durable s | compute slowed by | extra memory : state | bit for bit |"
            + (" GPU stood still ms |" if self._device.name == "cuda" else "")
        )
        print("|---|---|---|---|---|---|---|---|---|---|---|" + ("---|" * (self._device.name == "cuda")))
        for name, each in costs.items():
            row = Row.of(each)
            stalls = [cost.stall_s * 1e3 for cost in each]
            print(
                f"| {name} | {row.stall_s / ours.stall_s:.1f} | {row.cpu_s / ours.cpu_s:.1f} "
                f"| {row.durable_s / ours.durable_s:.1f} "
                f"| {row.stall_s * 1e3:.1f} ({min(stalls):.1f}-{max(stalls):.1f}) "
                f"| {first[name].stall_s * 1e3:.0f} | {row.cpu_s / gib:.2f} | {row.durable_s:.2f} "
                f"| {slowed(each)} | {memory[name] / self._num_bytes:.2f} "
                f"| {('yes' if exact[name] else 'NO') if self._place.keeps else '(thrown away)'} |"
                + stood_still(each)
            )


@dataclasses.dataclass
class Row:
    """Medians of one peer."""

    stall_s: float
    durable_s: float
    cpu_s: float

    @classmethod
    def of(cls, costs: list[Cost]) -> Row:
        return cls(
            statistics.median(cost.stall_s for cost in costs),
            statistics.median(cost.durable_s for cost in costs),
            statistics.median(cost.cpu_s for cost in costs),
        )


def slowed(costs: list[Cost]) -> str:
    """Return by how much computing was slowed: the median, and the least and the most."""
    percents = [cost.slowdown * 100 for cost in costs if cost.slowdown is not None]
    if not percents:
        return "-"
    return f"{statistics.median(percents):.0f}% ({min(percents):.0f} to {max(percents):.0f})"


def stood_still(costs: list[Cost]) -> str:
    """Return the cell for a device's stall, if there is a device."""
    stalls = [cost.device_stall_s * 1e3 for cost in costs if cost.device_stall_s is not None]
    return f" {statistics.median(stalls):.1f} |" if stalls else ""


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """Keep this thread on one core. Not while peers start theirs, which inherit it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Rate:
    """Iterations and the time they took."""

    num = 0
    seconds = 0.0

    @property
    def per_s(self) -> float:
        return self.num / self.seconds if self.seconds else 0.0


class RawWrite:
    """Writes as many bytes to the disk as the state has."""

    def __init__(self, num_bytes: int, folder: Path) -> None:
        self._num_bytes, self._path = num_bytes, folder / "raw"
        self._map = mmap.mmap(-1, num_bytes)
        # Not zeros, which a virtual disk may keep no copy of.
        self._map[:] = np.random.default_rng(0).bytes(num_bytes)

    def __enter__(self) -> RawWrite:
        return self

    def __exit__(self, *_) -> None:
        self._map.close()

    def write_s(self) -> float:
        view, piece = memoryview(self._map), 8 * MIB
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)

        def write() -> None:
            # One thread: several only wait for each other at the file's lock.
            for at in range(0, self._num_bytes, piece):
                os.pwrite(descriptor, view[at : at + piece], at)
            os.fsync(descriptor)

        try:
            return timed(write)
        finally:
            view.release()
            os.close(descriptor)
            self._path.unlink()


class Peak:
    """Samples the memory of this process and its children in a thread."""

    num_bytes = 0

    def start(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.03):
            self.num_bytes = max(self.num_bytes, resident_bytes())


def family() -> list[psutil.Process]:
    this = psutil.Process()
    return [this, *(child for child in this.children(recursive=True) if child.pid not in SERVERS)]


def resident_bytes() -> int:
    """Return the memory of all our processes; what they share counts once."""
    total = 0
    for process in family():
        try:
            with open(f"/proc/{process.pid}/smaps_rollup") as file:
                total += sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def cpu_seconds() -> float:
    total = time.process_time()
    for process in family()[1:]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def timed(action: Callable[[], object]) -> float:
    started_s = time.monotonic()
    action()
    return time.monotonic() - started_s


if __name__ == "__main__":
    main()
