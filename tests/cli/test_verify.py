"""``raycheck verify``."""

import json
import threading

import pytest

from raycheck.core.sums import ChunkSums
from raycheck.errors import StorageError
from raycheck.store.checksum import sums_of
from raycheck.store.objects import Store
from raycheck.store.retry import RetryPolicy
from raycheck.store.verification import find_damage
from raycheck.testing import FailNth, FaultyConnect
from tests.cli.stored import flip, folder_of, register

SHARD = "shard-00001-of-00002.safetensors"
MIB = 1 << 20


def test_a_whole_run_is_ok(raycheck_json, raycheck, stored):
    """Exit code 0; without options the newest usable one alone is read; --all takes what does not count as well."""
    code, report = raycheck_json("verify", stored, "--all")
    assert code == 0
    assert [(c["step"], c["verdict"]) for c in report["checkpoints"]] == [
        (2, "ok"), (3, "ok"), (3, "ok"), (4, "ok"), (5, "ok"),
    ]  # fmt: skip
    shards = folder_of(stored, 4).glob("*.safetensors")
    assert report["checkpoints"][3]["num_bytes"] == sum(path.stat().st_size for path in shards)
    code, output = raycheck("verify", stored)
    assert (code, output.count("step")) == (0, 1)
    assert output.startswith("step 5 of g000002-")


@pytest.mark.parametrize("position", [0, MIB - 1, MIB, -1])
def test_one_bit_is_found_and_named(raycheck_json, raycheck, stored, position):
    """Exit code 1 with the object and the chunk; other checkpoints are as they were."""
    path = folder_of(stored, 4) / SHARD
    flip(path, position)
    chunk = (position % path.stat().st_size) // MIB
    code, report = raycheck_json("verify", stored, "--all")
    assert code == 1
    assert [c["verdict"] for c in report["checkpoints"]] == ["ok", "ok", "ok", "damaged", "ok"]
    (damage,) = report["checkpoints"][3]["damage"]
    assert (damage["key"], damage["chunk"]) == (str(path.relative_to(stored / "raycheck")), chunk)
    code, output = raycheck("verify", stored, "--step", 4)
    assert code == 1
    assert f"{SHARD}: chunk {chunk}: bytes {chunk * MIB:,} to" in output


def test_all_damage_of_a_checkpoint_is_named(raycheck_json, stored):
    """A shard that is gone, and both chunks of the other."""
    folder = folder_of(stored, 4)
    (folder / SHARD).unlink()
    other = folder / "shard-00000-of-00002.safetensors"
    flip(other, 10)
    flip(other, MIB + 10)
    code, report = raycheck_json("verify", stored, "--step", 4)
    assert code == 1
    found = [(d["key"].rpartition("/")[2], d["chunk"]) for d in report["checkpoints"][0]["damage"]]
    assert found == [(other.name, 0), (other.name, 1), (SHARD, None)]


@pytest.mark.parametrize("name", [SHARD, "shard-00001-of-00002.sums", "manifest.json"])
def test_what_is_cut_short_is_damage(raycheck_json, stored, name):
    """Of whatever object."""
    path = folder_of(stored, 5) / name
    path.write_bytes(path.read_bytes()[:-10])
    code, report = raycheck_json("verify", stored, "--step", 5)
    assert code == 1
    assert any(name in damage["key"] + damage["detail"] for damage in report["checkpoints"][0]["damage"])


def test_sums_of_another_checkpoint_do_not_pass(raycheck_json, stored):
    """They are whole and the shard fits them; the manifest has the digest of others."""
    for name in (SHARD, "shard-00001-of-00002.sums"):
        (folder_of(stored, 5) / name).write_bytes((folder_of(stored, 4) / name).read_bytes())
    code, report = raycheck_json("verify", stored, "--step", 5)
    assert code == 1
    assert "is not what was committed" in report["checkpoints"][0]["damage"][0]["detail"]


def test_a_layout_that_was_exchanged_is_damage(raycheck_json, stored):
    """Its name is its digest."""
    names = [
        json.loads((folder_of(stored, *at) / "manifest.json").read_text())["layout"]
        for at in [(2, 1), (5, 2)]
    ]
    assert names[0] != names[1], "the starts dealt the tensors differently"
    layouts = stored / "raycheck" / "layouts"
    (layouts / f"{names[1]}.parquet").write_bytes((layouts / f"{names[0]}.parquet").read_bytes())
    code, report = raycheck_json("verify", stored, "--step", 5)
    assert code == 1
    assert names[1] in report["checkpoints"][0]["damage"][0]["key"]


def test_registered_ones_are_verified_like_others(raycheck_json, stored):
    """They carry more objects, which are no shards."""
    register(stored, 5)
    (folder_of(stored, 5) / "layout.parquet").write_bytes(b"a copy")
    assert raycheck_json("verify", stored)[0] == 0


