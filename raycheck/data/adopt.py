"""What ``attach`` does with the loaders, samplers and streams that are passed to it.

A raycheck loader has a position of its own. A plain torch ``DataLoader`` has
none, but its sampler may: then the batches that the loop receives from the
loader are counted, and the sampler's position is what is saved. The same holds
for a loader that Ray's ``prepare_data_loader`` has wrapped, which fetches one
batch ahead of what it yields. What has a state of its own instead, such as
torchdata's ``StatefulDataLoader``, is saved and restored as it is, for each
rank, at one world size. Everything else is refused with the reason, since a
loader that silently starts over is worse than none.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
import torch.utils.data
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset

from raycheck.core.cursor import batch_seed
from raycheck.data.loader import DataLoader
from raycheck.data.sampler import Counting, DataPosition, ElasticBatchSampler, ElasticSampler
from raycheck.errors import CheckpointMismatchError, ConfigError

FORMAT = 1

OURS = (
    "use raycheck.DataLoader, which takes shuffle=..., or a sampler or batch_sampler of yours; or give the torch "
    "DataLoader batch_sampler=raycheck.ElasticBatchSampler(dataset, batch_size, shuffle=...)"
)


class DataWatch:
    """The positions among the state of one rank: what is told of them at each snapshot.

    Used by the training thread alone.
    """

    def __init__(self, positions: Mapping[str, DataLoader[Any] | DataPosition]) -> None:
        self._positions = dict(positions)
        self._stepped = [
            position for position in self._positions.values() if _counting_of(position) is Counting.NOBODY
        ]
        self._unseen = [
            name
            for name, position in self._positions.items()
            if isinstance(position, DataPosition) and _counting_of(position) is Counting.LOADER
        ]
        """Loaders of which no iterator that counts has been seen yet."""

    def end_step(self) -> None:
        """Count the step's batch where a sampler was passed without its loader.

        Warns, once, where a loop takes batches that nobody counts.
        """
        for position in self._stepped:
            assert isinstance(position, DataPosition)
            position.end_step()
        for name in [*self._unseen]:
            self._look_at(name)

    def _look_at(self, name: str) -> None:
        position = self._positions[name]
        assert isinstance(position, DataPosition)
        if position.is_read_uncounted:
            warnings.warn(
                f"{name}: the loop takes batches from an iterator that was made before attach(), and what it gives "
                "out is not counted: after a resume the same items come again. Make the iterator after attach(), "
                "or use raycheck.DataLoader, whose iterators follow",
                RuntimeWarning,
                stacklevel=5,
            )
        if position.is_read_uncounted or position.has_counted_pass:
            self._unseen.remove(name)

    def place(self) -> str:
        """Return where this rank is, as a text that must be the same on all ranks."""
        return "; ".join(
            f"{name}: {_position_of(position).place}" for name, position in self._positions.items()
        )

    def accounts(self) -> dict[str, Any]:
        """Return each position's account, by name."""
        return {name: position.account() for name, position in self._positions.items()}


def adopt(state: Mapping[str, Any], *, rank: int, world_size: int) -> tuple[dict[str, Any], DataWatch]:
    """Return the state with what stands for its loaders, and a watch over their positions.

    Loaders that are not raycheck's get a subclass of their own class, which
    counts; the object stays the same.

    Args:
        state: As passed to ``attach``.
        rank: Of the training job.
        world_size: Likewise.

    Raises:
        ConfigError: If a loader cannot be resumed, or does not fit its sampler;
            names field, value and what to do.
    """
    adopted = {name: _adopt_one(name, value, rank, world_size) for name, value in state.items()}
    positions = {n: value for n, value in adopted.items() if isinstance(value, DataLoader | DataPosition)}
    for name, position in positions.items():
        _check_ranks(name, _position_of(position), rank, world_size)
    return adopted, DataWatch(positions)


def ray_data(iterator: Any) -> Any:
    """Return what to pass to ``attach`` for a Ray Data iterator (``ray.train.get_dataset_shard``).

    Works where Ray's iterator has a state of its own, for as many workers as
    saved it.

    Raises:
        ConfigError: If the installed Ray's iterators have none.
    """
    if not _has_state(iterator):
        version = getattr(sys.modules.get("ray"), "__version__", "an unknown version")
        raise ConfigError(
            f"ray_data({type(iterator).__name__}): the iterators of the installed Ray ({version}) have no "
            "state_dict and load_state_dict, so that a position in the middle of an epoch cannot be saved. Read the "
            "data through raycheck.DataLoader (ray.data.Dataset.materialize and to_torch, or the files themselves), "
            "or leave the iterator out of attach(): an epoch that was interrupted then starts over",
            field="iterator",
            value=type(iterator).__name__,
        )
    return PerRank(iterator)


