"""Taking snapshots: copying one rank's part of the state into its arena.

What only a registered optimizer changes is copied by a thread while the next
forward and backward run; the optimizer's pre-step hook waits for it.
Everything else is copied before `begin` returns. The verdict on a snapshot is
given by the training thread alone, at the first hook or step after the copy
has ended: no version has moved and, for each tensor, 64 bytes are the same
live and copied. The hook is the guard; these checks are the second line, for
updates that bypass it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import crc32c
import torch

from raycheck.core.layout import Chunk, ShardImage, shard_image
from raycheck.core.page import Plan
from raycheck.core.plan import TensorSpec, deal
from raycheck.errors import StateError
from raycheck.state.codec import Codec
from raycheck.state.rng import capture_rng
from raycheck.state.segment import Segment
from raycheck.state.tree import Capture, StateTree, take_tensors

logger = logging.getLogger("raycheck")

VALUES = "values"
"""The entry that holds a rank's plain values, as JSON padded with spaces."""

_CANARY_BYTES = 64
_COPY_PIECE_BYTES = 16 << 20
_NUM_SAMPLES = 16
_MIN_VALUES_BYTES = 4096

_libc = ctypes.CDLL(None)
_libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memcpy.restype = ctypes.c_void_p


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot that passed its verdict: the arena holds the shard."""

    plan: Plan
    stall_s: float
    num_bytes: int
    replica_digest: str


@dataclasses.dataclass(frozen=True, slots=True)
class Discarded:
    """A snapshot that must not be used."""

    plan: Plan
    reason: str


@dataclasses.dataclass(slots=True)
class _Copy:
    """One chunk's way into the arena."""

    name: str
    source: torch.Tensor
    """An alias of the live memory, rows of the chunk only."""

    whole: torch.Tensor
    """An alias of the live tensor, for its version."""

    version: int
    begin: int
    num_bytes: int

    @property
    def is_flat(self) -> bool:
        return self.source.device.type == "cpu" and self.source.is_contiguous()


class _Pending:
    """A snapshot between `begin` and its verdict."""

    def __init__(
        self, plan: Plan, deferred: list[_Copy], samples: list[torch.Tensor], stall_s: float
    ) -> None:
        self.plan = plan
        self.deferred = deferred
        self.samples = samples
        self.stall_s = stall_s
        self.copied = threading.Event()
        self.error: BaseException | None = None
        self.replica_digest = ""
        self.hook_has_fired = False


