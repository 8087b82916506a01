"""Ways to save one and the same state, behind one interface, to a folder or to an S3 server."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_agent import AgentProcess
from checkpoint_device import Cuda, Host
from checkpoint_state import from_state_dicts, tensors_of
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from raycheck.core.lineage import GenerationId
from raycheck.core.page import Plan
from raycheck.runtime.link import AgentLink
from raycheck.state.codec import Codec
from raycheck.state.segment import Segment
from raycheck.state.snapshot import Snapshot, Snapshotter
from raycheck.state.tree import StateTree


@dataclasses.dataclass(frozen=True)
class Place:
    """Where saves go: a folder on a disk, or a URL and the options of s3fs."""

    folder: Path
    url: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    keeps: bool = True
    """Whether what was saved can be read again."""

    def child(self, name: str) -> Place:
        (self.folder / name).mkdir(parents=True)
        return dataclasses.replace(self, folder=self.folder / name, url=self.url and f"{self.url}/{name}")


class Peer:
    """One way to save.

    Time that `begin`, `before_update` and `after_update` block is stall.
    """

    name = ""
    is_local_only = False

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, place: Place, device: Host | Cuda
    ) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.place = place.child(type(self).__name__)
        self.folder, self.url = self.place.folder, self.place.url
        self.durable_at_s: float | None = None
        """Monotonic time; None until the save is durable."""

    def begin(self, number: int) -> None:
        """Start save ``number``, at a step boundary."""
        raise NotImplementedError

    def before_update(self) -> None:
        """Wait for what must be copied before the optimizer may step."""

    def after_update(self) -> float:
        """Do what belongs to the next step boundary; return seconds waited inside the update."""
        return 0.0

    def load(self, number: int) -> dict[str, torch.Tensor]:
        """Return what save ``number`` stored."""
        raise NotImplementedError

    def delete(self, number: int) -> None:
        if self.url is None:
            shutil.rmtree(self.path(number))
        elif self.place.keeps:
            filesystem, path = self.remote(number)
            filesystem.rm(path, recursive=True)

    def path(self, number: int) -> Path:
        return self.folder / str(number)

    def remote(self, number: int) -> tuple[fsspec.AbstractFileSystem, str]:
        options = {**self.place.options, "use_listings_cache": False}
        return fsspec.core.url_to_fs(f"{self.url}/{number}", **options)

    @contextlib.contextmanager
    def fetched(self, number: int):
        """A folder that holds save ``number``."""
        if self.url is None:
            yield self.path(number)
            return
        filesystem, path = self.remote(number)
        filesystem.get(path, str(self.path(number)), recursive=True)
        yield self.path(number)
        shutil.rmtree(self.path(number))

    def close(self) -> None:
        pass

    def state_dict(self) -> dict:
        """The cheapest that torch offers; get_state_dict() takes ten times as long."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Raycheck(Peer):
    name = "raycheck"

    def __init__(self, *args) -> None:
        super().__init__(*args)
        address = f"raycheck-benchmark-{secrets.token_hex(8)}"
        self.agent = AgentProcess(address, self.url or f"file://{self.folder}", self.place.options)
        self.segment = Segment()
        self.tree = StateTree({"model": self.model, "optimizer": self.optimizer})
        self.snapshotter = Snapshotter(
            self.tree,
            self.segment,
            rank=0,
            world_size=1,
            codec=Codec(),
            overlap=True,
            on_layout=lambda image: self.link.send("table", rows=[e.to_row() for e in image.entries]),
            on_copied=lambda plan, num_bytes: self.link.send(
                "copied", plan=list(plan), num_bytes=num_bytes, slot=0
            ),
            on_settled=self._report,
            copier=self.device.copier(),
        )
        self.link = AgentLink(
            address=address,
            segments=[self.segment],
            generation=GenerationId(1, "be"),
            rank=0,
            world_size=1,
            on_reconnect=lambda: None,
        )
        self.link.send("joined")
        threading.Thread(target=self._listen, daemon=True).start()

    def begin(self, number: int) -> None:
        self.snapshotter.begin(Plan(number, number))

    def after_update(self) -> float:
        outcome = self.snapshotter.settle(block=True)
        if outcome is not None:
            self._report(outcome)
        return self.snapshotter.take_waited_s()

    def _report(self, outcome) -> None:
        assert isinstance(outcome, Snapshot), outcome
        self.link.send(
            "staged",
            plan=list(outcome.plan),
            num_bytes=outcome.num_bytes,
            slot=0,
            stall_s=outcome.stall_s,
            replica_digest=outcome.replica_digest,
            metrics={},
        )

    def remote(self, number: int) -> tuple[fsspec.AbstractFileSystem, str]:
        filesystem, path = fsspec.core.url_to_fs(
            f"{self.url}/checkpoints", **self.place.options, use_listings_cache=False
        )
        return filesystem, path

    def load(self, number: int) -> dict[str, torch.Tensor]:
        with self.fetched(number) as folder:
            root = folder if self.url else self.folder / "checkpoints"
            (shard,) = root.glob(f"step-*{number}-*/*.safetensors")
            loaded = safetensors.torch.load_file(shard)
            return {name: tensor.clone() for name, tensor in loaded.items() if not name.startswith("values")}

    def delete(self, number: int) -> None:
        if self.url is None:
            shutil.rmtree(self.folder / "checkpoints")
        else:
            super().delete(number)

    def close(self) -> None:
        self.snapshotter.close()
        self.link.close()
        self.agent.close()
        self.segment.close()

    def _listen(self) -> None:
        while message := self.agent.next_message():
            assert "failed" not in message, message
            self.agent.end_attempt(message["plan_id"], message["plan_id"])
            self.durable_at_s = message["at_s"]


