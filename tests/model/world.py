"""The commit and start sequences under every interleaving, without threads, clocks or a network.

What is real: `RunStore` with every storage call it makes, `CommitProtocol`,
`RestoreVote`, `lineage`, `to_delete`. What is modelled: the shells around
them, in the order in which the coordinator and the agents make their calls.

A call sequence is a `Task`: an ordinary function over a store that raises
`_Need` at each call it has no answer for. The world then decides what becomes
of that call (done, done and the reply lost, failed, failed now and done at any
later time, never done since its process died), notes the answer, and runs the
function again from its start. Messages wait in a bag and are taken from it in
any order, any number of times.

The oracle shares no code with what it judges: it walks the parents in the
records by itself and reads shards by itself.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from raycheck.core import layout, lineage, protocol
from raycheck.core import restore as voting
from raycheck.core.layout import Manifest, ShardInfo
from raycheck.core.lineage import CheckpointRef, GenerationId
from raycheck.core.retention import to_delete
from raycheck.errors import CorruptCheckpointError, ObjectNotFoundError, StorageError
from raycheck.store.backend import ObjectInfo
from raycheck.store.run import RunStore

NUM_RANKS = 2
LATENCY_S = 0.1


class _Names:
    """Stands in for the `secrets` of `raycheck.store.run`, whose names would differ from run to run."""

    next = ""

    def token_hex(self, _: int) -> str:
        return self.next


NAMES = _Names()


class _Need(BaseException):
    """A task needs the answer to a storage call. No handler of errors may catch it."""

    def __init__(self, call: tuple[str, str, bytes]) -> None:
        self.call = call


class Objects(dict[str, bytes]):
    """What is in the store: strongly consistent, as the probe makes sure of."""

    def answer(self, call: tuple[str, str, bytes]) -> Any:
        kind, key, data = call
        if kind == "put":
            self[key] = data
            return None
        if kind == "delete":
            self.pop(key, None)
            return None
        if kind == "children":
            return sorted({k[len(key) + 1 :].split("/")[0] for k in self if k.startswith(key + "/")})
        if kind == "keys":
            return [ObjectInfo(k, len(v)) for k, v in sorted(self.items()) if k.startswith(key + "/")]
        if key not in self:
            return ObjectNotFoundError(f"no {key}", key=key, operation=kind)
        return self[key] if kind == "get" else len(self[key])


class _TaskStore:
    """The store as a task sees it: earlier answers again, then `_Need`."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = iter(list(answers))

    def _ask(self, kind: str, key: str, data: bytes = b"") -> Any:
        for answer in self._answers:
            if isinstance(answer, StorageError):
                raise answer
            return answer
        raise _Need((kind, key, data))

    def put(self, key: str, data: bytes) -> None:
        self._ask("put", key, data)

    def get(self, key: str) -> bytes:
        return self._ask("get", key)

    def size_bytes(self, key: str) -> int:
        return self._ask("size", key)

    def list_children(self, prefix: str) -> list[str]:
        return self._ask("children", prefix)

    def list_keys(self, prefix: str) -> list[ObjectInfo]:
        return self._ask("keys", prefix)

    def delete(self, keys: Any) -> None:
        for key in keys:
            self._ask("delete", key)

    def sweep_uploads(self, older_than_s: float) -> list[str]:
        return []


@dataclasses.dataclass
class Task:
    """A sequence of storage calls of one process."""

    name: str
    owner: Any
    function: Callable[[RunStore], Any]
    done: Callable[[Any], None]
    """Takes what the function returned, or the `StorageError` that it raised."""

    call: tuple[str, str, bytes] | None = None
    answers: list[Any] = dataclasses.field(default_factory=list)

    def run(self) -> bool:
        """Go on as far as the answers reach; return whether the task has ended."""
        try:
            result = self.function(RunStore(_TaskStore(self.answers)))
        except _Need as need:
            self.call = need.call
            return False
        except StorageError as error:
            result = error
        self.call = None
        self.done(result)
        return True


