"""Taking snapshots: copying one rank's part of the state into its arena.

What only a registered optimizer changes is copied by a thread while the next
forward and backward run; the optimizer's pre-step hook waits for it.
Everything else, and what is small, is copied before `begin` returns. The verdict on a snapshot is
given by the training thread alone, at the first hook or step after the copy
has ended: no version has moved and no canary has changed. The hook is the
guard; these checks are the second line, for updates that bypass it. A change
of a few elements that neither an optimizer's step nor a version tells of can
pass them: code that does that needs ``overlap=False``.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raycheck.core.layout import ShardImage
from raycheck.core.page import Plan
from raycheck.errors import StateError
from raycheck.state.codec import Codec
from raycheck.state.copying import Copying
from raycheck.state.device import Copier, Transfer
from raycheck.state.guard import Guard
from raycheck.state.live import Acquaintance, Live
from raycheck.state.parts import Capture, take_tensors
from raycheck.state.placement import Placement
from raycheck.state.replica import Sample, digest_of, sample_of, take_device_pieces
from raycheck.state.rng import capture_rng
from raycheck.state.segment import Segment
from raycheck.state.sharded import Shards
from raycheck.state.spans import Scratch
from raycheck.state.tree import StateTree

logger = logging.getLogger("raycheck")

_MIN_VALUES_BYTES = 16 << 10


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
class _Pending:
    """A snapshot between `begin` and its verdict, with which it lets go of the memory that it copies."""

    plan: Plan
    copying: Copying
    live: Live
    guard: Guard
    """Of what may wait, beside the optimizer's hook."""

    sample: Sample | None
    transfers: list[Transfer]
    """What the device does; the hook holds the optimizer's update back for it."""

    torn: list[int] = dataclasses.field(default_factory=list)
    """Positions among what is guarded whose copies differ from what was there at the boundary."""

    copied: threading.Event = dataclasses.field(default_factory=threading.Event)
    """The host's part is in the arena. What a device copies may be under way."""

    torn_before_update: list[str] | None = None
    """What the hook found, where it let the update follow the device's copies without waiting for them."""

    error: BaseException | None = None
    replica_digest: str = ""
    stall_s: float = 0.0
    hook_has_fired: bool = False