class TorchSave(Peer):
    name = "torch.save"

    def begin(self, number: int) -> None:
        if self.url:
            with fsspec.open(f"{self.url}/{number}/state.pt", "wb", **self.place.options) as file:
                torch.save(self.state_dict(), file)
        else:
            self.save_locally(number)
        self.durable_at_s = time.monotonic()

    def save_locally(self, number: int) -> None:
        self.path(number).mkdir()
        with open(self.path(number) / "state.pt", "wb") as file:
            torch.save(self.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, number: int) -> dict[str, torch.Tensor]:
        with self.fetched(number) as folder:
            loaded = torch.load(folder / "state.pt", weights_only=True)
            return from_state_dicts(self.model, loaded["model"], loaded["optimizer"])


class RayUpload(TorchSave):
    """What ray.train.report does with a checkpoint in its asynchronous mode: a folder that a thread uploads."""

    name = "torch.save, upload as Ray Train's ASYNC report"

    def begin(self, number: int) -> None:
        self.save_locally(number)
        threading.Thread(target=self._upload, args=(number,), daemon=True).start()

    def _upload(self, number: int) -> None:
        if self.url is None:
            target = self.folder / f"{number}.reported"
            target.mkdir()
            pyarrow.fs.copy_files(str(self.path(number)), str(target))
            with open(target / "state.pt", "rb") as file:
                os.fsync(file.fileno())
        else:
            options = self.place.options
            filesystem = pyarrow.fs.S3FileSystem(
                access_key=options["key"],
                secret_key=options["secret"],
                endpoint_override=options["endpoint_url"].removeprefix("http://"),
                scheme="http",
                region="us-east-1",
            )
            pyarrow.fs.copy_files(
                str(self.path(number)),
                f"{self.url}/{number}".removeprefix("s3://"),
                destination_filesystem=filesystem,
            )
            shutil.rmtree(self.path(number))
        self.durable_at_s = time.monotonic()

    def load(self, number: int) -> dict[str, torch.Tensor]:
        if self.url is None:
            shutil.rmtree(self.path(number))
            os.rename(self.folder / f"{number}.reported", self.path(number))
        return super().load(number)