def test_wrong_options_end_with_a_message(raycheck, stored):
    """Exit code 2."""
    code, output = raycheck("verify", stored, "--all", "--step", 3)
    assert code == 2
    assert "give one of them" in output


def test_on_s3(raycheck_json, on_s3, s3_url):
    """A bit that was flipped on the server."""
    url, options = on_s3
    assert raycheck_json("verify", url, "--all", *options)[0] == 0
    listed = s3_url.client.list_objects_v2(Bucket=s3_url.bucket, Prefix=f"{s3_url.prefix}/gpt/")["Contents"]
    (key,) = (o["Key"] for o in listed if "step-0000000005" in o["Key"] and o["Key"].endswith(SHARD))
    data = bytearray(s3_url.client.get_object(Bucket=s3_url.bucket, Key=key)["Body"].read())
    data[MIB + 5] ^= 4
    s3_url.client.put_object(Bucket=s3_url.bucket, Key=key, Body=bytes(data))
    code, report = raycheck_json("verify", url, *options)
    assert code == 1
    (damage,) = report["checkpoints"][0]["damage"]
    assert (key.endswith(damage["key"]), damage["chunk"]) == (True, 1)


def objects_in(store, sizes, chunk_bytes=1000) -> list[tuple[str, ChunkSums]]:
    found = []
    for number, size in enumerate(sizes):
        data = bytes((number + i * i) % 251 for i in range(size))
        store.put(f"object-{number}", data)
        found.append((f"object-{number}", sums_of(data, chunk_bytes)))
    return found


def test_memory_is_bounded_by_the_window_and_every_byte_is_read_once(tmp_path):
    """Windows of three chunks over objects of odd sizes, several at a time."""
    store = Store(tmp_path)
    sizes = [1, 999, 1000, 1001, 10_500, 3000]
    objects = objects_in(store, sizes)
    read: list[int] = []
    found = find_damage(
        store, objects, parallel=3, cancelled=threading.Event(), on_progress=read.append, window_bytes=3000
    )
    assert found == []
    assert sum(read) == sum(sizes)
    assert max(read) == 3000
    assert find_damage(store, [], parallel=3, cancelled=threading.Event()) == []


def test_a_store_that_fails_for_a_while_is_no_damage(tmp_path):
    """Reads are tried again; a store that goes on failing is an error, not a verdict."""
    objects = objects_in(Store(tmp_path), [5000])
    fault = FailNth(1, "read", times=2)
    retry = RetryPolicy(budget_s=5.0, first_delay_s=0.001, max_delay_s=0.01)
    store = Store(tmp_path, connect=FaultyConnect(fault), retry=retry)
    assert find_damage(store, objects, parallel=1, cancelled=threading.Event()) == []
    assert fault.num_fired == 2
    lasting = FailNth(1, "read", times=10**9)
    retry = RetryPolicy(budget_s=0.05, first_delay_s=0.001, max_delay_s=0.01)
    store = Store(tmp_path, connect=FaultyConnect(lasting), retry=retry)
    with pytest.raises(StorageError):
        find_damage(store, objects, parallel=2, cancelled=threading.Event())
    assert lasting.num_fired


def test_damage_on_the_way_is_read_again(tmp_path):
    """A bit that changed between the store and here is no damage of the store."""
    objects = objects_in(Store(tmp_path), [5000])
    connected = _FlipFirst()
    store = Store(tmp_path, connect=connected)
    assert find_damage(store, objects, parallel=1, cancelled=threading.Event()) == []
    assert connected.num_fired == 1


class _FlipFirst(FaultyConnect):
    """Changes a bit of the first read."""

    num_fired = 0

    def __call__(self, location, options):
        backend = super().__call__(location, options)
        read_into = backend.read_into

        def read_changed(key, offset, buffer):
            filled = read_into(key, offset, buffer)
            if not self.num_fired:
                self.num_fired += 1
                buffer[7] ^= 1
            return filled

        backend.read_into = read_changed
        return backend


def test_what_a_running_job_deletes_meanwhile_is_no_damage(raycheck_json, stored, monkeypatch):
    """The checkpoint goes between the listing and the reading of its checksums."""
    from raycheck.cli import verify as module
    from tests.cli.stored import remove

    read_layout = module._layout_damage

    def remove_first(run_store, manifest):
        remove(stored, manifest.ref.step)
        fired.append(manifest.ref.step)
        return read_layout(run_store, manifest)

    fired: list[int] = []
    monkeypatch.setattr(module, "_layout_damage", remove_first)
    code, report = raycheck_json("verify", stored)
    assert fired == [5]
    assert code == 0
    assert report["checkpoints"][0]["verdict"] == "deleted meanwhile"
