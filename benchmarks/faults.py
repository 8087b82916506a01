"""Kill, cut off and refuse, at every point of a checkpoint; write down what was lost.

    python benchmarks/faults.py --faults 1900 --ray-faults 100

Real coordinator, agent, worker and store processes; the first number of faults
without Ray, on local folders and on an S3 server of our own behind a proxy
that misbehaves; the second in real Ray Train jobs on a head node of our own.
Each fault runs inside the very call or message that its point names. After it
the run must commit again, a judge that shares no code with the restore reads
every checkpoint, and a worker group restores.

Results go to a file of JSON lines, and `docs/reliability.md` is made from it
(``--document``). The command goes on where it was stopped: only what is missing
from the file is done. Several may run at a time, each with a ``--seed`` and
``--log`` of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.reliability import faults_report  # noqa: E402
from tests.reliability.chaos import (  # noqa: E402
    INTERVAL_STEPS,
    KINDS,
    POINTS,
    Campaign,
    ChaosCluster,
    RestartableServer,
    applies,
)
from tests.reliability.proxy import Proxy  # noqa: E402
from tests.reliability.training import NARROW, WIDE, Expected  # noqa: E402

_FAULTS_PER_RUN = 30
_STORAGES = ("local", "local", "s3", "local", "local", "local", "local", "s3 in parts", "local")
"""The runs' storages, in turn. "In parts": shards of 6 MB, which S3 takes in two parts."""

_HAS = {"local": ("local",), "s3": ("server", "proxy"), "s3 in parts": ("server", "proxy")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=1900, help="without Ray, those in the log included")
    parser.add_argument("--ray-faults", type=int, default=0, help="in Ray Train jobs, likewise")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after the fault under way")
    parser.add_argument("--parallel", type=int, default=2, help="runs without Ray at a time")
    parser.add_argument("--seed", type=int, default=0, help="another for each process of several")
    parser.add_argument("--log", type=Path, default=ROOT / "build" / "faults.jsonl", help="a JSON line each")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="further logs for the document")
    parser.add_argument("--document", type=Path, help="write it; nothing is done if the logs have it all")
    options = parser.parse_args()
    end_s = time.monotonic() + options.seconds
    done = faults_report.read(options.log)
    run_plain(options, sum(not each["is_ray"] for each in done), end_s)
    if options.ray_faults > (num_ray := sum(each["is_ray"] for each in done)):
        from tests.reliability import ray_faults

        ray_faults.run(
            options.ray_faults - num_ray,
            seed=options.seed,
            end_s=end_s,
            write=functools.partial(write, options.log),
        )
    outcomes = [each for log in (options.log, *options.also) for each in faults_report.read(log)]
    if options.document:
        options.document.write_text(document(outcomes))
    print(faults_report.summary(outcomes))
    return 0 if all(faults_report.is_well(each) for each in outcomes) else 1


def document(outcomes: list[dict[str, object]]) -> str:
    """Return the text of `docs/reliability.md`."""
    from tests.reliability import ray_faults

    return faults_report.document(
        outcomes,
        points=POINTS,
        kinds=KINDS,
        ray_points=ray_faults.POINTS,
        ray_kinds=ray_faults.KINDS,
    )


