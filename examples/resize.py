"""One epoch begun by 4 workers and finished by 2: each item is used once, and the audit proves it.

    python examples/resize.py

Each time it begins anew.
"""

import argparse
import collections
import os
import subprocess
import sys

import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import raycheck

NUM_ITEMS = 1_603  # no number of workers divides it


def train_loop(config):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs = torch.randn(NUM_ITEMS, 8)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # The global batch stays the same, and with it the learning rate that suits it.
    loader = raycheck.DataLoader(dataset, global_batch_size=32, shuffle=True)  # raycheck: exactly once
    ckpt = raycheck.attach(model=model, optimizer=optimizer, loader=loader)  # raycheck: at any world size
    seen = []
    for epoch in ckpt.epochs(1):  # raycheck: instead of range()
        for batch, targets in loader:
            loss = torch.nn.functional.mse_loss(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step({"loss": loss})  # raycheck: the only line inside the loop
            seen += loader.last_indices
            if ckpt.current_step == config["stop_at"]:
                return gather(ckpt, seen)  # raycheck takes a last checkpoint when the function ends
    return gather(ckpt, seen)


def gather(ckpt, seen):
    everywhere = [None] * ray.train.get_context().get_world_size()
    torch.distributed.all_gather_object(everywhere, seen)
    begun_at = ckpt.restored.step if ckpt.restored else 0
    return {
        "begun_at": begun_at,
        "step": ckpt.current_step,
        "seen": [item for part in everywhere for item in part],
    }


def fit(storage, num_workers, *, stop_at=None, resume="auto"):
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"stop_at": stop_at},
        # Half a CPU each, so that a laptop with two has room for four.
        scaling_config=ScalingConfig(num_workers=num_workers, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(
            name="resize",
            storage_path=storage,
            callbacks=[raycheck.AutoCheckpoint(resume=resume)],  # raycheck: the option itself
        ),
    )
    end = trainer.fit().return_value
    print(f"{num_workers} workers: steps {end['begun_at']} to {end['step']}, {len(end['seen'])} items")
    return end


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", default=os.path.abspath("raycheck-runs"), help="a folder or s3://...")
    parser.add_argument("--workers", type=int, nargs=2, default=[4, 2], help="before and after")
    arguments = parser.parse_args()
    print(f"storage: {arguments.storage}")
    before, after = arguments.workers
    first = fit(arguments.storage, before, stop_at=20, resume="fresh")
    second = fit(arguments.storage, after)
    # What the run itself has stored about it, read by another process: no Ray, and no word from the loop.
    command = os.path.join(os.path.dirname(sys.executable), "raycheck")
    subprocess.run([command, "audit", f"{arguments.storage.rstrip('/')}/resize"], check=True)
    uses = collections.Counter(first["seen"] + second["seen"])
    once = sum(number == 1 for number in uses.values())
    print(
        f"reached step {second['step']}, {once}/{NUM_ITEMS} items used once; "
        f"resumed from step {second['begun_at']}, {before} -> {after} workers"
    )
