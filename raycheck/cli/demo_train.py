"""The demo's training job: a small GPT on the source text of Python's standard library.

An ordinary Ray Train job; the lines marked ``# raycheck:`` are all that makes
it checkpoint itself and resume. Run by ``raycheck demo``, once for each start.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import raycheck

WINDOW_BYTES = 64
NUM_SAMPLES = 4001
"""Not a multiple of the global batch: the last step of an epoch is smaller, and nothing is left out."""

NUM_EPOCHS = 2
BATCH_SIZE = 8
NUM_WORKERS = 2
RECOVERY_POINT_S = 5.0
SEED = 17


class SourceText(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Windows of bytes out of the standard library's source files, in the order of their names."""

    def __init__(self, num_samples: int) -> None:
        text = bytearray()
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += path.read_bytes()
            if len(text) > num_samples * WINDOW_BYTES:
                break
        if len(text) <= num_samples * WINDOW_BYTES:
            raise RuntimeError("this Python has no source files of its standard library")
        self._text = torch.frombuffer(text, dtype=torch.uint8)
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        """Return the sample's number, so that its use can be counted, and its bytes."""
        start = index * WINDOW_BYTES
        return index, self._text[start : start + WINDOW_BYTES + 1].long()


class Block(torch.nn.Module):
    """Attention and feed-forward, with dropout, so that random states must be right."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attend = torch.nn.Linear(width, 3 * width)
        self.project = torch.nn.Linear(width, width)
        self.feed = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width),
            torch.nn.GELU(),
            torch.nn.Linear(4 * width, width),
            torch.nn.Dropout(0.1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, length, width = x.shape
        parts = self.attend(self.norm1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.feed(self.norm2(x))
        return out


class GPT(torch.nn.Module):
    """A byte-level GPT of 1.1 million parameters."""

    def __init__(self, width: int = 144, num_layers: int = 4, num_heads: int = 4) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, width)
        self.position = torch.nn.Parameter(torch.zeros(WINDOW_BYTES, width))
        self.blocks = torch.nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each next byte; tokens are (batch, time + 1)."""
        x = self.embed(tokens[:, :-1]) + self.position
        logits = self.head(self.norm(self.blocks(x)))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Record:
    """What one rank did, one JSON line each, for the demo to watch and check. Not part of raycheck."""

    def __init__(self, folder: str, rank: int) -> None:
        self._file = open(Path(folder) / f"rank{rank}-{os.getpid()}.jsonl", "w", buffering=1)  # noqa: SIM115

    def write(self, event: str, **facts: Any) -> None:
        """Append a line; it is in the file when this returns."""
        line = {"event": event, "unix_s": time.time(), "pid": os.getpid(), **facts}
        self._file.write(json.dumps(line) + "\n")


def train_loop(config: dict[str, Any]) -> None:
    """Train on one worker."""
    rank = ray.train.get_context().get_world_rank()
    record = Record(config["records"], rank)
    record.write("start", rank=rank)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = ray.train.torch.prepare_model(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=600)
    loader = raycheck.DataLoader(  # raycheck: instead of torch.utils.data.DataLoader
        SourceText(config["num_samples"]), batch_size=BATCH_SIZE, shuffle=True, seed=SEED
    )
    ckpt = raycheck.attach(  # raycheck: what to save; restores it where a checkpoint exists
        model=model, optimizer=optimizer, scheduler=scheduler, loader=loader
    )
    restored = ckpt.restored
    record.write(
        "attached", step=restored.step if restored else 0, seconds=restored.seconds if restored else 0.0
    )
    for epoch in ckpt.epochs(NUM_EPOCHS):  # raycheck: instead of range(NUM_EPOCHS)
        for indices, tokens in loader:
            loss = model(tokens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ckpt.step({"loss": loss})  # raycheck: the only line inside the loop
            record.write(
                "step",
                step=ckpt.current_step,
                epoch=epoch,
                loss=loss.item(),
                samples=indices.tolist(),
                num_padded=loader.num_padded,
            )


def main() -> None:
    """Run or resume the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--records", required=True)
    parser.add_argument("--num-samples", type=int, default=NUM_SAMPLES)
    parser.add_argument("--reference", action="store_true", help="without checkpoints")
    arguments = parser.parse_args()
    ray.init(address=arguments.address, log_to_driver=False)
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"records": arguments.records, "num_samples": arguments.num_samples},
        scaling_config=ScalingConfig(num_workers=NUM_WORKERS),
        run_config=RunConfig(
            name=arguments.name,
            storage_path=arguments.storage,
            failure_config=FailureConfig(max_failures=3),
            callbacks=[
                raycheck.AutoCheckpoint(  # type: ignore[list-item]  # raycheck: the option itself
                    recovery_point_s=RECOVERY_POINT_S, enabled=not arguments.reference
                )
            ],
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
