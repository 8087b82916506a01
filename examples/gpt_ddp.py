"""A small GPT on the source text of Python's standard library: DDP on two CPU workers.

    python examples/gpt_ddp.py

Kill it with Ctrl-C, kill -9 or the power switch, and run it again: it goes on where it was.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.nn.functional import cross_entropy

import raycheck

CONTEXT, WIDTH = 64, 64


class Text(torch.utils.data.Dataset):
    def __init__(self):
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in paths)), dtype=torch.uint8)

    def __len__(self):
        return 3_200

    def __getitem__(self, index):
        return self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.token = torch.nn.Embedding(256, WIDTH)
        self.position = torch.nn.Embedding(CONTEXT, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, 256)

    def forward(self, tokens):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        embedded = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.blocks(embedded, mask=mask, is_causal=True))


def loss_of(model, text):
    return cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def train_loop(config):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = ray.train.torch.prepare_model(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
    loader = raycheck.DataLoader(Text(), batch_size=8, shuffle=True)  # raycheck: exactly once
    ckpt = raycheck.attach(  # raycheck: what to save; restores it where a checkpoint exists
        model=model, optimizer=optimizer, scheduler=scheduler, loader=loader
    )
    for epoch in ckpt.epochs(config["epochs"]):  # raycheck: instead of range()
        for text in loader:
            loss = loss_of(model, text)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ckpt.step({"loss": loss})  # raycheck: the only line inside the loop
    with torch.no_grad():
        loss = loss_of(model.eval(), torch.stack([loader.dataset[index] for index in range(100)])).item()
    begin = f"resumed from step {ckpt.restored.step}" if ckpt.restored else "began at step 0"
    return f"reached step {ckpt.current_step}, loss {loss:.3f}; {begin}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", default=os.path.abspath("raycheck-runs"), help="a folder or s3://...")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    print(f"storage: {arguments.storage}")
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"epochs": arguments.epochs},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="gpt-ddp",
            storage_path=arguments.storage,
            failure_config=FailureConfig(max_failures=3),
            # Short, so that half a minute has something to go on from; an hour's job leaves it out.
            callbacks=[raycheck.AutoCheckpoint(max_interval_s=3)],  # raycheck: the option itself
        ),
    )
    print(trainer.fit().return_value)