class PerRank:
    """A loader or stream that is saved and restored by its own ``state_dict``, for each rank.

    Its state says nothing of other ranks: it is restored at the world size that
    saved it, and refused at others. Keeps the epoch for ``ckpt.epochs``.

    Args:
        target: Has ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self.epoch = 0
        self._rank, self._world_size = 0, 1

    def place(self, rank: int, world_size: int) -> PerRank:
        """Say which rank this is."""
        self._rank, self._world_size = rank, world_size
        return self

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; tells the target, and the data set and sampler in it, if they want to know."""
        self.epoch = epoch
        for part in (
            self.target,
            getattr(self.target, "dataset", None),
            getattr(self.target, "sampler", None),
        ):
            tell = getattr(part, "set_epoch", None)
            if callable(tell):
                tell(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the target's state, and whose it is."""
        return {
            "format": FORMAT,
            "rank": self._rank,
            "world_size": self._world_size,
            "epoch": self.epoch,
            "state": self.target.state_dict(),
        }

    def check_state_dict(self, state: Any) -> None:
        """Raise what `load_state_dict` would, changing nothing."""
        what = type(self.target).__name__
        if not isinstance(state, dict) or state.get("format") != FORMAT or "state" not in state:
            raise CheckpointMismatchError(
                f"the checkpoint holds no position of a {what}: another kind of loader was saved under this name",
                saved=type(state).__name__,
                given=what,
            )
        saved = state.get("world_size")
        if saved != self._world_size:
            raise CheckpointMismatchError(
                f"the position of a {what} was saved by {saved} ranks and there are {self._world_size} now: each "
                f"rank's state knows its own part of the data alone. Go on with {saved} workers; or use "
                "raycheck.DataLoader, which goes on with any number; or leave this loader out of attach() and "
                "restore with strict=False, which starts the epoch over",
                field="world_size",
                saved=saved,
                given=self._world_size,
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the target its state back.

        Raises:
            CheckpointMismatchError: If another number of ranks saved it.
        """
        self.check_state_dict(state)
        self.target.load_state_dict(state["state"])
        # Torchdata's loaders start anew from the state of a finished iterator: that epoch is done.
        is_over = isinstance(state["state"], dict) and state["state"].get("_iterator_finished") is True
        # Hugging Face's data sets take a state only in the epoch in which it was saved.
        self.set_epoch(int(state["epoch"]) + is_over)


def _adopt_one(name: str, value: Any, rank: int, world_size: int) -> Any:
    if isinstance(value, PerRank):
        return value.place(rank, world_size)
    if isinstance(value, DataLoader):
        return value
    if isinstance(value, DataPosition):
        if value._counting is not Counting.HAND:
            value.count_by(Counting.NOBODY)
        return value
    if isinstance(value, TorchLoader):
        return _adopt_loader(name, value, rank, world_size)
    if _is_from("ray.data", value) and hasattr(value, "iter_batches"):
        return ray_data(value).place(rank, world_size)
    if _is_stream(value):
        if not _has_state(value):
            _refuse(
                name,
                value,
                "an iterable-style data set with state_dict and load_state_dict, since otherwise it has no position "
                "that could be saved",
            )
        return PerRank(value).place(rank, world_size)
    return value


def _adopt_loader(name: str, loader: TorchLoader[Any], rank: int, world_size: int) -> Any:
    base = getattr(loader, "_dataloader", None)
    if base is not None and type(loader).__name__ == "_WrappedDataLoader":
        return _adopt_prepared(name, loader, base)
    position = _position_in(name, loader)
    if position is not None:
        _check_fit(name, loader, position)
        if _has_state(loader):
            _refuse(
                name,
                loader,
                "a plain torch DataLoader where the sampler is raycheck's: a loader with a state of its own counts "
                "batches as they are fetched",
            )
        _count_at(loader, _plain_kind, position)
        return position
    if _has_state(loader):
        return PerRank(loader).place(rank, world_size)
    if not _is_stream(loader.dataset):
        _refuse_sampler(name, loader)
    return _adopt_stream(name, loader).place(rank, world_size)


def _adopt_stream(name: str, loader: TorchLoader[Any]) -> PerRank:
    dataset = loader.dataset
    if not _has_state(dataset):
        _refuse(
            name,
            loader,
            f"over a data set that has a position: {type(dataset).__name__} has no state_dict and load_state_dict",
        )
    if loader.num_workers:
        _refuse(
            name,
            loader,
            f"num_workers=0, not {loader.num_workers}: the worker processes iterate copies of "
            f"{type(dataset).__name__}, whose positions this process does not see. torchdata's StatefulDataLoader "
            "collects them and can be passed to attach()",
        )
    return PerRank(dataset)


def _adopt_prepared(name: str, prepared: TorchLoader[Any], base: Any) -> Any:
    """Take a loader that ``prepare_data_loader`` has wrapped: it holds back one batch that it has fetched."""
    if isinstance(base, DataLoader):
        _count_at(prepared, _prepared_kind, base._position)
        return base
    position = _position_in(name, base)
    if position is None and _has_state(base):
        _refuse(
            name,
            base,
            "passed to attach() without prepare_data_loader, which fetches one batch ahead: that batch would "
            "be lost with each restore. Move the batches to the device in the loop",
        )
    if position is None:
        _refuse_sampler(
            name,
            base,
            " If it was a raycheck.DataLoader, prepare_data_loader has replaced it by one with a DistributedSampler: "
            "leave prepare_data_loader out, or call it with add_dist_sampler=False; raycheck's loaders deal the items "
            "to the ranks themselves",
        )
    _check_fit(name, base, position)
    _count_at(prepared, _prepared_kind, position)
    return position


def _position_in(name: str, loader: TorchLoader[Any]) -> DataPosition | None:
    """Return the position that the loader's sampler keeps, if it is one of ours."""
    batch_sampler: Any = loader.batch_sampler
    if isinstance(batch_sampler, DataPosition):
        return batch_sampler
    # Reached through a batch sampler of the user's own, its batches need not be those that the position counts.
    inner = getattr(batch_sampler, "sampler", None) if batch_sampler is not None else loader.sampler
    if not isinstance(inner, DataPosition):
        return None
    if type(batch_sampler) is not torch.utils.data.BatchSampler:
        field = "batch_sampler" if batch_sampler is not None else "batch_size"
        value = type(batch_sampler).__name__ if batch_sampler is not None else None
        raise ConfigError(
            f"{name}: {field}={value}: must be batches of a fixed size around {type(inner).__name__}, whose "
            "position counts them; give the DataLoader batch_size and sampler, or batch_sampler=ElasticBatchSampler",
            field=field,
            value=value,
        )
    return inner


def _check_fit(name: str, loader: TorchLoader[Any], position: DataPosition) -> None:
    """Check that what the loader does with its sampler is what the position counts."""
    length = position.cursor.length
    num_items = len(loader.dataset)  # type: ignore[arg-type]  # a sampler of ours was made of a length
    if num_items != length:
        _refuse_field(name, "dataset", f"of {num_items} items", f"the sampler's, which has {length} items")
    if not getattr(loader, "in_order", True):
        _refuse_field(name, "in_order", False, "True: batches that overtake each other have no position")
    if isinstance(position, ElasticSampler):
        # A batch sampler of torch's own is between the two.
        batches: Any = loader.batch_sampler
        if batches.batch_size != position.batch_size:
            _refuse_field(
                name,
                "batch_size",
                batches.batch_size,
                f"{position.batch_size}, as the ElasticSampler has it: its position counts whole batches",
            )
        if batches.drop_last:
            _refuse_field(
                name, "drop_last", True, 'False, with ElasticSampler(..., remainder="drop") in its place'
            )


def _check_ranks(name: str, position: DataPosition, rank: int, world_size: int) -> None:
    given = position.dealing.world_size
    if given != world_size and rank == 0:
        warnings.warn(
            f"{name} deals its items to {given} ranks and the job has {world_size}: "
            + (
                "every rank gets all of them"
                if given == 1
                else "make the loader after the process group, or give it rank and world_size"
            ),
            UserWarning,
            stacklevel=4,
        )


def _plain_kind(kind: type[Any]) -> type[Any]:
    """Return a subclass of a loader's class that counts what the loop receives."""

    class Counted(kind):  # type: ignore[misc]  # any loader class
        # A subclass made here and no mixin: an existing object can change to it.
        def __iter__(self) -> Iterator[Any]:
            self._raycheck_pass = _CountedBatches(self, super().__iter__())
            return self._raycheck_pass

    return _with_epochs(Counted, kind)


def _prepared_kind(kind: type[Any]) -> type[Any]:
    """Return the same for a prepared loader: its own iterator, it fetches one batch ahead of what it yields."""

    class CountedAhead(kind):  # type: ignore[misc]  # any loader class
        def __iter__(self) -> Iterator[Any]:
            base = self._dataloader
            base.is_counted_outside = True
            try:
                # Fetches the first batch, and keeps it.
                super().__iter__()
            finally:
                base.is_counted_outside = False
            self._raycheck_pass = _CountedBatches(self, _Ahead(super().__next__))
            return self._raycheck_pass

    return _with_epochs(CountedAhead, kind)


def _with_epochs(counted: Any, kind: type[Any]) -> type[Any]:
    """Give the class what a loop may ask its loader for, and the name by which it is known."""
    counted.set_epoch = lambda self, epoch: self._raycheck_position.set_epoch(epoch)
    counted.epoch = property(lambda self: self._raycheck_position.epoch)
    counted.__name__ = counted.__qualname__ = kind.__name__
    found: type[Any] = counted
    return found


class _Ahead(Iterator[Any]):
    """An iterator made of a function that raises StopIteration."""

    def __init__(self, advance: Any) -> None:
        self._advance = advance

    def __next__(self) -> Any:
        return self._advance()


class _CountedBatches(Iterator[Any]):
    """One pass over a loader that does not count itself."""

    def __init__(self, loader: Any, batches: Iterator[Any]) -> None:
        self._loader = loader
        self._batches = batches
        loader._raycheck_position.has_counted_pass = True
        self._rest: Any = None
        self._has_failed = False

    def __next__(self) -> Any:
        position: DataPosition = self._loader._raycheck_position
        is_moved = self._rest is not None and position._rest is not self._rest
        if self._loader._raycheck_pass is not self or is_moved or self._has_failed:
            raise RuntimeError(
                "this iterator of a DataLoader passed to raycheck.attach() is out of date: the loader was iterated "
                "anew, its position was set, or it failed to read a batch. Iterate it again; it goes on in epoch "
                f"{position.epoch} after {position.cursor.consumed} items"
            )
        try:
            batch = next(self._batches)
        except StopIteration:
            position.end_pass()
            raise
        except BaseException:
            # Torch may have gone past the batch or not, depending on what failed.
            self._has_failed = True
            raise
        self._rest = position._rest
        position.count()
        return batch


def _count_at(loader: Any, make_kind: Callable[[type[Any]], type[Any]], position: DataPosition) -> None:
    """Make a loader count what it yields, in place: an object of its class that also counts."""
    if not hasattr(loader, "_raycheck_position"):
        loader.__class__ = make_kind(type(loader))
    loader._raycheck_position = position
    position.count_by(Counting.LOADER)
    if getattr(loader, "generator", None) is None:
        # Torch draws the workers' seed here whenever an iterator starts. From the global generator, a
        # resumed run would draw once more than one without interruption.
        seed = batch_seed(position.cursor.seed, position.rank, 0) >> 1
        loader.generator = torch.Generator().manual_seed(seed)


def _refuse_sampler(name: str, loader: TorchLoader[Any], hint: str = "") -> NoReturn:
    batch_sampler: Any = loader.batch_sampler
    own = batch_sampler is not None and type(batch_sampler) is not torch.utils.data.BatchSampler
    field, sampler = ("batch_sampler", batch_sampler) if own else ("sampler", loader.sampler)
    raise ConfigError(
        f"{name}: a DataLoader with {field}={type(sampler).__name__} has no position that could be saved, since "
        f"what its workers fetch ahead is not what training consumed; {OURS}.{hint}",
        field=field,
        value=type(sampler).__name__,
    )


def _refuse(name: str, value: Any, allowed: str) -> NoReturn:
    kind = type(value).__name__
    raise ConfigError(f"{name} of type {kind}: must be {allowed}", field=name, value=kind)


def _refuse_field(name: str, field: str, value: Any, allowed: str) -> NoReturn:
    raise ConfigError(f"{name}: {field}={value!r}: must be {allowed}", field=field, value=value)


def _position_of(value: DataLoader[Any] | DataPosition) -> DataPosition:
    return value._position if isinstance(value, DataLoader) else value


def _counting_of(value: DataLoader[Any] | DataPosition) -> Counting:
    return _position_of(value)._counting


def _has_state(value: Any) -> bool:
    return all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict"))


def _is_stream(value: Any) -> bool:
    is_huggingface = _is_from("datasets", value) and hasattr(value, "__iter__")
    return isinstance(value, IterableDataset) or (is_huggingface and not hasattr(value, "__getitem__"))


def _is_from(package: str, value: Any) -> bool:
    return any(
        kind.__module__ == package or kind.__module__.startswith(f"{package}.")
        for kind in type(value).__mro__
    )


__all__ = ["DataWatch", "ElasticBatchSampler", "PerRank", "adopt", "ray_data"]
