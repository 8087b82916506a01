import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import raycheck


def train_loop(config):
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    dataset = torch.utils.data.TensorDataset(torch.randn(1000, 8))
    loader = raycheck.DataLoader(dataset, batch_size=32, shuffle=True)  # raycheck: exactly once
    ckpt = raycheck.attach(model=model, optimizer=optimizer, loader=loader)  # raycheck: restores in place
    for epoch in ckpt.epochs(3):  # raycheck: instead of range(3)
        for (batch,) in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step({"loss": loss})  # raycheck: the only line inside the loop


trainer = TorchTrainer(
    train_loop,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        name="first-run",
        storage_path="/tmp/raycheck-readme",  # or s3://bucket/runs
        failure_config=FailureConfig(max_failures=-1),
        callbacks=[raycheck.AutoCheckpoint(max_overhead=0.035)],  # raycheck: the option itself
    ),
)
trainer.fit()
