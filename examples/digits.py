"""Image classification on scikit-learn's digits, with augmentation in loader workers.

    python examples/digits.py

Kill it and run it again: it goes on where it was, and draws the same augmentation that it would have drawn.
"""

import argparse
import os

import ray.train.torch
import sklearn.datasets
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import raycheck


def load_digits():
    digits = sklearn.datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    # The last 360 are of other writers than the first.
    return (images[:-360], labels[:-360]), (images[-360:], labels[-360:])


class Shifted(torch.utils.data.Dataset):
    """Each image moved by up to a pixel each way, at random."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        down, right = torch.randint(-1, 2, (2,)).tolist()
        return self.images[index].roll((down, right), dims=(1, 2)), self.labels[index]


def build_network():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 10),
    )


def train_loop(config):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train, (images, labels) = load_digits()
    model = ray.train.torch.prepare_model(build_network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # Before: torch.utils.data.DataLoader with a DistributedSampler and prepare_data_loader.
    loader = raycheck.DataLoader(  # raycheck: exactly once
        Shifted(*train), batch_size=32, shuffle=True, num_workers=1, persistent_workers=True
    )
    ckpt = raycheck.attach(model=model, optimizer=optimizer, loader=loader)  # raycheck: restores in place
    for epoch in ckpt.epochs(config["epochs"]):  # raycheck: instead of range()
        model.train()
        for batch, targets in loader:
            loss = torch.nn.functional.cross_entropy(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step({"loss": loss})  # raycheck: the only line inside the loop
    model.eval()
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    begin = f"resumed from step {ckpt.restored.step}" if ckpt.restored else "began at step 0"
    return f"reached step {ckpt.current_step}, accuracy {accuracy:.1%}; {begin}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", default=os.path.abspath("raycheck-runs"), help="a folder or s3://...")
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    print(f"storage: {arguments.storage}")
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"epochs": arguments.epochs},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="digits",
            storage_path=arguments.storage,
            failure_config=FailureConfig(max_failures=3),
            # Short, so that half a minute has something to go on from; an hour's job leaves it out.
            callbacks=[raycheck.AutoCheckpoint(max_interval_s=3)],  # raycheck: the option itself
        ),
    )
    print(trainer.fit().return_value)
