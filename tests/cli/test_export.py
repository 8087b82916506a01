"""``raycheck export``: what others read back is, bit for bit, what was live when the checkpoint was taken."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from raycheck.core.assembly import in_batches, whole_chunks
from raycheck.core.layout import Entry
from raycheck.core.plan import plan_reads
from tests.cli.jobs import Net
from tests.cli.stored import edit, flip, folder_of

SINGLE_PROCESS = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
TIED = "model.head.weight"
SHARD = "shard-00001-of-00002.safetensors"


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same to the last bit, also where they hold NaN."""
    return (
        (a.dtype, a.shape) == (b.dtype, b.shape)
        and a.contiguous().flatten().view(torch.uint8).equal(b.contiguous().flatten().view(torch.uint8))
    )  # fmt: skip


def all_same(found, expected):
    assert found.keys() == expected.keys()
    differing = [name for name in found if not same(found[name], expected[name])]
    assert not differing


def stripped(tensors, prefix):
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def contents(path):
    with safetensors.safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def hidden(folder):
    return [path.name for path in Path(folder).iterdir() if path.name.startswith(".")]


def test_one_safetensors_file_of_the_model(raycheck, stored, live, tmp_path):
    """Sharded along rows and columns, bf16, fp8, bool, 0-dim, empty; a tied tensor once, with its names noted."""
    code, output = raycheck(
        "export", stored, "--step", 4, "--only", "model", "--to", tmp_path / "m.safetensors"
    )
    assert code == 0, output
    tensors, metadata = contents(tmp_path / "m.safetensors")
    all_same(tensors, stripped({k: v for k, v in live.items() if k != TIED}, "model."))
    assert metadata == {"format": "pt", "head.weight": "embed.weight"}
    assert {tensor.dtype for tensor in tensors.values()} == {
        torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool
    }  # fmt: skip
    assert not hidden(tmp_path)


def test_several_components_keep_their_full_names(raycheck, stored, live, tmp_path):
    """Parameters and the optimizer's state for them."""
    path = tmp_path / "both.safetensors"
    code, output = raycheck(
        "export", stored, "--step", 4, "--only", "optimizer", "--only", "model", "--to", path
    )
    assert code == 0, output
    all_same(contents(path)[0], {k: v for k, v in live.items() if k not in (TIED, "spectrum")})


def test_what_is_a_ranks_own_is_that_of_the_rank_asked_for(raycheck, stored, tmp_path):
    """The buffer counts up from the rank by two a step."""
    for rank in (0, 1):
        path = tmp_path / f"{rank}.safetensors"
        raycheck("export", stored, "--step", 4, "--only", "model", "--rank", rank, "--to", path)
        assert contents(path)[0]["seen"].item() == rank + 8


def test_a_hugging_face_set(raycheck, stored, live, tmp_path):
    """Files of at most the size that was asked for, unless a tensor is larger; its library loads the model."""
    folder = tmp_path / "hf"
    code, output = raycheck(
        "export",
        stored,
        "--step",
        4,
        "--only",
        "model",
        "--format",
        "hf",
        "--max-shard-size",
        "200B",
        "--to",
        folder,
    )
    assert code == 0, output
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert names == [f"model-{i + 1:05d}-of-{len(names):05d}.safetensors" for i in range(len(names))]
    assert len(names) >= 3
    assert {path.name for path in folder.iterdir()} == {*names, "model.safetensors.index.json"}
    expected = stripped({k: v for k, v in live.items() if k != TIED}, "model.")
    found = {}
    for name in names:
        tensors, metadata = contents(folder / name)
        assert metadata["format"] == "pt"
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        assert num_bytes <= 200 or len(tensors) == 1
        assert all(index["weight_map"][tensor] == name for tensor in tensors)
        found |= tensors
    all_same(found, expected)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    model = Net(is_sharded=False)
    huggingface_hub.load_torch_model(model, folder, strict=False)
    all_same(tensors_of(model), stripped(live, "model."))


def test_a_small_model_is_one_hugging_face_file(raycheck, stored, live, tmp_path):
    """Without an index, as its library writes it."""
    raycheck("export", stored, "--step", 4, "--only", "model", "--format", "hf", "--to", tmp_path / "hf")
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["model.safetensors"]
    assert contents(tmp_path / "hf" / "model.safetensors")[1]["head.weight"] == "embed.weight"


def tensors_of(model):
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def test_a_torch_file_of_a_model_is_its_state_dict(raycheck, stored, live, tmp_path):
    """Loaded without running code, strictly, with extra state and ties."""
    path = tmp_path / "model.pt"
    code, output = raycheck("export", stored, "--step", 4, "--only", "model", "--format", "pt", "--to", path)
    assert code == 0, output
    state = torch.load(path, weights_only=True)
    model = Net(is_sharded=False)
    model.load_state_dict(state, strict=True)
    all_same(tensors_of(model), stripped(live, "model."))
    assert model.calls == 4
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr(), "stored once"
    assert not hidden(tmp_path)


