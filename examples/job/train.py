"""Train a small network; nothing here says when to checkpoint, or that it happens at all.

    python train.py STORAGE

STORAGE is a folder that all nodes share, or a URL such as s3://bucket/runs.
"""

import sys

import ray.train
import ray.train.torch
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import raycheck


def train_loop(config):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    model = ray.train.torch.prepare_model(network)
    optimizer = torch.optim.AdamW(model.parameters())
    features = torch.randn(40_000, 64)
    dataset = torch.utils.data.TensorDataset(features, features.sum(1, keepdim=True).sin())
    loader = raycheck.DataLoader(dataset, batch_size=16, shuffle=True)  # raycheck: exactly once
    ckpt = raycheck.attach(  # raycheck: restores in place
        model=model, optimizer=optimizer, loader=loader, optional=True
    )
    if ray.train.get_context().get_world_rank() == 0:
        print(f"training begins at step {ckpt.current_step}", flush=True)
    for epoch in ckpt.epochs(config["epochs"]):  # raycheck: instead of range()
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step({"loss": loss})  # raycheck: the only line inside the loop
    return ckpt.current_step


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"epochs": 6},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="job-example",
            storage_path=sys.argv[1],
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    print(f"trained {result.return_value} steps, loss {result.metrics['loss']:.4f}: {result.checkpoint}")
