"""Kill, cut off and refuse, at every point of a checkpoint; print what was lost.

    python benchmarks/faults.py --num-faults 200

Real coordinator, agent, worker and store processes, without Ray. Each fault
runs inside the very call or message that its point names. After it the run
must commit again; then the judge of `tests.reliability.chaos`, which shares no
code with the restore, reads every checkpoint that counts and compares its
parameters with those of the same training without checkpoints, and a worker
group restores. "Lost": the newest that restores is older than the newest that
was acknowledged. "Wrong": some bit differs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.reliability.chaos import (
    KINDS,
    POINTS,
    Campaign,
    ChaosCluster,
    Outcome,
    RestartableServer,
    applies,
)

_NUM_FAULTS_PER_RUN = 25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-faults", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after the fault under way")
    parser.add_argument(
        "--s3", action="store_true", help="on a SeaweedFS of our own, which is killed as well"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="append one JSON line per fault")
    parser.add_argument(
        "--table", type=Path, nargs="+", help="print the table of these logs and do nothing else"
    )
    options = parser.parse_args()
    if options.table:
        outcomes = [Outcome(**json.loads(line)) for log in options.table for line in log.open()]
    else:
        outcomes = run(options)
    print(table(outcomes))
    return 0 if all(outcome.is_well for outcome in outcomes) else 1


def run(options: argparse.Namespace) -> list[Outcome]:
    """Inflict faults, each point and kind in turn, in an order drawn from the seed."""
    pairs = [(p, k) for p in POINTS for k in KINDS if applies(p, k, has_server=options.s3)]
    rng = random.Random(options.seed)
    order: list[tuple[str, str]] = []
    while len(order) < options.num_faults:
        order += rng.sample(pairs, len(pairs))
    outcomes: list[Outcome] = []
    end_s = time.monotonic() + options.seconds
    for begin in range(0, options.num_faults, _NUM_FAULTS_PER_RUN):
        end = min(begin + _NUM_FAULTS_PER_RUN, options.num_faults)
        with _cluster(options.s3) as cluster:
            campaign = Campaign(cluster)
            for number in range(begin, end):
                point, kind = order[number]
                outcome = campaign.inflict(point, kind, restarts=number % 4 == 3)
                outcomes.append(outcome)
                if options.log:
                    with options.log.open("a") as log:
                        log.write(json.dumps(vars(outcome)) + "\n")
                if not outcome.is_well:
                    print(f"fault {number}: {outcome}", file=sys.stderr)
                if time.monotonic() > end_s:
                    return outcomes
    return outcomes


@contextlib.contextmanager
def _cluster(on_s3: bool):
    with tempfile.TemporaryDirectory(prefix="raycheck-faults-") as name:
        folder = Path(name)
        server = RestartableServer(folder / "s3") if on_s3 else None
        url, store_options = (server.url, server.options) if server else (str(folder / "run"), None)
        cluster = ChaosCluster(url, store_options, folder, server=server)
        try:
            yield cluster
        finally:
            cluster.close()
            if server:
                server.kill()


def table(outcomes: list[Outcome]) -> str:
    """Return a Markdown table: times tried at each point with each kind, and what was lost."""
    kinds = [kind for kind in KINDS if any(outcome.kind == kind for outcome in outcomes)]
    tried = collections.Counter((outcome.point, outcome.kind) for outcome in outcomes)
    lines = ["| fault point | " + " | ".join(kinds) + " | checkpoints lost | wrong restores |"]
    lines.append("|---" * (len(kinds) + 3) + "|")
    for point in POINTS:
        mine = [outcome for outcome in outcomes if outcome.point == point]
        cells = [str(tried[point, kind] or "") for kind in kinds]
        lost, wrong = sum(o.is_lost for o in mine), sum(o.is_wrong for o in mine)
        lines.append(f"| {point}: {POINTS[point]} | " + " | ".join(cells) + f" | {lost} | {wrong} |")
    totals = [str(sum(tried[point, kind] for point in POINTS)) for kind in kinds]
    lost, wrong = sum(o.is_lost for o in outcomes), sum(o.is_wrong for o in outcomes)
    lines.append(f"| **all {len(outcomes)}** | " + " | ".join(totals) + f" | **{lost}** | **{wrong}** |")
    unfired = sum(not outcome.has_fired for outcome in outcomes)
    return "\n".join(lines) + (f"\n\n{unfired} faults did not fire.\n" if unfired else "\n")


if __name__ == "__main__":
    sys.exit(main())
