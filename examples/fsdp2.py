"""FSDP2 on two CPU workers: each holds, and stores, its half of every parameter and of AdamW's state.

    python examples/fsdp2.py

Kill it and run it again: it goes on where it was. With --workers 1 or 3 it does so, too.
"""

import argparse
import os

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import raycheck


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.feed = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x):
        return x + self.feed(self.norm(x))


def build_model():
    mesh = init_device_mesh("cpu", (ray.train.get_context().get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(16, 128), Block(128), Block(128), torch.nn.Linear(128, 1))
    for block in model[1:3]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train_loop(config):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs = torch.randn(6_400, 16)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.square().sum(1, keepdim=True).sqrt())
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The same global batch at any number of workers, so that the number of steps stays the same as well.
    loader = raycheck.DataLoader(dataset, global_batch_size=64, shuffle=True)  # raycheck: exactly once
    ckpt = raycheck.attach(model=model, optimizer=optimizer, loader=loader)  # raycheck: each rank its shards
    for epoch in ckpt.epochs(config["epochs"]):  # raycheck: instead of range()
        for batch, targets in loader:
            loss = torch.nn.functional.mse_loss(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step({"loss": loss})  # raycheck: the only line inside the loop
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(model(inputs[:1_000]), dataset.tensors[1][:1_000]).item()
    weight = model[1].feed[0].weight
    held = f"rank 0 holds {list(weight.to_local().shape)} of a weight of {list(weight.shape)}"
    begin = f"resumed from step {ckpt.restored.step}" if ckpt.restored else "began at step 0"
    return f"{held}\nreached step {ckpt.current_step}, loss {loss:.3f}; {begin}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", default=os.path.abspath("raycheck-runs"), help="a folder or s3://...")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    print(f"storage: {arguments.storage}")
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"epochs": arguments.epochs},
        scaling_config=ScalingConfig(num_workers=arguments.workers),
        run_config=RunConfig(
            name="fsdp2",
            storage_path=arguments.storage,
            failure_config=FailureConfig(max_failures=3),
            # Short, so that half a minute has something to go on from; an hour's job leaves it out.
            callbacks=[raycheck.AutoCheckpoint(max_interval_s=3)],  # raycheck: the option itself
        ),
    )
    print(trainer.fit().return_value)
