"""Make docs/images/dashboard.png: a real job, killed twice, as a real Prometheus saw it.

    python docs/dashboard_picture/make.py --prometheus /path/to/prometheus

Grafana itself is not needed: its panels are components that its makers publish,
and ``page.jsx`` draws ours with them. Needs npm, Chromium and a Prometheus;
takes seven minutes, most of them the job's.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
SCRAPE_S = 5
QUIET = urllib.request.build_opener(urllib.request.ProxyHandler({}))
PAGE = """<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="page.css"><style>body{margin:0}</style>
<div id="root"></div><script type="module" src="page.js"></script>"""


def main() -> None:
    """Run the job, build the page, make the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prometheus", default="prometheus", help="the program")
    parser.add_argument("--samples", type=int, default=8_000, help="of an epoch of the job, which takes two")
    parser.add_argument("--image", type=Path, default=HERE.parent / "images" / "dashboard.png")
    options = parser.parse_args()
    text = subprocess.check_output([sys.executable, "-m", "raycheck", "dashboard"], text=True)
    with tempfile.TemporaryDirectory(prefix="rc-") as name:
        folder = Path(name)
        answers = answers_of_a_job(folder, json.loads(text), options)
        out = built_page(folder)
        (out / "index.html").write_text(PAGE)
        (out / "dashboard.json").write_text(text)
        (out / "answers.json").write_text(json.dumps(answers))
        bottom = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in json.loads(text)["panels"])
        with served(out) as url:
            draw(url, options.image, height=38 * bottom)


def answers_of_a_job(folder: Path, dashboard: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Run the job under a Prometheus; return what the dashboard's queries give."""
    ray_port, metrics_port, port = free_port(), free_port(), free_port()
    (folder / "prometheus.yml").write_text(
        f"{{global: {{scrape_interval: {SCRAPE_S}s}}, scrape_configs: [{{job_name: ray, "
        f"static_configs: [{{targets: ['127.0.0.1:{metrics_port}']}}]}}]}}"
    )
    head = [
        *(BIN / "ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={ray_port}"),
        *(f"--metrics-export-port={metrics_port}", "--num-cpus=8", f"--temp-dir={folder / 'ray'}"),
        *("--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=200000000"),
    ]
    watcher = [
        options.prometheus,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    records = folder / "records"
    records.mkdir()
    job = [
        *(sys.executable, "-m", "raycheck.cli.demo_train", "--address", f"127.0.0.1:{ray_port}"),
        *("--name", "gpt", "--storage", folder / "storage"),
        *("--records", records, "--num-samples", options.samples),
    ]
    with running(folder, *head), running(folder, *watcher):
        wait_for(ray_port)
        wait_for(port)
        with running(folder, *job) as driver:
            reach(records, 1, driver)
            begun_s = time.time()
            last = 2 * options.samples // 16
            reach(records, last // 4, driver)
            os.kill(newest(records)["pid"], signal.SIGKILL)
            reach(records, last // 2, driver)
        with running(folder, *job) as driver:
            if driver.wait(1800) != 0:
                raise SystemExit("the job failed")
        return {"from_s": begun_s, "to_s": time.time(), "step_s": SCRAPE_S} | {
            "panels": {
                panel["id"]: {
                    each["refId"]: asked(port, each["expr"].replace("$run", "gpt"), begun_s)
                    for each in panel["targets"]
                }
                for panel in dashboard["panels"]
            }
        }


def asked(port: int, query: str, begun_s: float) -> list[dict[str, Any]]:
    """Return what Prometheus answers for the time since the job began."""
    fields = {"query": query, "start": begun_s, "end": time.time(), "step": SCRAPE_S}
    url = f"http://127.0.0.1:{port}/api/v1/query_range?{urllib.parse.urlencode(fields)}"
    with QUIET.open(url) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def newest(records: Path) -> dict[str, Any]:
    """Return the newest whole line that a worker wrote."""
    lines = [line for path in records.glob("*.jsonl") for line in path.read_text().split("\n")[:-1]]
    return max(map(json.loads, lines), key=lambda line: line["unix_s"], default={})


def reach(records: Path, step: int, driver: subprocess.Popen[bytes]) -> None:
    """Wait until the job has reached a step."""
    while newest(records).get("step", 0) < step:
        if driver.poll() is not None:
            raise SystemExit("the job ended too early")
        time.sleep(0.5)


@contextlib.contextmanager
def running(folder: Path, *command: object) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose log lies in the folder; killed at the end, and so is what it started."""
    with open(folder / f"{len(list(folder.iterdir()))}.log", "wb") as log:
        process = subprocess.Popen(
            list(map(str, command)),
            env={**os.environ, "RAY_AUTH_MODE": "disabled"},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            for member in [*psutil.Process(process.pid).children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()


def built_page(folder: Path) -> Path:
    """Build the page where nothing of it stays in the project."""
    page = folder / "page"
    shutil.copytree(HERE, page, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    install = ["npm", "install", "--no-audit", "--no-fund", "--legacy-peer-deps", "--silent"]
    subprocess.run(install, cwd=page, check=True)
    subprocess.run(["npm", "run", "build", "--silent"], cwd=page, check=True)
    return page / "out"


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder to this machine."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def draw(url: str, image: Path, *, height: int) -> None:
    """Have Chromium make the picture."""
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    # Time enough to draw: the page loads its data by itself.
    options += ["--virtual-time-budget=20000", f"--window-size=1400,{height}"]
    subprocess.run(
        ["chromium", *options, f"--screenshot={image.resolve()}", url],
        check=True,
        stderr=subprocess.DEVNULL,
    )


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int) -> None:
    """Wait until somebody listens."""
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit(f"nobody listens on port {port}")


if __name__ == "__main__":
    main()
