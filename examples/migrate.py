"""The same training with hand-written checkpoints and with raycheck; each loses a worker once.

    python examples/migrate.py
    python examples/migrate.py --diff

The second line shows what changes in the train function, and trains nothing.
"""

import argparse
import difflib
import inspect
import os
import tempfile

import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, DistributedSampler

import raycheck

FAIL_AT, NUM_EPOCHS = 190, 2


def by_hand(config):
    model, optimizer, dataset = build()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    step = first_epoch = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"))
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, first_epoch = state["step"], state["epoch"] + 1
    begun_at = step
    for epoch in range(first_epoch, NUM_EPOCHS):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            loss = update(model, optimizer, batch, targets)
            step += 1
            fail_once(config, step)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step, "epoch": epoch}, os.path.join(folder, "state.pt"))
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report({"loss": loss.item()}, checkpoint=checkpoint)
    return begun_at


def with_raycheck(config):
    model, optimizer, dataset = build()
    loader = raycheck.DataLoader(dataset, batch_size=32, shuffle=True)  # raycheck: exactly once
    ckpt = raycheck.attach(model=model, optimizer=optimizer, loader=loader)  # raycheck: restores in place
    begun_at = ckpt.current_step
    for epoch in ckpt.epochs(NUM_EPOCHS):  # raycheck: instead of range()
        for batch, targets in loader:
            loss = update(model, optimizer, batch, targets)
            ckpt.step({"loss": loss})  # raycheck: the only line inside the loop
            fail_once(config, ckpt.current_step)
    return begun_at


def build():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs = torch.randn(6_400, 64)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.square().sum(1, keepdim=True).sqrt())
    network = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1))
    model = ray.train.torch.prepare_model(network)
    return model, torch.optim.AdamW(model.parameters()), dataset


def update(model, optimizer, batch, targets):
    loss = torch.nn.functional.mse_loss(model(batch), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def fail_once(config, step):
    is_due = step == FAIL_AT and ray.train.get_context().get_world_rank() == 0
    if is_due and not os.path.exists(config["mark"]):
        open(config["mark"], "x").close()
        raise RuntimeError("this worker is lost")


def count_repeated_steps(train_loop, storage, **options):
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={"mark": os.path.join(folder, "has_failed")},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                storage_path=storage, failure_config=FailureConfig(max_failures=1), **options
            ),
        )
        return FAIL_AT - trainer.fit().return_value


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", default=os.path.abspath("raycheck-runs"), help="a folder or s3://...")
    parser.add_argument("--diff", action="store_true", help="show what changes, and train nothing")
    arguments = parser.parse_args()
    if arguments.diff:
        sources = [inspect.getsource(function).splitlines() for function in (by_hand, with_raycheck)]
        print("\n".join(difflib.unified_diff(*sources, "by hand", "with raycheck", n=99, lineterm="")))
        raise SystemExit
    print(f"storage: {arguments.storage}")
    # So short a run needs a fixed interval; a real one leaves it to be chosen.
    option = raycheck.AutoCheckpoint(interval_steps=20)  # raycheck: the option itself
    before = count_repeated_steps(by_hand, arguments.storage)
    after = count_repeated_steps(with_raycheck, arguments.storage, callbacks=[option])
    print(f"reached step 200 twice; steps repeated by hand: {before}, with raycheck: {after}")