def test_a_torch_file_of_everything(raycheck, stored, live, tmp_path):
    """Components by the keywords of attach(); what would need code to load is left out, and said."""
    path = tmp_path / "all.pt"
    code, output = raycheck("export", stored, "--step", 4, "--format", "pt", "--to", path)
    assert code == 0, output
    assert "left out: notes: it holds a datetime.date" in output
    state = torch.load(path, weights_only=True)
    assert state.keys() == {"model", "optimizer", "scheduler", "loader", "spectrum"}
    assert same(state["spectrum"], live["spectrum"])
    assert state["loader"]["consumed"] == 16
    assert state["scheduler"]["last_epoch"] == 4
    model, optimizer = trainable()
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    check_training_state(model, optimizer, live)


def trainable():
    model = Net(is_sharded=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=7.0, foreach=False)


def check_training_state(model, optimizer, live):
    all_same(tensors_of(model), stripped(live, "model."))
    names = {id(p): name for name, p in model.named_parameters()}
    found = {
        f"{names[id(parameter)]}.{key}": value
        for parameter, fields in optimizer.state.items()
        for key, value in fields.items()
    }
    all_same(found, stripped(live, "optimizer.model."))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (1 / 3 + 2 / 3 * 4 / 50))


@SINGLE_PROCESS
def test_a_torch_distributed_checkpoint(raycheck, stored, live, tmp_path):
    """Read by dcp.load into a model and its optimizer, and by torch's own conversion to a file."""
    folder = tmp_path / "dcp"
    code, output = raycheck("export", stored, "--step", 4, "--format", "dcp", "--to", folder)
    assert code == 0, output
    assert "UserWarning" not in output
    model, optimizer = trainable()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    check_training_state(model, optimizer, live)
    dcp_to_torch_save(folder, tmp_path / "converted.pt")
    converted = torch.load(tmp_path / "converted.pt", weights_only=True)
    tensors = {name: value for name, value in converted["model"].items() if isinstance(value, torch.Tensor)}
    all_same(tensors, stripped(live, "model."))


@SINGLE_PROCESS
def test_a_torch_distributed_checkpoint_of_one_component(raycheck, stored, live, tmp_path):
    """Its names are those of the model itself."""
    folder = tmp_path / "dcp"
    raycheck("export", stored, "--step", 4, "--only", "model", "--format", "dcp", "--to", folder)
    state = Net(is_sharded=False).state_dict()
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    all_same({name: v for name, v in state.items() if isinstance(v, torch.Tensor)}, stripped(live, "model."))


