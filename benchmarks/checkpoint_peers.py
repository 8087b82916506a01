"""Ways to save one and the same state, behind one interface."""

from __future__ import annotations

import copy
import os
import secrets
import shutil
import threading
import time
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_agent import AgentProcess
from checkpoint_state import from_state_dicts, tensors_of
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from raycheck.core.lineage import GenerationId
from raycheck.core.page import Plan
from raycheck.runtime.link import AgentLink
from raycheck.state.codec import Codec
from raycheck.state.segment import Segment
from raycheck.state.snapshot import Snapshot, Snapshotter
from raycheck.state.tree import StateTree


class Peer:
    """One way to save.

    Time that `begin`, `before_update` and `after_update` block is stall.
    """

    name = ""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.model, self.optimizer = model, optimizer
        self.folder = folder / type(self).__name__
        self.folder.mkdir(parents=True)
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
        shutil.rmtree(self.path(number))

    def path(self, number: int) -> Path:
        return self.folder / str(number)

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
        self.agent = AgentProcess(address, f"file://{self.folder}")
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
        )
        self.link = AgentLink(
            address=address,
            segment=self.segment,
            generation=GenerationId(1, "benchmark"),
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
        assert isinstance(outcome, Snapshot), outcome
        self.link.send(
            "staged",
            plan=list(outcome.plan),
            num_bytes=outcome.num_bytes,
            stall_s=outcome.stall_s,
            replica_digest=outcome.replica_digest,
            metrics={},
        )
        return self.snapshotter.take_waited_s()

    def load(self, number: int) -> dict[str, torch.Tensor]:
        (shard,) = self.folder.glob(f"checkpoints/step-*{number}-*/*.safetensors")
        loaded = safetensors.torch.load_file(shard)
        return {name: tensor for name, tensor in loaded.items() if not name.startswith("values")}

    def delete(self, number: int) -> None:
        shutil.rmtree(self.folder / "checkpoints")

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
        self.path(number).mkdir()
        with open(self.path(number) / "state.pt", "wb") as file:
            torch.save(self.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        self.durable_at_s = time.monotonic()

    def load(self, number: int) -> dict[str, torch.Tensor]:
        loaded = torch.load(self.path(number) / "state.pt", weights_only=True, mmap=True)
        return from_state_dicts(self.model, loaded["model"], loaded["optimizer"])


class DcpSave(Peer):
    name = "DCP save"

    def begin(self, number: int) -> None:
        dcp.save(self.state_dict(), checkpoint_id=self.path(number), no_dist=True)
        self.durable_at_s = time.monotonic()

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
        dcp.load(into, checkpoint_id=self.path(number), no_dist=True)
        return from_state_dicts(self.model, into["model"], into["optimizer"])


class DcpThread(DcpSave):
    name = "DCP async_save, thread"

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.options: dict = {}

    def begin(self, number: int) -> None:
        response = dcp.async_save(
            self.state_dict(), checkpoint_id=self.path(number), no_dist=True, **self.options
        )
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
                checkpoint_id=self.path(number),
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
        )

    def close(self) -> None:
        dist.destroy_process_group()


class TorchSnapshot(Peer):
    name = "torchsnapshot async_take"

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
    peers: list[type[Peer]] = [Raycheck, DcpAsyncStaging, DcpThread, DcpProcess, DcpSave, TorchSave]
    try:
        import torchsnapshot  # noqa: F401
    except ImportError:
        return peers
    return [*peers, TorchSnapshot]
