"""PyTorch Lightning with Ray Train: a callback is all that checkpoints.

    python examples/lightning_trainer.py

Kill it and run it again: it goes on where it was, in the middle of the epoch.
"""

import argparse
import os

import lightning.pytorch as pl
import ray.train.lightning
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.nn.functional import cross_entropy

import raycheck


class Raycheck(pl.Callback):  # raycheck: this class, for any LightningModule with one optimizer
    def on_train_start(self, trainer, module):
        schedulers = {f"scheduler{n}": c.scheduler for n, c in enumerate(trainer.lr_scheduler_configs)}
        self.loader = trainer.train_dataloader
        self.ckpt = raycheck.attach(
            model=module, optimizer=trainer.optimizers[0], loader=self.loader, **schedulers
        )
        # What was saved behind the last batch of an epoch comes again without a batch, for the hooks at its end.
        self.loader.set_epoch(self.loader.epoch)
        self.num_done = self.loader.steps_per_epoch - len(self.loader) if len(self.loader) else 0
        # Lightning's own counts: what it logs, and when it validates and stops.
        fit, step = trainer.fit_loop, self.ckpt.current_step
        fit.epoch_progress.current.processed = fit.epoch_progress.current.completed = self.loader.epoch
        fit.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
        fit.epoch_loop._batches_that_stepped = step

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        trainer.fit_loop.epoch_loop.batch_progress.current.ready += self.num_done
        self.num_done = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step > self.ckpt.current_step:  # not where gradients are only accumulated
            self.ckpt.step({"loss": outputs["loss"]})

    def on_train_end(self, trainer, module):
        if trainer.current_epoch == trainer.max_epochs:  # started again, it has nothing left to do
            self.loader.set_epoch(trainer.current_epoch)
        self.ckpt.close()


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return cross_entropy(self.layers(inputs), targets)

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        self.log("accuracy", (self.layers(inputs).argmax(1) == targets).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train_loop(config):
    pl.seed_everything(0)
    torch.set_num_threads(1)
    inputs = torch.randn(6_800, 32)
    dataset = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))
    train, test = torch.utils.data.random_split(dataset, [6_400, 400])
    callback = Raycheck()
    trainer = pl.Trainer(
        max_epochs=config["epochs"],
        accelerator="cpu",
        devices="auto",
        strategy=ray.train.lightning.RayDDPStrategy(),
        plugins=[ray.train.lightning.RayLightningEnvironment()],
        callbacks=[callback],  # raycheck:
        enable_checkpointing=False,  # raycheck: it does that
        use_distributed_sampler=False,  # raycheck: its loader deals the items to the ranks
        logger=False,
        enable_progress_bar=False,
    )
    loader = raycheck.DataLoader(train, batch_size=16, shuffle=True)  # raycheck: exactly once
    ray.train.lightning.prepare_trainer(trainer)
    model, test_loader = Classifier(), torch.utils.data.DataLoader(test, batch_size=400)
    trainer.fit(model, loader, test_loader)
    accuracy = trainer.validate(model, test_loader, verbose=False)[0]["accuracy"]
    restored = callback.ckpt.restored
    begin = f"resumed from step {restored.step}" if restored else "began at step 0"
    return f"reached step {trainer.global_step}, accuracy {accuracy:.1%}; {begin}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", default=os.path.abspath("raycheck-runs"), help="a folder or s3://...")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    print(f"storage: {arguments.storage}")
    run_config = RunConfig(
        name="lightning",
        storage_path=arguments.storage,
        failure_config=FailureConfig(max_failures=3),
        # Short, so that half a minute has something to go on from; an hour's job leaves it out.
        callbacks=[raycheck.AutoCheckpoint(max_interval_s=3)],  # raycheck: the option itself
    )
    options = {"scaling_config": ScalingConfig(num_workers=2), "run_config": run_config}
    print(TorchTrainer(train_loop, train_loop_config=vars(arguments), **options).fit().return_value)
