#!/usr/bin/env python3
"""Tell Ray that the AWS spot instance on which this runs will be taken away.

    python drain_on_spot_notice.py [OPTION of "ray drain-node" ...]

Beside a Ray node started with ``ray start``. Waits for the notice, which comes two minutes
before the end, has Ray drain the node until shortly before it, and ends. Ray tells the job.
On Kubernetes this is not needed: there the pod gets a signal, see README.md.
"""

import datetime
import json
import logging
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

# For trials: where the notice is read, and how often.
METADATA = os.environ.get("INSTANCE_METADATA", "http://169.254.169.254") + "/latest"
EVERY_S = float(os.environ.get("EVERY_S", "5"))
TIMEOUT_S = 2
MARGIN_S = 10
"""Ray is to be gone before the instance is."""


def read_notice() -> dict[str, str] | None:
    """Return the notice, or None if there is none so far."""
    try:
        token = _ask("PUT", "/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
        text = _ask("GET", "/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
        notice: dict[str, str] = json.loads(text)
    # Also: 404, which says that there is no notice.
    except (OSError, ValueError):
        return None
    return notice


def seconds_left(notice: dict[str, str], now: datetime.datetime) -> int:
    """Return how long the node may drain."""
    end = datetime.datetime.strptime(notice["time"], "%Y-%m-%dT%H:%M:%SZ")
    left_s = (end.replace(tzinfo=datetime.timezone.utc) - now).total_seconds()
    return max(0, int(left_s) - MARGIN_S)


def main() -> int:
    """Wait, tell Ray, and return the exit status of that."""
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    while (notice := read_notice()) is None:
        time.sleep(EVERY_S)
    left_s = seconds_left(notice, datetime.datetime.now(datetime.timezone.utc))
    logging.info("notice %s: draining for %d s", notice, left_s)
    return subprocess.call(
        [
            "ray",
            "drain-node",
            # A reason that names preemption: Ray Train does not count it as a failure of the job.
            "--reason=DRAIN_NODE_REASON_PREEMPTION",
            f"--reason-message=spot instance, {notice['action']} at {notice['time']}",
            f"--deadline-remaining-seconds={left_s}",
            *sys.argv[1:],
        ]
    )


def _ask(method: str, path: str, headers: dict[str, str]) -> str:
    request = urllib.request.Request(METADATA + path, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return str(answer.read().decode())


if __name__ == "__main__":
    raise SystemExit(main())
