"""Hugging Face Trainer with Ray Train: a TrainerCallback is all that checkpoints.

    python examples/transformers_trainer.py

Kill it and run it again: it goes on where it was, in the middle of the epoch.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import datasets
import ray.train.huggingface.transformers
import torch
import transformers
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import raycheck


class Loader(raycheck.DataLoader):  # raycheck: Trainer counts epochs from 0 after a resume; this one does not
    first_epoch = 0

    def set_epoch(self, epoch):
        super().set_epoch(self.first_epoch + epoch)


class Trainer(transformers.Trainer):
    def get_train_dataloader(self):  # raycheck: exactly once; Trainer's own loader fetches a batch ahead
        return Loader(
            self.train_dataset, self.args.train_batch_size, shuffle=True, collate_fn=self.data_collator
        )


class Raycheck(transformers.TrainerCallback):  # raycheck: from here to the next function, for any Trainer
    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.loader = kwargs["train_dataloader"]
        self.ckpt = raycheck.attach(
            model=kwargs["model"],
            optimizer=kwargs["optimizer"].optimizer,  # the one that accelerate has wrapped
            scheduler=kwargs["lr_scheduler"],
            loader=self.loader,
        )
        state.global_step = self.ckpt.current_step  # it is what ends the training
        # From where Trainer averages the losses that it logs.
        self.trainer._initial_global_step = self.trainer._globalstep_last_logged = state.global_step
        # An epoch without a batch would end it too: one that was saved behind its last batch is over.
        is_over = self.loader.cursor.consumed == len(self.loader.dataset)
        self.loader.first_epoch = self.loader.epoch + (is_over and state.global_step < state.max_steps)

    def on_step_end(self, args, state, control, **kwargs):
        state.epoch = self.loader.epoch + self.loader.cursor.consumed / len(self.loader.dataset)
        self.ckpt.step()

    def on_train_end(self, args, state, control, **kwargs):
        self.ckpt.close()


def train_loop(config):
    torch.set_num_threads(1)
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    windows = [list(text[begin : begin + 64]) for begin in range(0, 3_300 * 64, 64)]
    dataset = datasets.Dataset.from_dict({"input_ids": windows, "labels": windows}).with_format("torch")
    transformers.set_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2)
    )
    arguments = transformers.TrainingArguments(
        output_dir=os.path.join(os.getcwd(), "trainer"),
        num_train_epochs=config["epochs"],
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        use_cpu=True,
        save_strategy="no",  # raycheck: it does that
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=dataset.select(range(3_200)),
        eval_dataset=dataset.select(range(3_200, 3_300)),
    )
    callback = Raycheck(trainer)
    trainer.add_callback(callback)  # raycheck:
    ray.train.huggingface.transformers.prepare_trainer(trainer).train()
    loss = trainer.evaluate()["eval_loss"]
    restored = callback.ckpt.restored
    begin = f"resumed from step {restored.step}" if restored else "began at step 0"
    return f"reached step {trainer.state.global_step}, loss {loss:.3f}; {begin}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", default=os.path.abspath("raycheck-runs"), help="a folder or s3://...")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    print(f"storage: {arguments.storage}")
    run_config = RunConfig(
        name="transformers",
        storage_path=arguments.storage,
        failure_config=FailureConfig(max_failures=3),
        # Short, so that half a minute has something to go on from; an hour's job leaves it out.
        callbacks=[raycheck.AutoCheckpoint(max_interval_s=3)],  # raycheck: the option itself
    )
    options = {"scaling_config": ScalingConfig(num_workers=2), "run_config": run_config}
    print(TorchTrainer(train_loop, train_loop_config=vars(arguments), **options).fit().return_value)
