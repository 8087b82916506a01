"""Looks at a stored run, and damages it, without any code of raycheck's."""

from __future__ import annotations

import json
import shutil


def folder_of(run, step, generation=2):
    """Return the folder of a checkpoint."""
    (found,) = (run / "raycheck" / "checkpoints").glob(f"step-{step:010d}-g{generation:06d}-*")
    return found


def steps_of(run):
    """Return (step, generation) of all checkpoints that have a manifest."""
    manifests = (run / "raycheck" / "checkpoints").glob("*/manifest.json")
    found = [json.loads(path.read_text()) for path in manifests]
    return sorted((fields["step"], fields["generation"][0]) for fields in found)


def flip(path, position):
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def register(run, step):
    """Write that a checkpoint is Ray Train's."""
    folder = run / "raycheck" / "registered"
    folder.mkdir(exist_ok=True)
    (folder / f"{folder_of(run, step).name}.json").write_text("{}")


def edit(path, **fields):
    """Change fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def generation_file(run, number, kind):
    """Return a generation's claim, record or end: kind is ".claim", "" or ".end"."""
    pattern = f"{number:06d}-*{kind}.json"
    (found,) = (
        p for p in (run / "raycheck" / "generations").glob(pattern) if p.name.count(".") == 1 + bool(kind)
    )
    return found


def start_another(run, claimed_unix_s):
    """Write the claim of a start that has recorded nothing yet."""
    path = run / "raycheck" / "generations" / "000003-0000abcd.claim.json"
    path.write_text(json.dumps({"claimed_unix_s": claimed_unix_s}))


def end_unseen(run):
    """Make the run one whose job was killed, or is alive."""
    generation_file(run, 2, ".end").unlink()


def remove(run, step, generation=2):
    shutil.rmtree(folder_of(run, step, generation))
