"""Read the checkpoint of digits.py where there is no Ray: evaluate it, then look at a shard with safetensors alone.

    python examples/digits.py
    python examples/serve.py

Needs what the first has stored.
"""

import argparse
import os
import sys
from pathlib import Path

import safetensors
import sklearn.datasets
import torch

import raycheck


def build_network():
    # As in digits.py: a checkpoint has the tensors and their names, not the code.
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


def measure_accuracy(model):
    digits = sklearn.datasets.load_digits()
    images = torch.tensor(digits.images[-360:], dtype=torch.float32).unsqueeze(1) / 16
    model.eval()
    with torch.no_grad():
        return (model(images).argmax(1) == torch.tensor(digits.target[-360:])).float().mean().item()


def show_a_shard(run):
    # A checkpoint exists when its manifest does. Each of its shards is a safetensors file.
    manifests = sorted(Path(run, "raycheck", "checkpoints").glob("step-*/manifest.json"))
    shard = sorted(manifests[-1].parent.glob("*.safetensors"))[0]
    print(f"{manifests[-1].parent.name}/{shard.name}:")
    with safetensors.safe_open(shard, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  it is no dict
            part = tensors.get_slice(name)
            print(f"  {name:<44} {part.get_dtype():>4} {part.get_shape()}")
    return manifests[-1].parent.name


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", default=os.path.abspath("raycheck-runs"), help="where digits.py stored")
    run = os.path.join(parser.parse_args().storage, "digits")
    if not os.path.isdir(run):
        sys.exit(f"{run} is not there: run digits.py first, with the same --storage")
    model = build_network()
    raycheck.load(run, into={"model": model})  # raycheck: the newest checkpoint, each byte verified
    accuracy = measure_accuracy(model)
    name = show_a_shard(run)
    assert "ray" not in sys.modules
    print(f"reached accuracy {accuracy:.1%}; read from {name.partition('-g')[0]}, without Ray")