class Snapshotter:
    """Takes snapshots of one rank. Used by the training thread alone.

    Args:
        tree: The live state.
        segment: Where the shard goes.
        more_segments: Where others go, while that one is being stored.
        rank: This rank.
        world_size: Ranks among which shared tensors are dealt.
        codec: For plain values.
        overlap: Whether to copy while the next forward and backward run.
        on_layout: Called with a new image before the first snapshot that uses it.
        on_settled: Called with the verdict on a snapshot when an optimizer's
            hook gives it. None: `settle` returns that one too.
        on_copied: Called by the copy thread with the plan and the bytes of the
            shard once the arena holds it, before the verdict: it may be
            stored, and must not count yet. Must not raise.
        budget_bytes: The most shared memory that the segments may take together;
            None: what they were made with.
        copier: Copies what is in device memory. None: there is none.
    """

    def __init__(
        self,
        tree: StateTree,
        segment: Segment,
        *,
        more_segments: Sequence[Segment] = (),
        rank: int,
        world_size: int,
        codec: Codec,
        overlap: bool,
        on_layout: Callable[[ShardImage], None],
        on_settled: Callable[[Snapshot | Discarded], None] | None = None,
        on_copied: Callable[[Plan, int], None] | None = None,
        budget_bytes: int | None = None,
        copier: Copier | None = None,
    ) -> None:
        self._tree = tree
        self._segments = [segment, *more_segments]
        self._segment = segment
        """That of the present snapshot; it changes only while no copy is under way."""

        self._laid_out: dict[Segment, ShardImage] = {}
        """What each arena has room for, and the header of."""

        if budget_bytes is not None:
            for each in self._segments:
                each.budget_bytes = budget_bytes // len(self._segments)
        self._rank = rank
        self._world_size = world_size
        self._shards = Shards(world_size)
        self._codec = codec
        self._on_layout = on_layout
        self._keeps_per_rank = False
        self._spared: frozenset[int] = frozenset()
        self._placement: Placement | None = None
        self._known: Acquaintance | None = None
        self._copying: Copying | None = None
        self._eager_names: set[str] = set()
        self._waiting: tuple[list[str], list[str], npt.NDArray[np.bool_]] | None = None
        """Which names may wait: what it was made from, and the answer."""

        self._pending: _Pending | None = None
        self._finished: list[Snapshot | Discarded] = []
        self._on_settled = on_settled or self._finished.append
        self._on_copied = on_copied
        self._waited_s = 0.0
        self._overlap = overlap
        self._copier = copier
        self._arena_lock = threading.Lock()
        """Held while the arena is replaced, and while its pages are made and pinned."""

        # One each, since both threads use theirs at the same time.
        self._scratch, self._copy_scratch = Scratch(), Scratch()
        # A compiled step breaks its graph here: traced, the hook would run once.
        hook: Callable[..., Any] = torch.compiler.disable(self._before_optimizer_step)  # type: ignore[no-untyped-call]
        self._hooks = [
            optimizer.register_step_pre_hook(hook) for optimizer in (tree.optimizers if overlap else ())
        ]
        self._num_steps_seen = 0
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._copy_loop, name="raycheck-copy", daemon=True)
        self._thread.start()

    def keep_per_rank(self) -> None:
        """From the next snapshot on, store shared tensors of every rank: they differ."""
        self._keeps_per_rank = True

    def check(self) -> None:
        """Try everything that can be tried without copying.

        State that an optimizer makes at its first step is not there yet, so
        the budget is checked for what there is.

        Raises:
            StateError: If something in the state cannot be saved, names its
                path; or if it exceeds the budget.
        """
        capture = self._tree.capture()
        values = self._take_values(capture)
        live = Live.of(capture, self._shards)
        self._segment.check(self._place(live, Acquaintance(live), len(values)).image.num_bytes)

    @property
    def is_pending(self) -> bool:
        """Whether a snapshot awaits its verdict."""
        return self._pending is not None

    def begin(self, plan: Plan, *, slot: int = 0, spared: frozenset[int] = frozenset()) -> float:
        """Start the snapshot for ``plan``. The caller is at its step boundary.

        It goes into the arena of that slot, which nobody may read any more.
        Ranks that are ``spared`` are dealt nothing of what all hold alike; every
        rank must be told the same. Blocks for the copy of what cannot wait, and about a microsecond per
        tensor. An earlier snapshot must have been settled.

        Returns:
            Seconds that it blocked.

        Raises:
            StateError: If something in the state cannot be saved, or exceeds the budget.
            OSError: If the memory cannot be had.
        """
        assert self._pending is None, "the snapshot before was not settled"
        started_s = time.perf_counter()
        self._segment, self._spared = self._segments[slot], spared
        capture = self._tree.capture()
        values = self._take_values(capture)
        live = Live.of(capture, self._shards)
        placement = self._lay_out(live, len(values))
        self._write_values(placement, values)
        pending = self._copy_what_cannot_wait(placement, live, capture, plan)
        self._pending = pending
        self._jobs.put(functools.partial(self._copy_deferred, pending))
        if not self._overlap:
            self._await_copies(pending)
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
        if pending is None or not (block or _has_arrived(pending)):
            return None
        self._await_copies(pending)
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
        self._hooks = []
        self._jobs.put(None)
        self._thread.join()
        if self._pending is not None:
            # The arena is about to go, and the device may be writing to it.
            self._await_copies(self._pending)
        self._pending = None
        if self._copier is not None:
            for segment in self._segments:
                self._copier.unpin(segment.address)
        self._scratch.close()
        self._copy_scratch.close()

    def _before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        pending, closure = self._pending, _closure_in(optimizer, args, kwargs)
        if pending is None or closure is None:
            self._guard_update()
            return None

        def then_guard() -> Any:
            loss = closure()
            # Where it is called again, as by LBFGS, the update is under way.
            if self._pending is pending:
                self._guard_update()
            return loss

        return args[:1], {**kwargs, "closure": then_guard}

    def _guard_update(self) -> None:
        pending = self._pending
        started_s = time.perf_counter()
        if pending is None:
            self._num_steps_seen += 1
            if self._num_steps_seen == 2 * len(self._hooks) and self._placement is None:
                self._prepare()
                self._waited_s += time.perf_counter() - started_s
            return
        pending.hook_has_fired = True
        pending.copied.wait()
        outcome = self._settle_before_update(pending)
        waited_s = time.perf_counter() - started_s
        self._waited_s += waited_s
        if isinstance(outcome, Snapshot):
            outcome = dataclasses.replace(outcome, stall_s=outcome.stall_s + waited_s)
        if outcome is not None:
            self._on_settled(outcome)

    def _settle_before_update(self, pending: _Pending) -> Snapshot | Discarded | None:
        """Give the verdict, or leave it until the device has copied, and let the update follow that."""
        if _has_arrived(pending):
            return self.settle(block=True)
        for transfer in pending.transfers:
            transfer.hold_back()
        if pending.torn_before_update is None and pending.error is None:
            pending.torn_before_update = self._torn_names(pending)
        return None

    @staticmethod
    def _await_copies(pending: _Pending) -> None:
        pending.copied.wait()
        for transfer in pending.transfers:
            transfer.wait()

    def _prepare(self) -> None:
        """Make the arena while training goes on, so that the first snapshot is like any other.

        At the second step of the optimizers their state is there.
        """
        capture = self._tree.capture()
        try:
            values = self._take_values(capture)
            placement = self._lay_out(Live.of(capture, self._shards), len(values))
            for segment in self._segments:
                self._make_room(segment, placement.image)
        except (StateError, OSError):
            return  # the snapshot will say so
        self._jobs.put(self._make_pages)

    def _make_pages(self) -> None:
        """Have the arenas' memory made, and pinned where a device copies into it. In the copy thread."""
        for segment in self._segments:
            with self._arena_lock:
                if segment.touch() and self._copier is not None:
                    self._copier.pin(segment.address, segment.arena_bytes)

    def _take_values(self, capture: Capture) -> bytes:
        values = {**capture.values, "rng": capture_rng()}
        on_tensor = take_tensors(capture)
        coded = {name: self._codec.encode(value, name, on_tensor) for name, value in values.items()}
        return self._codec.to_bytes(coded)

    def _lay_out(self, live: Live, values_bytes: int) -> Placement:
        """Return the placement of ``live``, with room for it; a new one if anything has changed."""
        present, known = self._placement, self._known
        # Without overlap nobody would look again at what is only recognised.
        if (
            self._overlap
            and present is not None
            and known is not None
            and known.recognises(live)
            and self._has_room(present, values_bytes)
        ):
            self._make_room(self._segment, present.image)
            return present
        known = Acquaintance(live, known)
        placement = self._place(live, known, values_bytes)
        self._make_room(self._segment, placement.image)
        if placement is not present:
            self._on_layout(placement.image)
        self._placement, self._known = placement, known
        return placement

    def _make_room(self, segment: Segment, image: ShardImage) -> None:
        """Have an arena large enough, and begin it with the header."""
        if self._laid_out.get(segment) is image:
            return
        with self._arena_lock:
            if self._copier is not None and image.num_bytes > segment.arena_bytes:
                self._copier.unpin(segment.address)
            segment.ensure(image.num_bytes)
        segment.arena[: len(image.header)] = image.header
        self._laid_out[segment] = image

    def _place(self, live: Live, known: Acquaintance, values_bytes: int) -> Placement:
        present = self._placement
        if present is not None:
            if self._has_room(present, values_bytes) and present.fits(known):
                return present
            values_bytes = max(values_bytes, present.values_bytes)
        return Placement(
            live,
            known,
            rank=self._rank,
            world_size=self._world_size,
            keeps_per_rank=self._keeps_per_rank,
            spared=self._spared,
            values_bytes=_with_room(values_bytes),
        )

    def _has_room(self, placement: Placement, values_bytes: int) -> bool:
        return placement.has_room(values_bytes, keeps_per_rank=self._keeps_per_rank, spared=self._spared)

    def _write_values(self, placement: Placement, values: bytes) -> None:
        begin, num_bytes = placement.values_begin, placement.values_bytes
        self._segment.arena[begin : begin + num_bytes] = values.ljust(num_bytes)

    def _which_may_wait(self, live: Live, capture: Capture) -> npt.NDArray[np.bool_]:
        if not self._overlap:
            return np.zeros(len(live.names), np.bool_)
        # Names are joined once, so that comparing equal lists of them looks at no text.
        if self._waiting is None or self._waiting[:2] != (capture.deferrable, live.names):
            waiting = set(capture.deferrable) - self._eager_names
            may_wait = np.fromiter(map(waiting.__contains__, live.names), np.bool_, len(live.names))
            self._waiting = capture.deferrable, live.names, may_wait
        return self._waiting[2]

    def _copy_what_cannot_wait(
        self, placement: Placement, live: Live, capture: Capture, plan: Plan
    ) -> _Pending:
        assert self._known is not None
        may_wait = self._which_may_wait(live, capture)
        copying = self._copying
        if copying is None or not copying.is_for(placement, self._known, may_wait):
            copying = self._copying = Copying(placement, self._known, may_wait, self._on_device(live))
        copying.copy_at_once(live.tensors, self._segment)
        is_compared = self._world_size > 1 and not self._keeps_per_rank
        sample = sample_of(live, self._known, plan.id) if is_compared else None
        flat = copying.deferred.flat
        return _Pending(
            plan=plan,
            live=live,
            copying=copying,
            guard=Guard(
                copying.tensors(live.tensors, copying.guarded),
                copying.sources[flat],
                placement.num_bytes[flat],
                plan_id=plan.id,
                scratch=self._scratch,
            ),
            sample=sample,
            transfers=self._launch(copying, live, sample),
        )

    def _on_device(self, live: Live) -> npt.NDArray[np.bool_]:
        if self._copier is None:
            return np.zeros(len(live.tensors), np.bool_)
        return np.fromiter(map(self._copier.owns, live.tensors), np.bool_, len(live.tensors))

    def _launch(self, copying: Copying, live: Live, sample: Sample | None) -> list[Transfer]:
        """Have the device copy its tensors; what must not wait holds back what is launched next."""
        if self._copier is None:
            return []
        transfers = []
        # Fingerprints are read at the speed of the device's own memory: not worth a guard.
        owned = [] if sample is None else take_device_pieces(sample, self._copier.owns)
        at_once = copying.device_copies(live.tensors, copying.at_once, self._segment)
        deferred = copying.device_copies(live.tensors, copying.deferred, self._segment)
        if at_once or owned:
            transfers.append(self._copier.launch(at_once, owned))
            transfers[0].hold_back()
        if deferred:
            transfers.append(self._copier.launch(deferred))
        return transfers

    def _copy_loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                # What a snapshot needs is tried again for it. Without this thread it would wait for ever.
                logger.exception("rank %d: the copy thread goes on after an error", self._rank)
            # It holds tensors, and the next one may be long in coming.
            del job

    def _copy_deferred(self, pending: _Pending) -> None:
        try:
            num_bytes = self._copy_what_could_wait(pending)
        except BaseException as error:  # noqa: BLE001  the training thread must not wait forever
            pending.error = error
        finally:
            pending.sample = None
            pending.copied.set()
        if pending.error is None and not pending.torn and not pending.transfers and self._on_copied:
            self._on_copied(pending.plan, num_bytes)

    def _copy_what_could_wait(self, pending: _Pending) -> int:
        """Copy, and check what need not cost the training thread time; return the shard's bytes."""
        copying, placement = pending.copying, pending.copying.placement
        self._make_pages()
        _check_is_there([self._name_of(pending, position) for position in pending.guard.missing()])
        copying.copy_deferred(self._segment)
        # Nobody else writes to the arena.
        copies = placement.begin[copying.deferred.flat] + np.uint64(self._segment.address)
        pending.torn = pending.guard.differing(copies, self._copy_scratch)
        if pending.sample is not None:
            _check_is_there([pending.live.names[index] for index in pending.sample.missing()])
            pending.replica_digest = digest_of(pending.sample, self._copy_scratch)
        if not copying.known.holds_for(pending.live.tensors):
            # Seen by the next `begin`, which looks at everything afresh.
            self._known = None
            raise RuntimeError("a tensor got another shape or dtype in place")
        return placement.image.num_bytes

    def _judge(self, pending: _Pending) -> Snapshot | Discarded:
        if pending.error is not None:
            return Discarded(pending.plan, f"the copy failed: {pending.error!r}")
        # Once the update is under way, what the hook saw before it is what counts.
        torn = pending.torn_before_update
        if torn is None:
            torn = self._torn_names(pending)
        torn += [self._name_of(pending, position) for position in pending.torn]
        if not torn:
            stall_s, digest = pending.stall_s, pending.replica_digest
            for transfer in pending.transfers:
                stall_s += transfer.held_back_s()
                digest += transfer.fingerprints().hex()
            return Snapshot(pending.plan, stall_s, pending.copying.placement.image.num_bytes, digest)
        if pending.hook_has_fired:
            self._eager_names.update(torn)
            self._waiting = None
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

    def _torn_names(self, pending: _Pending) -> list[str]:
        return [self._name_of(pending, position) for position in pending.guard.changed(self._scratch)]

    @staticmethod
    def _name_of(pending: _Pending, position: int) -> str:
        copying = pending.copying
        return copying.placement.chunks[int(copying.guarded[position])].name


def _closure_in(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return the closure that ``step`` was given, if it comes before the update: forward and backward, then."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    # Torch's optimizers begin with it. Others may change parameters first, as sharpness-aware ones do.
    begins = type(optimizer).__module__.startswith("torch.optim.")
    return closure if begins and callable(closure) else None


def _check_is_there(missing: list[str]) -> None:
    if missing:
        raise RuntimeError(f"the memory of {missing[0]} was given up before it was read")


def _has_arrived(pending: _Pending) -> bool:
    return pending.copied.is_set() and all(transfer.is_done for transfer in pending.transfers)


def _with_room(values_bytes: int) -> int:
    """Return the room to reserve, so that a longer list does not make a layout each time."""
    return max(_MIN_VALUES_BYTES, 1 << (values_bytes - 1).bit_length())


__all__ = ["Discarded", "Snapshot", "Snapshotter"]