def run_plain(options: argparse.Namespace, num_done: int, end_s: float) -> None:
    """Inflict faults without Ray, on several runs at a time, until there are enough."""
    expected = {width: Expected(width, INTERVAL_STEPS) for width in (NARROW, WIDE)}
    turns = itertools.count(num_done // _FAULTS_PER_RUN + options.seed)
    left = Budget(options.faults - num_done)

    def work() -> None:
        for turn in turns:
            rng = random.Random(f"{options.seed} {num_done} {turn}")
            storage = _STORAGES[turn % len(_STORAGES)]
            if time.monotonic() > end_s or not run_one(
                storage, rng.choice([1, 2]), draw(storage, rng), expected, options.log, end_s, left
            ):
                return

    threads = [threading.Thread(target=work) for _ in range(options.parallel)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        # The faults under way come to their end, and what was started for them goes with it.
        left.stop()
        for thread in threads:
            thread.join()
        raise


class Budget:
    """How many faults are still to be inflicted; shared by threads."""

    def __init__(self, num_left: int) -> None:
        self._left = num_left
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take one, if there is one."""
        with self._lock:
            self._left -= 1
            return self._left >= 0

    def stop(self) -> None:
        """Leave none."""
        with self._lock:
            self._left = 0


def draw(storage: str, rng: random.Random) -> list[tuple[str, str]]:
    """Return points and kinds for one run; over many runs, each pair comes about equally often."""
    pairs = [(p, k) for p in POINTS for k in KINDS if applies(p, k, has=_HAS[storage])]
    return rng.sample(pairs, _FAULTS_PER_RUN)


def run_one(
    storage: str,
    max_in_flight: int,
    pairs: list[tuple[str, str]],
    expected: dict[int, Expected],
    log: Path,
    end_s: float,
    left: Budget,
) -> bool:
    """Inflict these faults on one run; return whether there may be more."""
    folder = Path(tempfile.mkdtemp(prefix="raycheck-faults-"))
    is_well, goes_on = True, True
    with cluster_on(storage, folder, max_in_flight) as cluster:
        campaign = Campaign(cluster, expected[cluster.width])
        for point, kind in pairs:
            goes_on = time.monotonic() < end_s and left.take()
            if not goes_on:
                break
            began_s = time.monotonic()
            facts = {"point": point, "kind": kind, "storage": storage, "is_ray": False}
            facts["max_in_flight"] = max_in_flight
            try:
                facts |= vars(campaign.inflict(point, kind))
            except Exception as error:  # noqa: BLE001  whatever it was, it is a finding
                facts |= {"has_fired": cluster.fired.is_set(), "is_lost": False, "is_wrong": False}
                facts["problem"] = f"the run does not go on: {type(error).__name__}: {error}"
                with contextlib.suppress(Exception):
                    print(cluster.describe(), file=sys.stderr)
            facts["seconds"] = round(time.monotonic() - began_s, 2)
            write(log, facts)
            is_well = faults_report.is_well(facts)
            if not is_well:
                # Whatever comes after it on this run would prove nothing.
                print(f"{folder}: {facts}", file=sys.stderr)
                break
    if is_well:
        shutil.rmtree(folder, ignore_errors=True)
    return goes_on


def write(log: Path, facts: dict[str, object]) -> None:
    """Append what a fault did, with the commit of the code that stood it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write(json.dumps({**facts, "commit": commit()}) + "\n")


@functools.cache
def commit() -> str:
    """Return the commit that is checked out, with a "+" if files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=10"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


@contextlib.contextmanager
def cluster_on(storage: str, folder: Path, max_in_flight: int) -> Iterator[ChaosCluster]:
    """Yield a run on a local folder, or on an S3 server of its own behind a proxy."""
    with contextlib.ExitStack() as stack:
        fields: dict[str, object] = {"width": WIDE if storage == "s3 in parts" else NARROW, "step_s": 0.05}
        fields["max_in_flight"] = max_in_flight
        if storage == "local":
            cluster = ChaosCluster(str(folder / "run"), None, folder, **fields)
        else:
            server = RestartableServer(folder / "s3")
            stack.callback(server.kill)
            proxy = stack.enter_context(Proxy(server.endpoint))
            options = {**server.options, "endpoint_url": proxy.endpoint}
            cluster = ChaosCluster(
                server.url,
                options,
                folder,
                server=server,
                proxy=proxy,
                direct_options=server.options,
                **fields,
            )
        stack.callback(cluster.close)
        yield cluster


if __name__ == "__main__":
    sys.exit(main())
