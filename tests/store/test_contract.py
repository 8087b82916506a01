"""What every store must do, tried on memory, local files and a real S3 server."""

import os
import pickle
import threading

import pytest

from raycheck.errors import CorruptCheckpointError, ObjectNotFoundError
from raycheck.store import objects
from raycheck.store.checksum import sums_of
from raycheck.store.download import download
from raycheck.store.objects import Store
from raycheck.store.spans import Read
from raycheck.store.upload import upload

MIB = 1 << 20
AWKWARD = "run name (2)+%#?=[1]*é/a b.json"


class TestStoreContract:
    def test_put_writes_a_whole_object(self, place, store):
        """What is put is what others find."""
        store.put("a/b.json", b"hello")
        assert place.read("a/b.json") == b"hello"
        assert place.keys() == ["a/b.json"]

    def test_put_replaces_an_object_of_another_length(self, place, store):
        """A second put leaves nothing of the first."""
        store.put("a", b"long contents")
        store.put("a", b"short")
        assert place.read("a") == b"short"
        assert store.get("a") == b"short"

    def test_put_refuses_empty_data(self, store):
        """No empty object is ever written."""
        with pytest.raises(AssertionError, match="no empty objects"):
            store.put("a", b"")

    def test_get_range_reads_what_is_there(self, place, store):
        """A range ends with the object."""
        place.write("a", b"0123456789")
        assert store.get_range("a", 2, 3) == b"234"
        assert store.get_range("a", 8, 5) == b"89"
        assert store.get_range("a", 12, 5) == b""
        assert store.get_range("a", 3, 0) == b""

    def test_an_object_that_is_too_large_is_not_read_whole(self, place, store, monkeypatch):
        """Whoever put it there, a reader's memory has a bound; up to it, every byte is read."""
        monkeypatch.setattr(objects, "MAX_WHOLE_BYTES", 1000)
        place.write("a", bytes(1000))
        assert len(store.get("a")) == 1000
        place.write("a", bytes(1001))
        with pytest.raises(CorruptCheckpointError, match="more than 1000 bytes") as caught:
            store.get("a")
        assert caught.value.key == "a"

    def test_size_is_looked_up_fresh(self, place, store):
        """A size changes with the object."""
        place.write("a", b"0123456789")
        assert store.size_bytes("a") == 10
        place.write("a", b"012")
        assert store.size_bytes("a") == 3

    def test_what_is_missing_is_named(self, place, store):
        """Every read of a missing object says which, and is also a FileNotFoundError."""
        place.write("other", b"x")
        for read in (store.get, store.size_bytes, lambda key: store.get_range(key, 0, 1)):
            with pytest.raises(ObjectNotFoundError, match="a/missing") as caught:
                read("a/missing")
            assert isinstance(caught.value, FileNotFoundError)
            assert caught.value.key == "a/missing"
        assert store.num_retries == 0

    def test_list_keys_is_recursive_and_sorted(self, place, store):
        """All objects below a folder, with their sizes."""
        for key, data in (("b/2", b"22"), ("a", b"1"), ("b/c/1", b"333")):
            place.write(key, data)
        assert [tuple(info) for info in store.list_keys()] == [("a", 1), ("b/2", 2), ("b/c/1", 3)]
        assert [info.key for info in store.list_keys("b")] == ["b/2", "b/c/1"]
        assert [info.key for info in store.list_keys("b/")] == ["b/2", "b/c/1"]

    def test_list_children_goes_one_level_down(self, place, store):
        """Objects and folders directly below, by name."""
        for key in ("b/2", "a", "b/c/1", "b/c/2", "d/e/f/g"):
            place.write(key, b"x")
        assert store.list_children() == ["a", "b", "d"]
        assert store.list_children("b") == ["2", "c"]

    def test_a_missing_folder_is_empty(self, store):
        """Nothing there is no error."""
        assert store.list_keys("nothing/here") == []
        assert store.list_children("nothing/here") == []
        assert store.list_keys() == []

    def test_a_neighbour_with_a_longer_name_is_not_listed(self, place, store):
        """run1 is not run10."""
        for key in ("run1/a", "run10/b", "run1.json"):
            place.write(key, b"x")
        assert [info.key for info in store.list_keys("run1")] == ["run1/a"]
        assert store.list_children("run1") == ["a"]

    def test_delete_is_idempotent_and_exact(self, place, store):
        """What is listed goes, wildcards and what is not there do no harm."""
        for key in ("a/1", "a/2", "a[1]", "a*", "ab"):
            place.write(key, b"x")
        store.delete(["a*", "a/1", "never/there", "a[1]"])
        assert place.keys() == ["a/2", "ab"]
        store.delete(["a*", "a/1"])
        store.delete([])
        assert place.keys() == ["a/2", "ab"]

    def test_delete_works_in_batches(self, place, store):
        """More keys than one request takes."""
        if place.url.startswith("s3"):
            for number in range(3):
                place.write(f"many/{number}", b"x")
        store.delete([f"many/{number}" for number in range(1005)])
        assert place.keys() == []

    @pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", ".", "a/./b", "a\x00b"])
    def test_a_key_that_leads_elsewhere_is_refused(self, place, store, key):
        """Keys stay below the root."""
        for use in (lambda: store.put(key, b"x"), lambda: store.get(key), lambda: store.delete([key])):
            with pytest.raises(ValueError, match="not a key"):
                use()
        assert place.keys() == []

    def test_awkward_names_work(self, place, store):
        """Nothing in a key is a wildcard, an escape or a query."""
        store.put(AWKWARD, b"x")
        place.write("run name (2)+%#?=1*é/a b.json", b"neighbour")
        assert place.read(AWKWARD) == b"x"
        assert store.get(AWKWARD) == b"x"
        folder, name = AWKWARD.split("/")
        assert folder in store.list_children()
        assert store.list_children(folder) == [name]
        store.delete([AWKWARD])
        assert place.keys() == ["run name (2)+%#?=1*é/a b.json"]

    def test_a_store_travels_as_url_and_options(self, place, store):
        """A pickled store finds the same objects with a client of its own."""
        store.put("a", b"x")
        copy = pickle.loads(pickle.dumps(store))
        assert copy.get("a") == b"x"
        assert copy.url == store.url

    def test_probe_leaves_nothing(self, place, store):
        """A store that works passes, and looks as before."""
        store.probe()
        assert place.keys() == []

    @pytest.mark.parametrize("size_bytes", [1, 1000, 16 * MIB, 33 * MIB + 7])
    def test_upload_and_download(self, place, store, make_source, never, size_bytes):
        """What is uploaded is whole, summed right, and comes back in pieces."""
        descriptor, data = make_source(size_bytes + 3)
        sums = upload(
            store,
            "shard",
            descriptor,
            source_offset=3,
            size_bytes=size_bytes,
            chunk_bytes=8 * MIB,
            parallel_parts=3,
            cancelled=never,
        )
        assert place.read("shard") == data[3:]
        assert place.keys() == ["shard"]
        assert sums == sums_of(data[3:], 8 * MIB)

        destination = os.memfd_create("test")
        half = size_bytes // 2
        reads = [Read(half, size_bytes - half, 10), Read(0, half, size_bytes + 10)]
        download(store, "shard", reads, destination, sums=sums, parallel=3, cancelled=never)
        assert os.pread(destination, size_bytes - half, 10) == data[3 + half :]
        assert os.pread(destination, half, size_bytes + 10) == data[3 : 3 + half]
        os.close(destination)

    def test_calls_from_many_threads(self, place, store):
        """A store may be shared by threads."""
        failures = []

        def work(number):
            try:
                store.put(f"t/{number}", b"x" * (number + 1))
                assert store.get(f"t/{number}") == b"x" * (number + 1)
                assert f"t/{number}" in [info.key for info in store.list_keys("t")]
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not failures
        assert len(place.keys()) == 8


