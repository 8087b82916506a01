"""Does the measured overhead stay within the bound while the job changes under it?

    python benchmarks/bound_under_change.py [--minutes 10]

A real Ray Train job on two workers checkpoints to a real S3 server (SeaweedFS)
through a proxy. In the second third of the time the proxy lets a third of the
bandwidth through, in the last third each step takes twice as long. The
recovery point that is asked for is shorter than the bound allows, so that the
bound decides. At the end the last checkpoint is restored and compared.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import raycheck
from raycheck.observe.events import read_events
from raycheck.store.objects import Store

sys.path.insert(0, str(Path(__file__).parent.parent))

BOUND = 0.035
BYTES_PER_S = 60e6
PHASES = ("as it is", "a third of the bandwidth", "steps twice as long")


def set_rate(path, bytes_per_s):
    """Replace the proxy's rate file whole, if it says something else."""
    if path.read_text() != str(bytes_per_s):
        fresh = path.with_suffix(".new")
        fresh.write_text(str(bytes_per_s))
        fresh.rename(path)


def train_loop(config):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = raycheck.attach(model=model, optimizer=optimizer)
    if config["only_restore"]:
        return {"step": ckpt.current_step, "sum": model[0].weight.double().sum().item()}
    started_s = time.monotonic()
    while True:
        phase = torch.tensor((time.monotonic() - started_s) // config["phase_s"])
        dist.broadcast(phase, 0)
        if phase >= len(PHASES):
            break
        if ray.train.get_context().get_world_rank() == 0:
            set_rate(Path(config["rate_file"]), BYTES_PER_S / 3 if phase == 1 else BYTES_PER_S)
        for _ in range(2 if phase == 2 else 1):
            loss = model(torch.randn(16, 1000)).square().mean()
            optimizer.zero_grad()
            loss.backward()
        flat = torch.cat([p.grad.reshape(-1)[:1000] for p in model.parameters()])
        dist.all_reduce(flat)
        # Equal on all ranks: what is exchanged stands for the whole gradient.
        for parameter, part in zip(model.parameters(), flat.split(1000), strict=True):
            parameter.grad.fill_(part.mean())
        optimizer.step()
        ckpt.step()
    return {"step": ckpt.current_step, "sum": model[0].weight.double().sum().item()}


def run(storage, options, folder, phase_s, *, only_restore):
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={
            "phase_s": phase_s,
            "rate_file": str(folder / "rate"),
            "only_restore": only_restore,
        },
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="bound",
            storage_path=str(folder / "ray"),
            callbacks=[
                raycheck.AutoCheckpoint(
                    max_overhead=BOUND, recovery_point_s=0.5, storage_path=storage, storage_options=options
                )
            ],
        ),
    )
    return trainer.fit().return_value


def report(events, started_unix_s, phase_s):
    """Print the overhead of each phase, from the measurements at the checkpoints around its ends."""
    points = [e for e in events if "inside_steps_s" in e["facts"]]
    print("\n| phase | checkpoints | median persist | median interval | decided by | measured overhead |")
    print("|---|---|---|---|---|---|")
    worst = 0.0
    before = {"cost_s": 0.0, "inside_steps_s": 0.0}
    for number, name in enumerate(PHASES):
        end_s = started_unix_s + (number + 1) * phase_s
        mine = [e for e in points if started_unix_s + number * phase_s <= e["unix_s"] < end_s]
        if number == len(PHASES) - 1:
            mine = [e for e in points if started_unix_s + number * phase_s <= e["unix_s"]]
        facts = [e["facts"] for e in mine]
        last = facts[-1]
        overhead = (last["cost_s"] - before["cost_s"]) / (last["inside_steps_s"] - before["inside_steps_s"])
        worst, before = max(worst, overhead), last
        checkpoints = [f for f in facts if "persist_s" in f]
        persist_s = sorted(f["persist_s"] for f in checkpoints)[len(checkpoints) // 2]
        intervals = sorted(f["interval_s"] for f in checkpoints if f["interval_s"])
        decided = {f["decided_by"] for f in checkpoints if f["decided_by"]}
        print(
            f"| {name} | {len(checkpoints)} | {persist_s:.2f} s | {intervals[len(intervals) // 2]:.2f} s "
            f"| {', '.join(sorted(decided))} | {overhead:.2%} |"
        )
    return worst


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    phase_s = parser.parse_args().minutes * 60 / len(PHASES)
    from tests.conftest import _free_ports, _start

    os.environ["RAY_AUTH_MODE"] = "disabled"
    with tempfile.TemporaryDirectory(prefix="raycheck-bound-") as name:
        folder = Path(name)
        (folder / "s3").mkdir()
        server, process = _start(folder / "s3")
        assert server, "SeaweedFS did not start"
        (port,) = _free_ports(1)
        (folder / "rate").write_text(str(BYTES_PER_S))
        target = server.endpoint.rpartition(":")[2]
        command = [sys.executable, str(Path(__file__).with_name("throttle.py")), str(port), target]
        proxy = subprocess.Popen([*command, str(folder / "rate")])
        try:
            ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
            storage = f"s3://{server.bucket}/bound"
            options = {**server.options, "endpoint_url": f"http://127.0.0.1:{port}"}
            trained = run(storage, options, folder, phase_s, only_restore=False)
            events = read_events(Store(f"{storage}/bound/raycheck", server.options))
            first = next(e for e in events if e["kind"] == "restored")
            worst = report(events, first["unix_s"], phase_s)
            restored = run(storage, options, folder, phase_s, only_restore=True)
            print(json.dumps({"trained": trained, "restored": restored}))
            assert restored == trained, "the last checkpoint is not what training had"
            print(f"worst phase {worst:.2%}, bound {BOUND:.1%}: {'ok' if worst <= BOUND else 'EXCEEDED'}")
            sys.exit(worst > BOUND)
        finally:
            ray.shutdown()
            for child in (proxy, process):
                child.terminate()
                child.wait(10)


if __name__ == "__main__":
    main()