class Snapshotter:
    """Takes snapshots of one rank. Used by the training thread alone.

    Args:
        tree: The live state.
        segment: Where the shard goes.
        rank: This rank.
        world_size: Ranks among which shared tensors are dealt.
        codec: For plain values.
        overlap: Whether to copy while the next forward and backward run.
        on_layout: Called with a new image before the first snapshot that uses it.
    """

    def __init__(
        self,
        tree: StateTree,
        segment: Segment,
        *,
        rank: int,
        world_size: int,
        codec: Codec,
        overlap: bool,
        on_layout: Callable[[ShardImage], None],
    ) -> None:
        self._tree = tree
        self._segment = segment
        self._rank = rank
        self._world_size = world_size
        self._codec = codec
        self._on_layout = on_layout
        self._keeps_per_rank = False
        self._signature: tuple[Any, ...] | None = None
        self._image: ShardImage | None = None
        self._chunks: list[Chunk] = []
        self._values_bytes = 0
        self._is_first_of_layout = True
        self._eager_names: set[str] = set()
        self._pending: _Pending | None = None
        self._jobs: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._overlap = overlap
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_optimizer_step)
            for optimizer in (tree.optimizers if overlap else ())
        ]
        self._finished: list[Snapshot | Discarded] = []
        self._waited_s = 0.0
        self._thread = threading.Thread(target=self._copy_loop, name="raycheck-copy", daemon=True)
        self._thread.start()

    def keep_per_rank(self) -> None:
        """From the next snapshot on, store shared tensors of every rank: they differ."""
        self._keeps_per_rank = True

    def check(self) -> None:
        """Try everything that can be tried without copying.

        Raises:
            StateError: If something in the state cannot be saved; names its path.
        """
        capture = self._tree.capture()
        self._take_values(capture)
        for name, tensor in (*capture.shared.items(), *capture.own.items()):
            _check_storable(name, tensor)

    @property
    def is_pending(self) -> bool:
        """Whether a snapshot awaits its verdict."""
        return self._pending is not None

    def begin(self, plan: Plan) -> float:
        """Start the snapshot for ``plan``. The caller is at its step boundary.

        Blocks for the copy of what cannot wait. An earlier snapshot must have
        been settled.

        Returns:
            Seconds that it blocked.

        Raises:
            StateError: If something in the state cannot be saved.
            OSError: If the memory cannot be had.
        """
        assert self._pending is None, "the snapshot before was not settled"
        started_s = time.perf_counter()
        capture = self._tree.capture()
        values = self._take_values(capture)
        self._lay_out(capture, len(values))
        assert self._image is not None
        eager, deferred = self._copies(capture, plan)
        self._write_values(values)
        for copy in eager:
            self._copy(copy)
        samples = [] if self._keeps_per_rank else self._samples(capture, plan)
        pending = _Pending(plan, deferred, samples, 0.0)
        self._pending = pending
        self._is_first_of_layout = False
        if deferred or samples:
            self._jobs.put(pending)
            if not self._overlap:
                pending.copied.wait()
        else:
            pending.copied.set()
        pending.stall_s = time.perf_counter() - started_s
        return pending.stall_s

    def settle(self, *, block: bool) -> Snapshot | Discarded | None:
        """Return the verdict on the snapshot begun before, once.

        Args:
            block: Wait for the copy to end, for as long as it takes.

        Returns:
            None while it is still being copied, or if there is none.
        """
        if self._finished:
            return self._finished.pop(0)
        pending = self._pending
        if pending is None or not (block or pending.copied.is_set()):
            return None
        pending.copied.wait()
        self._pending = None
        return self._judge(pending)

    def take_waited_s(self) -> float:
        """Return the seconds waited in hooks since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def close(self) -> None:
        """Remove the hooks and stop the copy thread. A pending snapshot is dropped."""
        for hook in self._hooks:
            hook.remove()
        self._jobs.put(None)
        self._thread.join()
        self._pending = None

    def _before_optimizer_step(self, *_: Any) -> None:
        if self._pending is None:
            return
        self._pending.hook_has_fired = True
        started_s = time.perf_counter()
        self._pending.copied.wait()
        waited_s = time.perf_counter() - started_s
        self._pending.stall_s += waited_s
        self._waited_s += waited_s
        outcome = self.settle(block=True)
        if outcome is not None:
            self._finished.append(outcome)

    def _take_values(self, capture: Capture) -> bytes:
        values = {**capture.values, "rng": capture_rng()}
        on_tensor = take_tensors(capture)
        coded = {name: self._codec.encode(value, name, on_tensor) for name, value in values.items()}
        return self._codec.to_bytes(coded)

    def _lay_out(self, capture: Capture, values_bytes: int) -> None:
        """Make a new image if a name, shape or dtype has changed."""
        for name, tensor in (*capture.shared.items(), *capture.own.items()):
            _check_storable(name, tensor)
        signature = (
            self._keeps_per_rank,
            tuple((n, t.dtype, t.shape) for n, t in capture.shared.items()),
            tuple((n, t.dtype, t.shape) for n, t in capture.own.items()),
        )
        if signature == self._signature and values_bytes <= self._values_bytes:
            return
        if values_bytes > self._values_bytes:
            # Room to grow, so that a longer list does not make a layout each time.
            self._values_bytes = max(_MIN_VALUES_BYTES, 1 << (values_bytes * 9 // 8).bit_length())
        shared = [] if self._keeps_per_rank else [_spec(n, t) for n, t in capture.shared.items()]
        own = {**capture.shared, **capture.own} if self._keeps_per_rank else capture.own
        chunks = list(deal(shared, self._world_size)[self._rank])
        for name, tensor in own.items():
            rows = tensor.shape[0] if tensor.dim() else 1
            chunks.append(dataclasses.replace(_spec(name, tensor).rows(0, rows), owner=self._rank))
        size = (self._values_bytes,)
        chunks.append(Chunk(VALUES, "uint8", 1, size, (0,), size, self._rank))
        image = shard_image(chunks, rank=self._rank)
        self._segment.ensure(image.num_bytes)
        self._segment.arena[: len(image.header)] = image.header
        self._on_layout(image)
        self._signature, self._image, self._chunks = signature, image, chunks
        self._is_first_of_layout = True

    def _copies(self, capture: Capture, plan: Plan) -> tuple[list[_Copy], list[_Copy]]:
        """Return the copies to make now, and those that may wait for the optimizer."""
        assert self._image is not None
        eager: list[_Copy] = []
        deferred: list[_Copy] = []
        for chunk, entry in zip(self._chunks, self._image.entries, strict=True):
            if chunk.name == VALUES:
                continue
            live = capture.shared[chunk.name] if chunk.name in capture.shared else capture.own[chunk.name]
            # An alias taken at the boundary survives ``.data =``.
            whole = live.detach()
            source = whole
            if chunk.shape != tuple(whole.shape):
                source = whole[chunk.offset[0] : chunk.offset[0] + chunk.shape[0]]
            copy = _Copy(chunk.name, source, whole, live._version, entry.begin, entry.num_bytes)
            may_wait = (
                chunk.name in capture.deferrable and chunk.name not in self._eager_names and copy.is_flat
            )
            (deferred if may_wait and self._overlap else eager).append(copy)
        return eager, deferred

    def _write_values(self, values: bytes) -> None:
        assert self._image is not None
        entry = self._image.entries[-1]
        self._segment.arena[entry.begin : entry.begin + entry.num_bytes] = values.ljust(entry.num_bytes)

    def _samples(self, capture: Capture, plan: Plan) -> list[torch.Tensor]:
        """Return the elements whose digest all ranks must agree on.

        All of the shared state at a layout's first snapshot, then a rotating
        sixteenth, the same one on every rank.
        """
        tensors = [tensor.detach() for tensor in capture.shared.values()]
        if self._is_first_of_layout:
            return tensors
        total = sum(tensor.numel() for tensor in tensors)
        sample = plan.id % _NUM_SAMPLES
        low, high = total * sample // _NUM_SAMPLES, total * (sample + 1) // _NUM_SAMPLES
        picked, begin = [], 0
        for tensor in tensors:
            first, end = max(low - begin, 0), min(high - begin, tensor.numel())
            if first < end:
                picked.append(tensor.reshape(-1)[first:end])
            begin += tensor.numel()
        return picked

    def _copy_loop(self) -> None:
        while (pending := self._jobs.get()) is not None:
            try:
                for copy in pending.deferred:
                    self._copy(copy)
                pending.replica_digest = _digest(pending.samples)
            except BaseException as error:  # noqa: BLE001  the training thread must not wait forever
                pending.error = error
            finally:
                pending.samples = []
                pending.copied.set()

    def _copy(self, copy: _Copy) -> None:
        if copy.num_bytes == 0:
            return
        if copy.is_flat:
            source, target = copy.source.data_ptr(), self._segment.address + copy.begin
            for at in range(0, copy.num_bytes, _COPY_PIECE_BYTES):
                # ctypes gives up the interpreter lock for the call.
                _libc.memcpy(target + at, source + at, min(_COPY_PIECE_BYTES, copy.num_bytes - at))
            return
        self._arena_tensor(copy).copy_(copy.source)

    def _arena_tensor(self, copy: _Copy) -> torch.Tensor:
        window = self._segment.arena[copy.begin : copy.begin + copy.num_bytes]
        return torch.frombuffer(window, dtype=copy.source.dtype).view(copy.source.shape)

    def _judge(self, pending: _Pending) -> Snapshot | Discarded:
        if pending.error is not None:
            return Discarded(pending.plan, f"the copy failed: {pending.error!r}")
        torn = [copy.name for copy in pending.deferred if not self._is_intact(copy)]
        if not torn:
            assert self._image is not None
            return Snapshot(pending.plan, pending.stall_s, self._image.num_bytes, pending.replica_digest)
        if pending.hook_has_fired:
            self._eager_names.update(torn)
            remedy = "it is copied before step() returns from now on"
        else:
            # Whatever updates this model does not pass through the optimizer's hook.
            self._overlap = False
            remedy = "overlap is off from now on"
        logger.warning(
            "rank %d: %s was changed outside of optimizer.step() while its snapshot for step %d was "
            "being copied; the snapshot is dropped, and %s",
            self._rank,
            torn[0] if len(torn) == 1 else f"{torn[0]} and {len(torn) - 1} more",
            pending.plan.step,
            remedy,
        )
        return Discarded(pending.plan, f"{torn[0]} changed while it was copied")

    def _is_intact(self, copy: _Copy) -> bool:
        if copy.whole._version != copy.version:
            return False
        if not copy.is_flat:
            return True
        length = min(_CANARY_BYTES, copy.num_bytes)
        at = (copy.num_bytes - length) // 2
        live = ctypes.string_at(copy.source.data_ptr() + at, length)
        return live == ctypes.string_at(self._segment.address + copy.begin + at, length)


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, dtype, tensor.element_size(), tuple(tensor.shape))


def _check_storable(name: str, tensor: torch.Tensor) -> None:
    kind = "meta" if tensor.is_meta else "sparse" if tensor.layout != torch.strided else None
    if tensor.is_quantized:
        kind = "quantized"
    if kind is not None:
        raise StateError(
            f"{name} is a {kind} tensor, which cannot be saved; leave it out of the state", key=name
        )


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    crc = 0
    for tensor in tensors:
        flat = tensor.cpu().contiguous().reshape(-1)
        num_bytes = flat.numel() * flat.element_size()
        if num_bytes:
            # No copy: the checksum reads the tensor's own memory, without the interpreter lock.
            crc = crc32c.crc32c((ctypes.c_char * num_bytes).from_address(flat.data_ptr()), crc)
    return f"{crc:08x}"