def test_local_files_under_way_are_not_listed(local_place, make_source):
    """While an upload runs, no listing shows it and its name leads nowhere."""
    store = Store(local_place.url)
    under_way = store.backend.begin_upload("shard", 5)
    under_way.write_part(0, 0, b"hello", 0)
    assert store.list_keys() == []
    assert store.list_children() == []
    with pytest.raises(ObjectNotFoundError):
        store.get("shard")
    under_way.complete()
    assert store.get("shard") == b"hello"


def test_local_folders_go_with_their_last_file(local_place, tmp_path):
    """Empty folders are removed up to the root, which stays."""
    store = Store(local_place.url)
    store.put("a/b/c/1", b"x")
    store.put("a/2", b"x")
    store.delete(["a/b/c/1"])
    assert not (tmp_path / "runs/a/b").exists()
    store.delete(["a/2"])
    assert not (tmp_path / "runs/a").exists()
    assert (tmp_path / "runs").exists()


def test_left_over_local_files_are_swept(local_place):
    """A file of a killed writer goes after the grace time, one that is written stays."""
    store = Store(local_place.url)
    store.backend.begin_upload("shard", 5)
    assert store.sweep_uploads(60) == []
    assert len(store.sweep_uploads(0)) == 1
    assert store.sweep_uploads(0) == []


def test_local_deletes_and_writes_do_not_collide(local_place):
    """Folders that one thread empties and removes are made again under another's write."""
    store = Store(local_place.url)
    failures = []

    def work(name):
        try:
            for number in range(150):
                store.put(f"shared/deep/{name}/{number}", b"x")
                store.delete([f"shared/deep/{name}/{number}"])
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert local_place.keys() == []