@pytest.mark.parametrize("format_name", ["safetensors", "hf", "pt", "dcp"])
def test_a_damaged_byte_leaves_nothing(raycheck, stored, tmp_path, format_name):
    """Exit code 1 with the object; neither the name nor anything hidden is there."""
    flip(folder_of(stored, 4) / SHARD, -100_000)
    out = tmp_path / "out"
    out.mkdir()
    arguments = ["--step", 4, "--only", "model", "--only", "optimizer"]
    if format_name == "hf":
        arguments = arguments[:4]
        flip(folder_of(stored, 4) / "shard-00000-of-00002.safetensors", 5000)
    code, output = raycheck("export", stored, *arguments, "--format", format_name, "--to", out / "x")
    assert code == 1, output
    assert "differs from its checksum" in output
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_ended_leaves_nothing_under_the_name(stored, tmp_path, sent):
    """A shard that is a pipe keeps it from ending by itself; interrupted, it cleans up as well."""
    shard = folder_of(stored, 4) / SHARD
    shard.unlink()
    os.mkfifo(shard)
    out = tmp_path / "out"
    out.mkdir()
    command = ["export", stored, "--step", "4", "--only", "model", "--to", out / "m.safetensors"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from raycheck.cli import main; main()", *map(str, command)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        # Tests that run in the background of a shell ignore it, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        end_s = time.monotonic() + 60
        while not hidden(out):
            assert process.poll() is None, "it ended before it was held"
            assert time.monotonic() < end_s
            time.sleep(0.01)
        process.send_signal(sent)
        process.wait(240)
    finally:
        process.kill()
        process.wait()
    assert not (out / "m.safetensors").exists()
    if sent == signal.SIGINT:
        assert list(out.iterdir()) == []


def test_what_is_there_is_not_overwritten(raycheck, stored, tmp_path):
    """A folder that exists takes the export under the name of its step; a second time it is refused."""
    code, output = raycheck("export", stored, "--only", "model", "--to", tmp_path)
    assert (code, (tmp_path / "step-0000000005.safetensors").exists()) == (0, True), output
    code, output = raycheck("export", stored, "--only", "model", "--to", tmp_path)
    assert code == 2
    assert "it exists already" in output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--only", "modle"],
            "--only modle: no such component in the checkpoint; there are model, optimizer",
        ),
        (["--format", "hf"], "--format hf is for one module: give --only with one of"),
        ([], "spectrum is complex64, which safetensors files cannot hold; use --format pt or dcp"),
        (["--rank", "2"], "--rank 2: 2 ranks wrote this checkpoint"),
        (["--step", "77"], "no checkpoint of step 77"),
        (["--to", "s3://bucket/model"], "must be a local path"),
    ],
)
def test_what_cannot_be_written_is_said(raycheck, stored, tmp_path, arguments, text):
    """Exit code 2, and nothing is there."""
    out = tmp_path / "out"
    out.mkdir()
    code, output = raycheck("export", stored, "--to", out / "x", *arguments)
    assert code == 2
    assert text in output
    assert list(out.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_said(raycheck, stored, tmp_path):
    """A file stands where a folder should be."""
    (tmp_path / "file").write_text("")
    code, output = raycheck("export", stored, "--only", "model", "--to", tmp_path / "file" / "x")
    assert code == 2
    assert "cannot write" in output


def test_a_pickled_value_is_never_run(raycheck, stored, tmp_path):
    """A value that would need pickle is left out by name; its bytes are not looked at."""
    folder = folder_of(stored, 4)
    path = folder / "shard-00000-of-00002.safetensors"
    data = path.read_bytes()
    secret = b'{"tried":[1,2.5],"begun":{"!":"date","v":"2026-01-02"}}'
    assert data.count(secret) == 1
    forged = b'{"!":"pickle","type":"os.system","v":"Y29zCg=="}'.ljust(len(secret))
    path.write_bytes(data.replace(secret, forged))
    rewrite_sums(folder, path)
    code, output = raycheck("export", stored, "--step", 4, "--format", "pt", "--to", tmp_path / "x.pt")
    assert code == 0, output
    assert "left out: notes: the checkpoint holds a pickled os.system" in output


def rewrite_sums(folder, path):
    """Make the checksums and the manifest those of the changed shard."""
    import crc32c

    data, chunk_bytes = path.read_bytes(), 1 << 20
    sums = [crc32c.crc32c(data[i : i + chunk_bytes]) for i in range(0, len(data), chunk_bytes)]
    numbers = [chunk_bytes, len(data)]
    record = b"RCKSUMS1" + b"".join(n.to_bytes(8, "little") for n in numbers)
    record += b"".join(s.to_bytes(4, "little") for s in sums)
    path.with_suffix(".sums").write_bytes(record)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0][3] = f"{crc32c.crc32c(record):08x}"
    edit(folder / "manifest.json", shards=manifest["shards"])


def test_on_s3(raycheck_json, on_s3, live, tmp_path):
    """The same through a URL and options."""
    url, options = on_s3
    path = tmp_path / "m.safetensors"
    code, report = raycheck_json("export", url, "--step", 4, "--only", "model", "--to", path, *options)
    assert (code, report["num_tensors"], report["tied"]) == (0, 8, {"head.weight": "embed.weight"})
    all_same(contents(path)[0], stripped({k: v for k, v in live.items() if k != TIED}, "model."))


# How whole tensors are put together, on tensors of any shape cut in any way.


@st.composite
def layouts(draw):
    """Tensors of one byte an element, each cut by a grid; each box in a shard of its own."""
    entries = []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        cuts = [sorted({0, extent, *draw(st.lists(st.integers(0, extent), max_size=2))}) for extent in shape]
        boxes = [((), ())]
        for edges in cuts:
            spans = list(itertools.pairwise(edges)) or [(0, 0)]
            boxes = [((*o, a), (*s, b - a)) for o, s in boxes for a, b in spans]
        for offset, box in boxes:
            rank = len(entries)
            entries.append(Entry(f"t{number}", "uint8", shape, offset, box, -1, rank, 0, math.prod(box)))
    return entries


@given(layouts(), st.integers(1, 8))
def test_every_byte_of_whole_tensors_is_read_once_and_plans_are_bounded(entries, max_reads):
    """Whatever the cuts and the bound."""
    chunks = whole_chunks(entries, rank=0)
    assert [chunk.name for chunk in chunks] == list(dict.fromkeys(entry.name for entry in entries))
    begins, end = [], 0
    for chunk in chunks:
        begins.append(end)
        end += chunk.num_bytes
    covered = [0] * end
    for batch in in_batches(list(zip(chunks, begins, strict=True)), entries, max_reads=max_reads):
        reads = plan_reads(batch, entries)
        is_one_row = len(batch) == 1 and (not batch[0][0].shape or batch[0][0].shape[0] == 1)
        assert len(reads) <= 2 * max_reads + len(entries) or is_one_row
        for read in reads:
            for position in range(read.destination, read.destination + read.num_bytes):
                covered[position] += 1
    assert covered == [1] * end
