"""What ``raycheck.DataLoader`` costs beside torch's own: ``python -m benchmarks.loader_overhead``.

Both read the same data set with as many workers of their own, one pass each, at
the same time: a block of batches from the one, then a block from the other, in an
order that alternates. So what the machine does beside it meets both alike, and
hundreds of neighbouring pairs are compared rather than a few long passes. Two
places for the millisecond that a batch takes:

- ``step``: the loop computes for it and the workers are ahead, as in training;
- ``fetch``: a worker computes for it and the loop waits, as where reading is the limit.

The millisecond is spent waiting, as for a disk or a GPU, or with ``--work cpu``
computing, which four workers and a loop cannot do at the same time on two cores.

Three measures, each the median over the pairs of the difference in one, relative to
the median block of torch's: wall time of a block; CPU time that the training
process took for it; and CPU time that the workers took. What stands in brackets
holds the true median with 95 % (bootstrap over the pairs). Both passes check that
every item came once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.utils.data

import raycheck

BATCH_ITEMS = 32
BOOTSTRAPS = 2000


class Work:
    """A fixed amount of CPU work of about so many seconds."""

    def __init__(self, seconds: float) -> None:
        block = bytes(1 << 20)
        times = []
        for _ in range(200):
            started_s = time.thread_time()
            zlib.crc32(block)
            times.append(time.thread_time() - started_s)
        self._data = bytes(int(seconds / statistics.median(times) * len(block)))

    def __call__(self) -> None:
        zlib.crc32(self._data)


class Wait:
    """So many seconds of waiting."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self) -> None:
        time.sleep(self._seconds)


class Numbers(torch.utils.data.Dataset[int]):
    """Items that are their index; reading a batch may take work."""

    def __init__(self, length: int, work: Work | None) -> None:
        self._length, self._work = length, work

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indices: list[int]) -> list[int]:
        if self._work is not None:
            self._work()
        return indices


class Pass:
    """One epoch of a loader, taken block by block."""

    def __init__(self, loader: Any, step: Callable[[], None]) -> None:
        before = set(multiprocessing.active_children())
        self._iterator = iter(loader)
        self._workers = set(multiprocessing.active_children()) - before
        self._step = step
        self.items: list[int] = next(self._iterator).tolist()

    def block(self, num_batches: int) -> tuple[float, float, float]:
        """Take so many batches; return wall seconds and CPU seconds of this process and of the workers, per batch."""
        workers_s, cpu_s, wall_s = self._workers_s(), time.process_time(), time.perf_counter()
        batches = []
        for _ in range(num_batches):
            batches.append(next(self._iterator))
            self._step()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        workers_s = self._workers_s() - workers_s
        for batch in batches:  # as numbers: a tensor holds a file descriptor
            self.items += batch.tolist()
        return wall_s / num_batches, cpu_s / num_batches, workers_s / num_batches

    def _workers_s(self) -> float:
        # In nanoseconds; resource.getrusage knows only of processes that have ended.
        tasks = (path for each in self._workers for path in Path(f"/proc/{each.pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def median_between(values: list[float]) -> tuple[float, float, float]:
    """Return the median, and between what it lies with 95 %."""
    rng = random.Random(0)
    drawn = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(BOOTSTRAPS))
    return statistics.median(values), drawn[BOOTSTRAPS // 40], drawn[-BOOTSTRAPS // 40]


def compare(
    place: str, work: Work | Wait, *, num_pairs: int, num_batches: int, num_workers: int, kind: str
) -> None:
    """Print the overhead in one place of the work."""
    length = BATCH_ITEMS * (num_batches * num_pairs + 1)
    dataset = Numbers(length, work if place == "fetch" else None)
    step: Callable[[], None] = work if place == "step" else (lambda: None)
    ours = torch.utils.data.DataLoader if kind == "torch" else raycheck.DataLoader
    passes = [
        Pass(loader(dataset, BATCH_ITEMS, shuffle=True, num_workers=num_workers), step)
        for loader in (torch.utils.data.DataLoader, ours)
    ]
    pairs = []
    for number in range(num_pairs):
        first = number % 2
        found = {which: passes[which].block(num_batches) for which in (first, 1 - first)}
        pairs.append((found[0], found[1]))
    for index, what in enumerate(("wall", "cpu, training", "cpu, workers")):
        plain_s = statistics.median(theirs[index] for theirs, _ in pairs)
        extra_s, low_s, high_s = median_between([ours[index] - theirs[index] for theirs, ours in pairs])
        print(
            f"{place:5} {what:13} torch {1e3 * plain_s:.3f} ms per batch, ours {1e6 * extra_s:+6.1f} us: "
            f"{100 * extra_s / plain_s:+5.2f} % ({100 * low_s / plain_s:+.2f} to {100 * high_s / plain_s:+.2f}, "
            f"{num_pairs} pairs)"
        )
    for each in passes:
        assert sorted(each.items) == list(range(length)), "not every item came once"


def main() -> None:
    """Measure both places."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--batches", type=int, default=100, help="in a block")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--ms", type=float, default=1.0, help="work per batch")
    parser.add_argument("--work", choices=["wait", "cpu"], default="wait")
    parser.add_argument(
        "--other", choices=["raycheck", "torch"], default="raycheck", help="torch: how large is noise?"
    )
    options = parser.parse_args()
    work = (Wait if options.work == "wait" else Work)(options.ms / 1e3)
    torch.set_num_threads(1)
    for place in ("step", "fetch"):
        compare(
            place,
            work,
            num_pairs=options.pairs,
            num_batches=options.batches,
            num_workers=options.workers,
            kind=options.other,
        )


if __name__ == "__main__":
    main()
