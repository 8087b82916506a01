"""What ``raycheck.DataLoader`` costs beside torch's own: ``python -m benchmarks.loader_overhead``.

Both read the same data set with the same workers, one pass each in turn, in
pairs whose order alternates. Two places for the millisecond that a batch takes:

- ``step``: the loop computes for it and the workers are ahead, as in training;
- ``fetch``: a worker computes for it and the loop waits, as where reading is the limit.

The millisecond is spent waiting, as for a disk or a GPU, or with ``--work cpu``
computing, which four workers and a loop cannot do at the same time on two cores.

Two measures: wall time per batch, the median over a pass, so that a disturbance
of the machine counts little; and CPU time of the process and its workers for a
pass, their start included. Each pass checks that every item came once.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch.utils.data

import raycheck

BATCH_ITEMS = 32
ROUND = 4


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


def cpu_s() -> float:
    """Return CPU seconds of this process and of its children that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def one_pass(loader: Any, step: Callable[[], None], length: int) -> tuple[float, float]:
    """Go through one epoch; return wall and CPU seconds per batch. The workers' start is not in the wall time."""
    began_cpu_s = cpu_s()
    iterator = iter(loader)
    items = [next(iterator)]
    times_s = [time.perf_counter()]
    for batch in iterator:
        step()
        items.append(batch)
        times_s.append(time.perf_counter())
    # Workers answer in turn: what counts is how long a round of them takes.
    rounds = zip(times_s[:-ROUND:ROUND], times_s[ROUND::ROUND], strict=False)
    wall_s = statistics.median((end_s - begin_s) / ROUND for begin_s, end_s in rounds)
    del iterator  # ends the workers, whose CPU time counts then
    num_batches = len(items) - 1
    cpu = cpu_s() - began_cpu_s
    seen = sorted(int(item) for batch in items for item in batch)
    assert seen == list(range(length)), "not every item came once"
    return wall_s, cpu / num_batches


def compare(place: str, work: Work | Wait, *, num_pairs: int, num_batches: int, num_workers: int) -> None:
    """Print the overhead in one place of the work."""
    length = BATCH_ITEMS * num_batches
    dataset = Numbers(length, work if place == "fetch" else None)
    step: Callable[[], None] = work if place == "step" else (lambda: None)
    makers: list[Callable[[], Any]] = [
        lambda: torch.utils.data.DataLoader(dataset, BATCH_ITEMS, shuffle=True, num_workers=num_workers),
        lambda: raycheck.DataLoader(dataset, BATCH_ITEMS, shuffle=True, num_workers=num_workers),
    ]
    pairs = []
    for number in range(num_pairs + 1):
        found: dict[int, tuple[float, float]] = {}
        for which in (0, 1) if number % 2 else (1, 0):
            found[which] = one_pass(makers[which](), step, length)
        if number:  # the first pair warms up
            pairs.append((found[0], found[1]))
    for index, what in enumerate(("wall", "cpu")):
        ratios = sorted(100 * (ours[index] / theirs[index] - 1) for theirs, ours in pairs)
        extra = sorted(1e6 * (ours[index] - theirs[index]) for theirs, ours in pairs)
        low, _, high = statistics.quantiles(ratios, n=4)
        # The least of each: what the machine's other work adds is never negative.
        least = [min(side[index] for side in sides) for sides in zip(*pairs, strict=True)]
        plain_ms = 1e3 * statistics.median(theirs[index] for theirs, _ in pairs)
        print(
            f"{place:6} {what:5} torch {plain_ms:.3f} ms per batch, ours {statistics.median(extra):+6.1f} us: "
            f"{statistics.median(ratios):+5.2f} % (quartiles {low:+.2f} to {high:+.2f}, {num_pairs} pairs), "
            f"least {1e3 * least[0]:.3f} and {1e3 * least[1]:.3f} ms: {100 * (least[1] / least[0] - 1):+.2f} %"
        )


def main() -> None:
    """Measure both places."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--batches", type=int, default=1500)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--ms", type=float, default=1.0, help="work per batch")
    parser.add_argument("--work", choices=["wait", "cpu"], default="wait")
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
        )


if __name__ == "__main__":
    main()