def content(state: str, ref: CheckpointRef, rank: int) -> bytes:
    """Return a shard: what a rank had at that step, and for whom it was written."""
    return json.dumps([state, list(ref.generation), ref.step, rank]).encode()


def digest(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


class Rank:
    """A training process with its agent. Agents outlive a coordinator, not their generation."""

    def __init__(self, world: World, generation: Generation, rank: int) -> None:
        self.world, self.generation, self.rank = world, generation, rank
        self.step: int | None = None
        self.state = ""
        self.offered: CheckpointRef | bool | None = False
        self.verified: bytes | None = None
        self.reported: Any = None
        self.plan = (0, 0)
        self.seen_plan_id = 0
        self.uploads: dict[int, dict[str, Any]] = {}
        """By plan id."""

        self.arenas: list[bytes] = [b""] * world.max_in_flight
        self.unjudged: tuple[int, int, bool] | None = None
        self.is_alive = True

    def introduce(self) -> None:
        if self.step is None:
            self.tell("ask", self.rank)
        else:
            uploading = tuple(sorted(self.uploads))
            self.tell("here", self.rank, self.step, self.plan[0], uploading)
            self.tell("event", protocol.Joined(self.rank))

    def tell(self, *message: Any) -> None:
        self.world.send(self.generation, "coordinator", message)

    def take(self, message: tuple[Any, ...]) -> None:
        if not self.is_alive:
            return
        match message:
            case ("offer", ranks, ref) if self.rank in ranks and self.step is None:
                self._take_offer(ref)
            case ("proceed", ref) if (
                self.step is None and self.reported == ref and self.reported is not False
            ):
                self._load(ref)
            case ("plan", plan):
                self.plan = plan
            case ("ended", plan, is_committed):
                self._ended(plan, is_committed)
            case ("halt",):
                self.is_alive = False

    def _take_offer(self, ref: CheckpointRef | None) -> None:
        if self.offered == ref and self.offered is not False:
            if self.reported is not False:
                self.tell("report", self.rank, ref, None)
            return
        self.offered, self.reported, self.verified = ref, False, None
        if ref is None:
            self.reported = None
            self.tell("report", self.rank, None, None)
            return

        def read(run: RunStore) -> bytes:
            manifest = run.read_manifest(ref)
            shard = manifest.shards[self.rank]
            try:
                data = run.store.get(f"{layout.checkpoint_prefix(ref)}/{shard.name}")
            except ObjectNotFoundError as error:
                raise CorruptCheckpointError(str(error)) from error
            if len(data) != shard.num_bytes or digest(data) != shard.digest:
                raise CorruptCheckpointError("damaged")
            return data

        def guarded(run: RunStore) -> bytes | CorruptCheckpointError:
            try:
                return read(run)
            except CorruptCheckpointError as error:
                return error

        def done(result: Any) -> None:
            if self.offered != ref or self.step is not None:
                return
            if isinstance(result, StorageError):
                # It cannot be read at present: this start ends, and no older one is taken.
                self.world.end(self.generation)
            elif isinstance(result, CorruptCheckpointError):
                self.tell("report", self.rank, ref, str(result))
            else:
                self.verified, self.reported = result, ref
                self.tell("report", self.rank, ref, None)

        self.world.begin(Task(f"read {ref.step} by {self.rank}", self, guarded, done))

    def _load(self, ref: CheckpointRef | None) -> None:
        self.step, self.state = 0, "0"
        if ref is not None:
            state, generation, step, rank = json.loads(self.verified)
            assert (step, tuple(generation), rank) == (ref.step, ref.generation, self.rank), (
                "I1: another's bytes"
            )
            assert state == self.world.had[ref.generation, ref.step], "I1: not what the ranks had"
            self.step, self.state = step, state
        # A state of its own for each generation, so that mixing two is seen.
        self.generation.loaded.append((self.rank, ref))
        assert len({r for _, r in self.generation.loaded}) == 1, "I4: ranks restored different checkpoints"
        self.world.had[self.generation.id, self.step] = self.state
        self.tell("event", protocol.Joined(self.rank))

    def train(self) -> None:
        """Take one step, and a snapshot if one is planned for here."""
        assert self.step is not None
        self._judge()
        self.step += 1
        self.state = f"{zlib.crc32(self.state.encode()):x}.{self.generation.id}.{self.step}"
        self.world.had[self.generation.id, self.step] = self.state
        self.tell("event", protocol.Progress(self.step, 0.05))
        plan_id, step = self.plan
        if plan_id == self.seen_plan_id or step > self.step:
            return
        self.seen_plan_id = plan_id
        if step < self.step:
            self.tell("event", protocol.Missed(self.rank, plan_id))
            return
        self._stage(plan_id, step)

    def _stage(self, plan_id: int, step: int) -> None:
        slot = self._take_slot()
        job = self.uploads[plan_id] = {"slot": slot, "cancelled": False, "durable": False}
        ref = CheckpointRef(step, self.generation.id, plan_id)
        # The verdict on a copy comes with the next update, when it may be stored already; some are bad.
        is_torn = self.world.choose(8) == 7
        self.arenas[slot] = content("torn" if is_torn else self.state, ref, self.rank)
        key = f"{layout.checkpoint_prefix(ref)}/{layout.shard_name(self.rank, NUM_RANKS)}"
        self.unjudged = (plan_id, step, is_torn)
        if self.world.choose(2):
            self._judge()

        def done(result: Any) -> None:
            if isinstance(result, StorageError):
                self.tell("event", protocol.Failed(self.rank, plan_id, str(result)))
            elif job["cancelled"]:
                self.world.begin(Task("unstage", self, lambda run: run.store.delete([key]), lambda _: None))
            else:
                job["durable"] = True
                shard = ShardInfo(
                    self.rank, layout.shard_name(self.rank, NUM_RANKS), len(result), digest(result)
                )
                self.tell("event", protocol.Durable(plan_id, shard, 0.0, step))

        def store(run: RunStore) -> bytes:
            if len(self.arenas) > 1:
                # So that the arena is read at some later time, when it must still hold this snapshot.
                run.claims()
            data = job.setdefault("data", self.arenas[slot])
            run.store.put(key, data)
            return data

        self.world.begin(Task(f"upload {step} by {self.rank}", self, store, done))

    def _take_slot(self) -> int:
        """Return a free arena; where there is none, that of the oldest plan: nobody knows of it any more."""
        used = {job["slot"] for job in self.uploads.values()}
        free = [slot for slot in range(len(self.arenas)) if slot not in used]
        if free:
            return free[0]
        return self._forget(min(self.uploads))["slot"]

    def _forget(self, plan_id: int) -> dict[str, Any]:
        job = self.uploads.pop(plan_id)
        job["cancelled"] |= not job["durable"]
        return job

    def _judge(self) -> None:
        if self.unjudged is None:
            return
        plan_id, step, is_torn = self.unjudged
        self.unjudged = None
        if is_torn:
            self.tell("event", protocol.Failed(self.rank, plan_id, "changed while it was copied"))
        else:
            self.tell("event", protocol.Staged(self.rank, plan_id, 0.0, "", step))

    def _ended(self, plan: tuple[int, int], is_committed: bool) -> None:
        job = self.uploads.pop(plan[0], None)
        if job is not None and not is_committed:
            job["cancelled"] = True


class Coordinator:
    """One life of a generation's coordinator."""

    def __init__(self, world: World, generation: Generation, resume: int | str, keep_last: int) -> None:
        self.world, self.generation, self.resume, self.keep_last = world, generation, resume, keep_last
        self.vote: voting.RestoreVote | None = None
        self.commits: protocol.CommitProtocol | None = None
        self.tip: lineage.GenerationRecord | None = None
        self.committed: list[CheckpointRef] = []
        self.joined_early: set[int] = set()
        self.is_alive = True

    # Starting.

    def _find(self, run: RunStore, resume: int | str) -> Any:
        tip = lineage.tip(run.records())
        usable = [ref for ref in lineage.selectable(tip, run.attempts()) if run.is_committed(ref)]
        if isinstance(resume, int):
            # A step that exists, as a user would choose it.
            resume = usable[min(resume, len(usable) - 1)].step if usable else "auto"
        return tip, usable, lineage.candidates(resume, usable), isinstance(resume, int)

    def start(self) -> None:
        # Ids order two claims of one number, in either way.
        name = f"{self.world.choose(256):02x}{len(self.world.generations):02x}"

        def function(run: RunStore) -> Any:
            NAMES.next = name
            id_ = run.claim({"claimed_unix_s": 0.0})
            return id_, *self._find(run, self.resume)

        def done(result: Any) -> None:
            if isinstance(result, StorageError):
                self.world.end(self.generation)
                return
            id_, self.tip, usable, candidates, self.generation.is_rollback = result
            self.generation.id = id_
            self.generation.resumed = self.resume
            if self.generation.is_rollback:
                self.world.rollbacks.add(tuple(id_))
            self.committed = sorted(usable)
            self.vote = voting.RestoreVote(
                world_size=NUM_RANKS, candidates=candidates, is_exact=self.generation.is_rollback
            )
            self.generation.ranks = [Rank(self.world, self.generation, rank) for rank in range(NUM_RANKS)]
            for rank in self.generation.ranks:
                rank.introduce()

        self.world.begin(Task("start", self, function, done))

    def adopt(self) -> None:
        """Take over from one that died: nothing is known but what the store and the agents say."""

        def function(run: RunStore) -> Any:
            records = run.records()
            mine = next((r for r in records if r.generation == self.generation.id), None)
            return mine, *self._find(run, "auto" if mine else self.generation.resumed)

        def done(result: Any) -> None:
            if isinstance(result, StorageError):
                self.world.end(self.generation)
                return
            mine, self.tip, usable, candidates, is_exact = result
            self.committed = sorted(usable)
            if mine is None:
                self.vote = voting.RestoreVote(world_size=NUM_RANKS, candidates=candidates, is_exact=is_exact)
            else:
                self.vote = voting.RestoreVote.decided(mine.parent, world_size=NUM_RANKS)
                self._make_protocol(mine.parent)
            for rank in self.generation.ranks:
                rank.introduce()

        self.world.begin(Task("adopt", self, function, done))

    def _make_protocol(self, parent: CheckpointRef | None) -> None:
        self.commits = protocol.CommitProtocol(
            world_size=NUM_RANKS,
            interval_steps=1,
            tolerated_failures=None,
            latency_s=LATENCY_S,
            max_in_flight=self.world.max_in_flight,
            start_step=parent.step if parent else 0,
        )

    def take(self, message: tuple[Any, ...]) -> None:
        if not self.is_alive or self.vote is None:
            return
        match message:
            case ("ask", rank):
                self._carry_out_vote(self.vote.ask(rank))
            case ("report", rank, ref, error):
                self._carry_out_vote(self.vote.report(rank, ref, error))
            case ("here", rank, step, highest_plan_id, uploading) if self.commits is not None:
                self._rank_here(rank, step, highest_plan_id, uploading)
            case ("event", protocol.Joined(rank)) if self.commits is None:
                self.joined_early.add(rank)
            case ("event", event):
                self.feed(event)

    def _rank_here(self, rank: int, step: int, highest_plan_id: int, uploading: tuple[int, ...]) -> None:
        plans = self.commits.plans
        if not plans:
            self.commits.skip_plans_to(highest_plan_id)
        for plan in plans:
            if plan.id not in uploading and step >= plan.step:
                self.feed(protocol.Failed(rank, plan.id, "restarted"))
            elif highest_plan_id < plan.id:
                self.tell_all("plan", tuple(plan))

    def _carry_out_vote(self, actions: list[voting.Action]) -> None:
        for action in actions:
            match action:
                case voting.Offer(ranks, ref):
                    self.tell_all("offer", ranks, ref)
                case voting.Reject(ref):
                    self.committed = [kept for kept in self.committed if kept != ref]
                case voting.Refuse():
                    self.world.end(self.generation)
                case voting.Proceed(ref):
                    self._write_record(ref)

    def _write_record(self, ref: CheckpointRef | None) -> None:
        if self.commits is not None:
            self.tell_all("proceed", ref)
            return
        record = lineage.record_for(self.generation.id, world_size=NUM_RANKS, parent=ref, tip_record=self.tip)

        def done(result: Any) -> None:
            if isinstance(result, StorageError):
                self.world.end(self.generation)
            elif self.commits is None:
                self._make_protocol(ref)
                self.committed = [kept for kept in self.committed if ref is not None and kept <= ref]
                for rank in sorted(self.joined_early):
                    self.feed(protocol.Joined(rank))
                self.tell_all("proceed", ref)

        self.world.begin(Task("record", self, lambda run: run.write_record(record), done))

    # Saving.

    def feed(self, event: protocol.Event) -> None:
        if self.commits is None or not self.is_alive:
            return
        try:
            actions = self.commits.handle(event, self.world.now_s)
        except protocol.ProtocolError:
            return
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: protocol.Action) -> None:
        match action:
            case protocol.Publish(plan):
                self.tell_all("plan", tuple(plan))
            case protocol.WriteCommit(plan, shards):
                self._commit(plan, shards)
            case protocol.EndAttempt(plan):
                self._attempt_ended(action)
            case protocol.Halt():
                self.tell_all("halt")

    def _commit(self, plan: Any, shards: tuple[ShardInfo, ...]) -> None:
        ref = CheckpointRef(plan.step, self.generation.id, plan.id)
        self.world.num_writes += 1
        manifest = Manifest(ref, NUM_RANKS, "0" * 32, shards, 0.0, f"{self.world.num_writes:016x}", {})

        def function(run: RunStore) -> GenerationId | None:
            run.write_manifest(manifest)
            return lineage.newer_claim(self.generation.id, run.claims())

        def done(result: Any) -> None:
            if isinstance(result, StorageError):
                self.feed(protocol.CommitEnded(plan.id, str(result)))
            else:
                self.feed(
                    protocol.CommitEnded(plan.id, str(result) if result else None, is_fenced=bool(result))
                )

        self.world.begin(Task(f"commit {plan.step}", self, function, done))

    def _attempt_ended(self, end: protocol.EndAttempt) -> None:
        ref = CheckpointRef(end.plan.step, self.generation.id, end.plan.id)
        self.tell_all("ended", tuple(end.plan), end.is_committed)
        if end.is_committed:
            self.world.acknowledged(ref)
            self.committed.append(ref)
            for old in to_delete(self.committed, keep_last=self.keep_last):
                self._rotate(old)
        elif end.num_bytes and not end.has_commit_begun:
            self.world.begin(Task(f"remove {ref.step}", self, lambda run: run.delete(ref), lambda _: None))

    def _rotate(self, old: CheckpointRef) -> None:
        def function(run: RunStore) -> bool:
            if lineage.newer_claim(self.generation.id, run.claims()) is not None:
                return False
            run.delete(old)
            return True

        def done(result: Any) -> None:
            if result is True:
                self.committed = [kept for kept in self.committed if kept != old]

        self.world.begin(Task(f"rotate {old.step}", self, function, done))

    def sweep(self) -> None:
        """At once and with no grace time: the worst case."""
        self.world.may_have_phantoms = True
        id_ = self.generation.id
        self.world.begin(
            Task(
                "sweep",
                self,
                lambda run: run.sweep(id_, older_than_s=0.0, now_unix_s=1.0),
                lambda _: None,
            )
        )

    def tell_all(self, *message: Any) -> None:
        for rank in range(NUM_RANKS):
            self.world.send(self.generation, rank, message)


