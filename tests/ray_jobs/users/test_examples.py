"""The examples, run as a user would: from an empty folder, killed in the middle, and run again."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import raycheck
from tests.runtime.harness import wait_until

EXAMPLES = Path(__file__).parents[3] / "examples"
START_S = 300


def start(name, folder, address, *options):
    """Start an example in a folder of its own; its output goes to a file there."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    if address is not None:
        environment["RAY_ADDRESS"] = address
    with (folder / "output.txt").open("w") as output:
        return subprocess.Popen(
            [sys.executable, EXAMPLES / f"{name}.py", *options],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip


def own_lines(folder):
    """Return what the example printed itself: Ray puts its processes' lines, with their names, in between."""
    text = (folder / "output.txt").read_text()
    return [line for line in text.splitlines() if line and not re.match(r"\x1b|\(|\d{4}-|\[", line)]


def end_of(process, folder):
    """Wait for an example's end; return its last line."""
    try:
        code = process.wait(timeout=400)
    finally:
        process.kill()
    assert code == 0, (folder / "output.txt").read_text()
    return own_lines(folder)[-1]


def run(name, folder, address, *options):
    """Run an example to its end; return its last line."""
    return end_of(start(name, folder, address, *options), folder)


def committed_steps(folder):
    """Return the steps of which there are checkpoints in the example's default storage."""
    manifests = folder.glob("raycheck-runs/*/raycheck/checkpoints/step-*/manifest.json")
    return sorted(int(path.parent.name.split("-")[1]) for path in manifests)


def kill_in_the_middle(name, folder, address, *options):
    """Run an example until it has stored a checkpoint, then kill it; return that checkpoint's step."""
    process = start(name, folder, address, *options)
    try:
        wait_until(
            lambda: process.poll() is not None or committed_steps(folder), f"{name}'s checkpoint", START_S
        )
        assert process.poll() is None, (folder / "output.txt").read_text()
    finally:
        process.kill()
        process.wait()
    return committed_steps(folder)[-1]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "num_epochs", "reached"),
    # 200 steps each. Lightning's are short: two epochs might be over before the first checkpoint is seen.
    [("gpt_ddp", 2, "loss"), ("lightning_trainer", 4, "accuracy"), ("transformers_trainer", 2, "loss")],
)
def test_a_killed_example_goes_on_when_it_is_run_again(ray_head, tmp_path, name, num_epochs, reached):
    """SIGKILL to the driver after the first checkpoint; the same command resumes from it, or from a later one."""
    pytest.importorskip({"gpt_ddp": "torch"}.get(name, name.removesuffix("_trainer")))
    num_steps, options = 200 * num_epochs, ("--epochs", str(num_epochs))
    killed_at = kill_in_the_middle(name, tmp_path, ray_head, *options)
    last = run(name, tmp_path, ray_head, *options)
    found = re.fullmatch(rf"reached step {num_steps}, {reached} \d\S*; resumed from step (\d+)", last)
    assert found, last
    assert 0 < killed_at <= int(found[1]) < num_steps
    assert committed_steps(tmp_path)[-1] == num_steps


@pytest.mark.timeout(900)
def test_sharded_training_goes_on_with_another_number_of_workers(ray_head, tmp_path):
    """Each of two ranks holds half of a weight; then one holds the whole of it."""
    last = run("fsdp2", tmp_path, ray_head, "--epochs", "1")
    assert "rank 0 holds [256, 128] of a weight of [512, 128]" in own_lines(tmp_path)
    assert re.fullmatch(r"reached step 100, loss \d\S*; began at step 0", last), last
    last = run("fsdp2", tmp_path, ray_head, "--epochs", "2", "--workers", "1")
    assert "rank 0 holds [512, 128] of a weight of [512, 128]" in own_lines(tmp_path)
    assert re.fullmatch(r"reached step 200, loss \d\S*; resumed from step 100", last), last


@pytest.mark.timeout(900)
def test_what_digits_has_trained_is_served_without_ray(ray_head, tmp_path):
    """The accuracy that training measured is measured again from the checkpoint, which safetensors reads too."""
    pytest.importorskip("sklearn")
    trained = run("digits", tmp_path, ray_head, "--epochs", "3")
    found = re.fullmatch(r"reached step \d+, accuracy (\S+)%; began at step 0", trained)
    assert found, trained
    served = run("serve", tmp_path, None)
    assert re.fullmatch(rf"reached accuracy {found[1]}%; read from step-\d+, without Ray", served), served
    assert any("model.0.weight" in line for line in own_lines(tmp_path))


def test_serving_says_what_is_missing(tmp_path):
    """Before anything was trained."""
    process = start("serve", tmp_path, None)
    assert process.wait(timeout=120) == 1
    assert "run digits.py first" in own_lines(tmp_path)[-1]


@pytest.mark.timeout(900)
def test_a_resized_epoch_uses_each_item_once(ray_head, tmp_path):
    """By what the loops received, and by the audit of what the run has stored."""
    last = run("resize", tmp_path, ray_head, "--workers", "2", "1")
    expected = "reached step 51, 1603/1603 items used once; resumed from step 20, 2 -> 1 workers"
    assert last == expected, (tmp_path / "output.txt").read_text()


