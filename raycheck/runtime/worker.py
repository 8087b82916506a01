"""What a training loop sees: ``attach`` and the ``Checkpointer``."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from raycheck.data.adopt import DataWatch, adopt
from raycheck.data.sampler import default_place
from raycheck.errors import NotEnabledError
from raycheck.runtime import compat
from raycheck.runtime.session import Restored, Session, WorkerContext
from raycheck.state.tree import StateTree

logger = logging.getLogger("raycheck")

_context: WorkerContext | None = None
_attached: Checkpointer | None = None
_lock = threading.Lock()


def set_context(context: WorkerContext | None) -> None:
    """Say in which run this process trains; called by the callback before the train function."""
    global _context, _attached
    with _lock:
        _context, _attached = context, None


def attached() -> Checkpointer | None:
    """Return the checkpointer of this process, if it has one."""
    return _attached


def attach(
    *,
    optional: bool = False,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
    **state: Any,
) -> Checkpointer:
    """Make ``state`` checkpoint itself, and restore it in place if a checkpoint exists.

    Call it once in the train function, on every rank, after the model is
    wrapped. State is any mix of modules, optimizers, schedulers, scalers,
    other objects with ``state_dict`` and ``load_state_dict``, tensors, dicts,
    lists and plain values; of the data, the loader. It is held by reference and
    changed in place. What is immutable is found restored in ``checkpointer.values``.

    For the thread that trains. Blocks until every rank has restored and
    verified its bytes, without a limit (a warning says so every 30 s), and then
    for the copy into the live state. No rank changes anything unless all can.
    Random generators of Python, NumPy and torch are part of the state.

    Args:
        optional: Do nothing, with one warning, where the run has no
            ``AutoCheckpoint``, so that the same loop runs without it.
        strict: Refuse a checkpoint that does not hold exactly this state.
            False: what is only in the checkpoint is left out, what is only
            here stays as it is, and one warning lists both. Shapes and types
            must agree all the same.
        rename: Names in the checkpoint that have another name now, such as
            ``{"model.encoder": "model.backbone"}``; what lies below a name and
            the optimizer's state for it follow.
        **state: What to save, by name.

    Raises:
        NotEnabledError: If the run has no ``AutoCheckpoint``.
        StateError: If something in the state cannot be saved; names its path.
        ConfigError: If ``rename`` is wrong, or a loader cannot be resumed; says why.
        CheckpointMismatchError: If the run's checkpoint is another model's;
            nothing has been loaded.
        CheckpointError: If no checkpoint of the run can be restored, or the
            store cannot be read now.
        ConnectionError: If raycheck's agent on this node does not answer.
        RuntimeError: If this process has attached already.
    """
    global _attached
    with _lock:
        if _attached is not None:
            raise RuntimeError(
                "raycheck.attach() was called twice in this process; pass all state to one call"
            )
        rank, world_size = (_context.rank, _context.world_size) if _context else default_place()
        adopted, watch = adopt(state, rank=rank, world_size=world_size)
        tree = StateTree(adopted, strict=strict, rename=rename)
        if _context is None or not _context.settings.enabled:
            if _context is None and not (optional or compat.is_local_run()):
                raise NotEnabledError(
                    "this run has no AutoCheckpoint; add "
                    "RunConfig(callbacks=[raycheck.AutoCheckpoint()]) to the trainer, "
                    "or call attach(..., optional=True) to train without checkpoints"
                )
            if _context is None:
                logger.warning("raycheck is not active in this run: attach() does nothing, nothing is saved")
            session = None
        else:
            session = Session(_context, tree, watch)
        _attached = Checkpointer(tree, session, watch)
        return _attached


def tell_notice(source: str, seconds_left: float, detail: str) -> bool:
    """Pass on that this process will end; return whether anybody was told. Not for the training thread."""
    session = _attached.session if _attached is not None else None
    if session is None:
        return False
    session.tell_notice(source, seconds_left, detail)
    return True


class Checkpointer:
    """Returned by `attach`. Used by the training thread alone.

    Attributes:
        restored: What was restored, or None.
        values: The plain immutable values given to ``attach``, by name;
            assign here to change what is saved.
    """

    def __init__(self, tree: StateTree, session: Session | None, watch: DataWatch) -> None:
        self._tree = tree
        self._session = session
        self._watch = watch
        self.values = self._tree.values
        self.restored: Restored | None = None
        self._local_steps = 0
        if session is not None:
            self.restored = session.restore()

    @property
    def session(self) -> Session | None:
        """For raycheck itself: what talks to the agent; None where nothing is saved."""
        return self._session

    @property
    def current_step(self) -> int:
        """Steps completed, those before the restore included."""
        return self._session.step_number if self._session else self._local_steps

    def step(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Say that one training step is complete: call it once after each optimizer update.

        On every rank the same number of times. Blocks only for what must be
        copied at once when a snapshot is due: no message is waited for and no
        rank for another. One exception: before a resize or an announced stop
        the ranks stand still here at a step that is saved, until they are
        stopped or let go, ten minutes at most.

        Args:
            metrics: Numbers to store with a checkpoint of this step, by name.
                Tensors of one element will do; they are read at a snapshot
                only, so there is no need for ``.item()``. The rest is left out.

        Raises:
            SaveError: If more saves in a row failed than ``on_failure`` tolerates.
            FencedError: If a newer start of this run has taken over.
            ConfigError: If a sampler was attached without its loader, and the
                loop makes more steps than it has batches.
        """
        self._local_steps += 1
        self._watch.end_step()
        if self._session is not None:
            self._session.step(metrics)

    def save(self, *, block: bool = False) -> bool:
        """Ask for a checkpoint at the next step that all ranks can agree on.

        Without ``block`` one rank's call is enough, and it returns at once.

        Args:
            block: Wait until it is committed, ten minutes at most. For this
                every rank must call ``save(block=True)`` at the same step; if
                they have not within a second, this warns and returns.

        Returns:
            True if a checkpoint of the present step is committed; without
            ``block`` always False, since nobody has waited for it.
        """
        return self._session.save(block=block) if self._session else False

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs that are left of ``num_epochs``, the restored one first.

        An epoch that was under way comes again, and its loader yields the rest
        of it; so it does when the checkpoint fell after its last batch, with
        no batch left, since what follows the batches has not run yet. Tells
        attached loaders the epoch (``set_epoch``). If none is left, one warning
        says so. Without an attached loader all of them come.
        """
        loaders = [part for part in self._loaders() if callable(getattr(part, "set_epoch", None))]
        first = max((int(loader.epoch) for loader in loaders), default=0)
        if first >= num_epochs:
            logger.warning("all %d epochs are done: there is nothing left to train", num_epochs)
        for epoch in range(first, num_epochs):
            for loader in loaders:
                loader.set_epoch(epoch)
            yield epoch
        # So that a checkpoint after the last epoch says that the run is done.
        for loader in loaders:
            loader.set_epoch(num_epochs)

    def close(self) -> None:
        """Take a last checkpoint, if all ranks end at the same step, and let go.

        Blocks until it is committed, ten minutes at most. Called by itself
        when the train function returns. Calling it again does nothing, and
        after it ``step`` counts and saves nothing.

        Raises:
            SaveError, FencedError: As `step` does.
        """
        if self._session is not None:
            self._session.close()
            self._session = None

    def abandon(self) -> None:
        """Let go at once: the agents finish what was staged. Called by itself when the train function raises.

        Blocks for a copy that is under way, which is a matter of memory speed.
        """
        if self._session is not None:
            self._session.abandon()
            self._session = None

    def _loaders(self) -> Iterator[Any]:
        for target in self._tree.stateful:
            if hasattr(target, "epoch"):
                yield target