class Generation:
    """One start of a worker group."""

    def __init__(self) -> None:
        self.id: GenerationId | None = None
        self.resumed: int | str = "auto"
        self.is_rollback = False
        self.ranks: list[Rank] = []
        self.loaded: list[tuple[int, CheckpointRef | None]] = []
        self.coordinator: Coordinator | None = None
        self.is_alive = True


class World:
    """Everything, and what chance does to it.

    Args:
        choose: ``choose(n)`` gives a number below n; 0 is the undisturbed course.
        keep_last: Checkpoints that retention keeps.
        may_roll_back: Whether starts may ask for a step.
        max_generations: Starts, some of them while an older one is alive.
        fault_share: Once in so many events a process may be killed or replaced.
        call_fault_share: One in so many storage calls may go wrong.
        max_in_flight: Snapshots that each rank has memory for.
    """

    def __init__(
        self,
        choose: Callable[[int], int],
        *,
        keep_last: int = 1,
        may_roll_back: bool = False,
        max_generations: int = 4,
        fault_share: int = 30,
        call_fault_share: int = 8,
        max_in_flight: int = 1,
    ) -> None:
        self.choose = choose
        self.objects = Objects()
        self.now_s = 0.0
        self.tasks: list[Task] = []
        self.limbo: list[tuple[str, str, bytes]] = []
        self.bag: list[tuple[Generation, Any, tuple[Any, ...]]] = []
        self.generations: list[Generation] = []
        self.had: dict[tuple[GenerationId, int], str] = {}
        self.acks: list[CheckpointRef] = []
        self.rollbacks: set[tuple[int, str]] = set()
        self.num_writes = 0
        self.num_faults: dict[str, int] = {}
        self.may_have_phantoms = False
        self.keep_last = keep_last
        self.may_roll_back = may_roll_back
        self.max_generations = max_generations
        self.fault_share = fault_share
        self.call_fault_share = call_fault_share
        self.max_in_flight = max_in_flight
        self.trace: list[str] = []

    # What parts of the world ask of it.

    def begin(self, task: Task) -> None:
        if not task.run():
            self.tasks.append(task)

    def send(self, generation: Generation, to: Any, message: tuple[Any, ...]) -> None:
        item = (generation, to, message)
        if not any(item == other for other in self.bag):
            self.bag.append(item)

    def end(self, generation: Generation) -> None:
        """The whole worker group and its coordinator are gone; their last calls may still arrive."""
        if not generation.is_alive:
            return
        generation.is_alive = False
        self._kill_coordinator(generation)
        for rank in generation.ranks:
            rank.is_alive = False
            self._orphan(rank)
        self.bag = [item for item in self.bag if item[0] is not generation]

    def _kill_coordinator(self, generation: Generation) -> None:
        if generation.coordinator is not None:
            generation.coordinator.is_alive = False
            self._orphan(generation.coordinator)

    def _orphan(self, owner: Any) -> None:
        for task in [task for task in self.tasks if task.owner is owner]:
            self.tasks.remove(task)
            if task.call is not None and task.call[0] in ("put", "delete") and self.choose(2):
                self.limbo.append(task.call)

    def acknowledged(self, ref: CheckpointRef) -> None:
        self.trace.append(f"ACK {ref}")
        self.acks.append(ref)
        self.check()

    # What may happen next.

    def rarely(self, n: int) -> bool:
        """Return True once in ``n``."""
        return n > 0 and self.choose(n) == n - 1

    def finish(self) -> None:
        """End all that runs and start once more, with nothing in the way."""
        for generation in self.generations:
            self.end(generation)
        while self.limbo:
            self._late()
        self.fault_share, self.call_fault_share, self.choose = 0, 0, lambda n: 0
        promised = max((ref.step for ref in self._promised()), default=0)
        self.start_generation()
        generation = self.generations[-1]
        for _ in range(200):
            if len(generation.loaded) == NUM_RANKS:
                break
            assert generation.is_alive, "the last start ended"
            assert self.step(), "nothing can happen, and the last start has not restored"
        steps = {ref.step if ref else 0 for _, ref in generation.loaded}
        assert len(generation.loaded) == NUM_RANKS, "the last start has not restored"
        assert min(steps) >= promised, f"I2: restored {steps}, acknowledged {promised}"

    def start_generation(self) -> None:
        generation = Generation()
        self.generations.append(generation)
        resume: int | str = "auto"
        if self.may_roll_back and self.rarely(3):
            resume = self.choose(3)
        generation.coordinator = Coordinator(self, generation, resume, self.keep_last)
        generation.coordinator.start()

    def step(self) -> bool:
        """Let one thing happen; return whether anything could."""
        options = list(self._options())
        if not options:
            return False
        name, action = options[self.choose(len(options))]
        self.trace.append(name)
        action()
        return True

    def _options(self) -> Iterator[tuple[str, Callable[[], None]]]:
        for task in self.tasks:
            yield f"{task.name}: {task.call[:2]}", lambda task=task: self._call(task)
        for item in self.bag:
            yield f"deliver {item[1:]}", lambda item=item: self._deliver(item)
        for generation in self.generations:
            ready = [rank for rank in generation.ranks if rank.is_alive and rank.step is not None]
            # Slower than messages and calls, or every plan would be missed.
            ready.sort(key=lambda rank: rank.step)
            for rank in ready if len(self.tasks) + len(self.bag) < 3 or self.rarely(6) else ():
                yield f"train {rank.rank}", rank.train
        alive = [generation for generation in self.generations if generation.is_alive]
        if len(self.generations) < self.max_generations and (not alive or self.rarely(20)):
            yield "start", self.start_generation
        if self.limbo:
            yield f"late {self.limbo[0][:2]}", self._late
        if not self.rarely(self.fault_share):
            return
        for generation in alive:
            yield "kill", lambda generation=generation: self._kill(generation)
            if generation.ranks:
                yield "replace", lambda generation=generation: self._replace(generation)
            if generation.coordinator.commits is not None:
                yield "sweep", generation.coordinator.sweep
                yield "time", lambda generation=generation: self._pass_time(generation)

    def _call(self, task: Task) -> None:
        fate = self.choose(5) if self.rarely(self.call_fault_share) else 0
        kind = task.call[0]
        error = StorageError("the store does not answer", key=task.call[1], operation=kind)
        before = self._promised()
        if fate in (0, 1, 4):
            answer = self.objects.answer(task.call)
            task.answers.append(error if fate == 1 else answer)
            if fate == 4 and kind in ("put", "delete"):
                # A first try that was given up and travels on, beside the second that was answered.
                self.limbo.append(task.call)
        else:
            task.answers.append(error)
            if fate == 3 and kind in ("put", "delete"):
                self.limbo.append(task.call)
        if fate:
            self._count(
                f"{kind}: {('', 'reply lost', 'failed', 'failed, done later', 'done again later')[fate]}"
            )
        if kind in ("put", "delete"):
            self.check()
        if task.name == "record" and not task.owner.generation.is_rollback:
            # Only a user's roll-back leaves behind what was acknowledged.
            left = set(before) - set(self._promised())
            assert not left, f"I2: {left} were acknowledged and are left behind by {task.owner.generation.id}"
        if task.run():
            self.tasks = [other for other in self.tasks if other is not task]

    def _deliver(self, item: tuple[Generation, Any, tuple[Any, ...]]) -> None:
        if not self.rarely(8):
            self.bag = [other for other in self.bag if other is not item]
        else:
            self._count("message repeated")
        generation, to, message = item
        if to == "coordinator":
            generation.coordinator.take(message)
        elif to < len(generation.ranks):
            generation.ranks[to].take(message)

    def _late(self) -> None:
        call = self.limbo.pop(self.choose(len(self.limbo)))
        self._count(f"{call[0]}: arrived late")
        # A manifest that arrives after its checkpoint was deleted stands without shards.
        self.may_have_phantoms |= call[0] == "put"
        self.objects.answer(call)
        self.check()

    def _kill(self, generation: Generation) -> None:
        self._count("group killed")
        self.end(generation)

    def _replace(self, generation: Generation) -> None:
        self._count("coordinator replaced")
        self._kill_coordinator(generation)
        generation.coordinator = Coordinator(self, generation, generation.resumed, self.keep_last)
        generation.coordinator.adopt()

    def _pass_time(self, generation: Generation) -> None:
        self.now_s += 15.0
        generation.coordinator.feed(protocol.Tick())

    def _count(self, fault: str) -> None:
        self.num_faults[fault] = self.num_faults.get(fault, 0) + 1

    # The oracle.

    def check(self) -> None:
        """Compare the store, as it is at this very moment, with what was promised."""
        records = self._records()
        if not records:
            return
        tip = max(records)
        limits = self._limits(records, tip)
        counting = [ref for ref in self._manifests() if self._counts(ref, limits)]
        restorable = [ref for ref in counting if self._is_whole(ref)]
        assert restorable == counting or self.may_have_phantoms, "I1: it counts and lacks a shard"
        promised = self._promised()
        newest = max((ref[0] for ref in restorable), default=-1)
        for ref in promised:
            assert newest >= ref.step, (
                f"I2: {ref} was acknowledged; the newest that restores is step {newest}"
            )
        if records[tip]["parent"] is not None:
            left_at = records[tip]["parent"][0]
            late = [ref for ref in restorable if (ref[1], ref[2]) != tip and ref[0] > left_at]
            assert not late, f"I3: {late} of older generations are above where the tip left them"

    def _promised(self) -> list[CheckpointRef]:
        """Return what was acknowledged and counts, less what a user's roll-back left behind.

        A start that overlaps the one that rolls back may bring that to light
        again; nobody was promised so.
        """
        records = self._records()
        if not records:
            return []
        limits = self._limits(records, max(records))
        promised = [ref for ref in self.acks if self._counts(ref, limits)]
        for id_ in self.rollbacks & records.keys():
            kept = self._limits(records, id_)
            promised = [ref for ref in promised if ref.generation >= id_ or self._counts(ref, kept)]
        return promised

    def _records(self) -> dict[tuple[int, str], dict[str, Any]]:
        found = {}
        for key, data in self.objects.items():
            if key.startswith("generations/") and key.count(".") == 1:
                record = json.loads(data)
                found[tuple(record["generation"])] = record
        return found

    def _limits(self, records: Any, tip: tuple[int, str]) -> dict[tuple[int, str], int | None]:
        limits: dict[tuple[int, str], int | None] = {tip: None}
        at, lowest = tip, None
        while at in records and records[at]["parent"] is not None:
            step, number, id_, _ = records[at]["parent"]
            lowest = step if lowest is None else min(lowest, step)
            at = (number, id_)
            limits[at] = lowest
        return limits

    def _manifests(self) -> list[tuple[int, int, str, int, str]]:
        found = []
        for key, data in self.objects.items():
            if key.endswith("/manifest.json"):
                fields = json.loads(data)
                number, id_ = fields["generation"]
                found.append((fields["step"], number, id_, fields["plan_id"], key))
        return found

    def _counts(self, ref: Any, limits: dict[tuple[int, str], int | None]) -> bool:
        step, generation = ref[0], tuple(ref[1]) if isinstance(ref[1], tuple) else (ref[1], ref[2])
        return generation in limits and (limits[generation] is None or step <= limits[generation])

    def _is_whole(self, ref: tuple[int, int, str, int, str]) -> bool:
        manifest = json.loads(self.objects[ref[4]])
        folder = ref[4].rpartition("/")[0]
        for rank, name, num_bytes, crc in manifest["shards"]:
            data = self.objects.get(f"{folder}/{name}")
            if data is None or len(data) != num_bytes or f"{zlib.crc32(data):08x}" != crc:
                return False
            state, generation, step, owner = json.loads(data)
            had = self.had.get((GenerationId(*generation), step))
            if (had, generation, step, owner) != (state, [ref[1], ref[2]], ref[0], rank):
                raise AssertionError(f"I1: {name} of {ref} is not what the rank had")
        return True