@pytest.mark.timeout(900)
def test_migrating_loses_less_and_changes_little(ray_head, tmp_path):
    """By hand, a failure costs all steps since the epoch began; and the diff is there to be read."""
    last = run("migrate", tmp_path, ray_head)
    found = re.fullmatch(r"reached step 200 twice; steps repeated by hand: 90, with raycheck: (\d+)", last)
    assert found, last
    assert int(found[1]) < 190
    run("migrate", tmp_path, None, "--diff")
    changed = [line for line in own_lines(tmp_path) if line.startswith("+ ")]
    assert sum("# raycheck:" in line for line in changed) == 4


# The recipes for Lightning and Trainer, in one process and with a session that the tests play: what these
# frameworks count must go on as well, from any place, and that many fits with Ray would take too long.


class PlayedSession:
    """Stands for a ``Checkpointer``: it has restored so many steps."""

    def __init__(self, num_steps):
        self.current_step, self.restored = num_steps, None

    def step(self, metrics=None):
        self.current_step += 1

    def close(self):
        """Do nothing."""


def load_example(name):
    pytest.importorskip(name.removesuffix("_trainer"))
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def play_restore(monkeypatch, dataset, *, epoch, num_batches, num_steps):
    """Make ``attach`` restore a position: so many batches of 16 into an epoch."""
    saved = raycheck.DataLoader(dataset, batch_size=16, shuffle=True)
    saved.set_epoch(epoch)
    for _, _ in zip(range(num_batches), saved, strict=False):
        pass
    state = saved.state_dict()

    def attach(*, loader, **_):
        if num_steps:
            loader.load_state_dict(state)
        return PlayedSession(num_steps)

    monkeypatch.setattr(raycheck, "attach", attach)


# Ten batches to an epoch, three epochs. After the last batch of one, its end is still to come.
PLACES = [(0, 3), (1, 7), (0, 10), (2, 10)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("epoch", "num_batches"), PLACES)
def test_lightning_counts_go_on_from_any_place(monkeypatch, epoch, num_batches):
    """Steps, ends of epochs, and validation twice in each epoch, as in a run without interruption."""
    example = load_example("lightning_trainer")
    lightning = example.pl
    dataset = torch.utils.data.TensorDataset(torch.randn(160, 32), torch.zeros(160, dtype=torch.long))
    begun_at = 10 * epoch + num_batches
    play_restore(monkeypatch, dataset, epoch=epoch, num_batches=num_batches, num_steps=begun_at)
    validated, ended = [], []

    class Look(lightning.Callback):
        def on_validation_end(self, trainer, module):
            validated.append(trainer.global_step)

        def on_train_epoch_end(self, trainer, module):
            ended.append(trainer.global_step)

    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", devices=1, callbacks=[example.Raycheck(), Look()],
        enable_checkpointing=False, use_distributed_sampler=False, logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, val_check_interval=0.5,
    )  # fmt: skip
    loader = raycheck.DataLoader(dataset, batch_size=16, shuffle=True)
    trainer.fit(example.Classifier(), loader, torch.utils.data.DataLoader(dataset, batch_size=80))
    assert (trainer.global_step, trainer.current_epoch, loader.epoch) == (30, 3, 3)
    assert validated == [step for step in (5, 10, 15, 20, 25, 30) if step > begun_at]
    assert ended == [step for step in (10, 20, 30) if step >= begun_at and begun_at < step + 10]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("accumulate", "epoch", "num_steps"), [(1, 0, 3), (2, 1, 3), (1, 1, 5), (2, 0, 5), (1, 2, 5)]
)
def test_trainer_counts_go_on_from_any_place(monkeypatch, tmp_path, accumulate, epoch, num_steps):
    """Every step from there on, each with the batch that is its turn; none beyond the end."""
    example = load_example("transformers_trainer")
    transformers = example.transformers
    tokens = torch.randint(0, 256, (80 * accumulate, 16))
    dataset = [{"input_ids": row, "labels": row} for row in tokens]
    begun_at = 5 * epoch + num_steps
    play_restore(monkeypatch, dataset, epoch=epoch, num_batches=num_steps * accumulate, num_steps=begun_at)
    seen = []

    class Look(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append((state.global_step, callback.loader.epoch, callback.loader.cursor.consumed))

    config = transformers.GPT2Config(vocab_size=256, n_positions=16, n_embd=8, n_layer=1, n_head=1)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=3, per_device_train_batch_size=16, use_cpu=True,
        gradient_accumulation_steps=accumulate, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = example.Trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=dataset)
    callback = example.Raycheck(trainer)
    trainer.add_callback(callback)
    trainer.add_callback(Look())
    trainer.train()
    assert trainer.state.global_step == 15
    whole = [(5 * e + s, e, 16 * accumulate * s) for e in range(3) for s in range(1, 6)]
    assert seen == whole[begun_at:]