class DcpSave(Peer):
    name = "DCP save"

    def begin(self, number: int) -> None:
        dcp.save(self.state_dict(), no_dist=True, **self.target(number))
        self.durable_at_s = time.monotonic()

    def target(self, number: int) -> dict[str, Any]:
        if self.url is None:
            return {"checkpoint_id": self.path(number)}
        return {"storage_writer": FsspecWriter(f"{self.url}/{number}", **self.place.options)}

    def load(self, number: int) -> dict[str, torch.Tensor]:
        live = self.state_dict()
        fields = {
            index: {key: torch.zeros_like(value) for key, value in values.items()}
            for index, values in live["optimizer"]["state"].items()
        }
        into = {
            "model": {key: torch.zeros_like(value) for key, value in live["model"].items()},
            "optimizer": {"state": fields},
        }
        source: dict[str, Any] = {"checkpoint_id": self.path(number)}
        if self.url is not None:
            source = {"storage_reader": FsspecReader(f"{self.url}/{number}", **self.place.options)}
        dcp.load(into, no_dist=True, **source)
        return from_state_dicts(self.model, into["model"], into["optimizer"])


class DcpThread(DcpSave):
    name = "DCP async_save, thread"

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.options: dict = {}

    def begin(self, number: int) -> None:
        response = dcp.async_save(self.state_dict(), no_dist=True, **self.target(number), **self.options)
        self._watch(response)

    def _watch(self, future) -> None:
        def stamp(done) -> None:
            done.result()
            self.durable_at_s = time.monotonic()

        future.add_done_callback(stamp)


class DcpAsyncStaging(DcpThread):
    name = "DCP async_save, async staging"

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self._stager = DefaultStager(StagingOptions(False, False, True, False))
        self.options = {"async_stager": self._stager}

    def _watch(self, future) -> None:
        self._staged = future.staging_completion
        super()._watch(future.upload_completion)

    def before_update(self) -> None:
        self._staged.result()

    def close(self) -> None:
        self._stager.close()


class DcpProcess(DcpThread):
    name = "DCP async_save, process"

    def __init__(self, *args) -> None:
        super().__init__(*args)
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=f"file://{self.folder}/group", rank=0, world_size=1)

    def begin(self, number: int) -> None:
        self._watch(
            dcp.async_save(
                self.state_dict(),
                **self.target(number),
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
        )

    def close(self) -> None:
        dist.destroy_process_group()


class TorchSnapshot(Peer):
    name = "torchsnapshot async_take"
    is_local_only = True

    def __init__(self, *args) -> None:
        super().__init__(*args)
        import torchsnapshot

        self._library = torchsnapshot

    def begin(self, number: int) -> None:
        app_state = {"model": self.model, "optimizer": self.optimizer}
        pending = self._library.Snapshot.async_take(str(self.path(number)), app_state)
        threading.Thread(target=self._wait, args=(pending, number), daemon=True).start()

    def _wait(self, pending, number: int) -> None:
        pending.wait()
        for path in self.path(number).rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        self.durable_at_s = time.monotonic()

    def load(self, number: int) -> dict[str, torch.Tensor]:
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        for tensor in tensors_of(model, optimizer).values():
            tensor.zero_()
        app_state = {"model": model, "optimizer": optimizer}
        self._library.Snapshot(str(self.path(number))).restore(app_state)
        return tensors_of(model, optimizer)


def all_peers() -> list[type[Peer]]:
    """Return every peer that is installed, ours first."""
    peers: list[type[Peer]] = [
        *(Raycheck, DcpAsyncStaging, DcpThread, DcpProcess, DcpSave),
        *(RayUpload, TorchSave),
    ]
    try:
        import torchsnapshot  # noqa: F401
    except ImportError:
        return peers
    return [*peers, TorchSnapshot]
