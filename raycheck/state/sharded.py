"""Tensors of which this rank holds a part: DTensors, and the parts of a redundancy-free optimizer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from raycheck.core.plan import Piece
from raycheck.errors import StateError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

try:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
except ImportError:  # a torch that was built without torch.distributed has no DTensor either
    DTensor = None  # type: ignore[assignment,misc]

_local_of = operator.attrgetter("_local_tensor")
_spec_of = operator.attrgetter("_spec")


def are_any_sharded(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether one of the tensors is a DTensor. Costs tens of nanoseconds for each."""
    return DTensor is not None and any(issubclass(kind, DTensor) for kind in set(map(type, tensors)))


class Shards:
    """Finds the memory of this rank behind tensors.

    Remembers the boxes of those that it was shown last: to compute one takes as
    long as everything else about a tensor together.

    Args:
        world_size: Ranks of the job.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._kinds: list[type] = []
        self._where: list[int] = []
        """Which tensors are DTensors."""

        self._specs: list[Any] = []
        """Mesh, placements and shape of each DTensor, never changed in place; held, so that their ids are theirs."""

        self._pieces: list[Piece | None] = []
        """Per tensor. None: every rank holds it whole."""

    def look(
        self, names: Sequence[str], tensors: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[Piece | None]]:
        """Return each tensor, of a DTensor the local one, and which part of the whole it is.

        None: every rank holds it whole.

        Raises:
            StateError: If one has values that are yet to be reduced, or lies on
                a part of the ranks.
        """
        if not are_any_sharded(tensors):
            return tensors, [None] * len(tensors)
        kinds = list(map(type, tensors))
        if kinds != self._kinds:
            self._kinds, self._specs = kinds, []
            self._where = [index for index, kind in enumerate(kinds) if issubclass(kind, DTensor)]
        sharded: list[Any] = list(map(tensors.__getitem__, self._where))
        specs = list(map(_spec_of, sharded))
        if list(map(id, specs)) != list(map(id, self._specs)):
            pieces: list[Piece | None] = [None] * len(tensors)
            for index, tensor in zip(self._where, sharded, strict=True):
                pieces[index] = _piece_of(names[index], tensor, self._world_size)
            self._specs, self._pieces = specs, pieces
        found = tensors.copy()
        for index, local in zip(self._where, map(_local_of, sharded), strict=True):
            found[index] = local
        return found, self._pieces


def _piece_of(name: str, tensor: DTensor, world_size: int) -> Piece | None:
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise StateError(
            f"{name} is a DTensor with partial values, which are no state yet; "
            "redistribute it to Shard or Replicate first",
            key=name,
        )
    outside, num_outside = _place_outside(mesh)
    if mesh.size() * num_outside != world_size:
        # Whether the other ranks hold the same cannot be known from here.
        raise StateError(
            f"{name} is a DTensor on {mesh.size()} of {world_size} ranks; make its mesh a part of one mesh of "
            "all ranks (init_device_mesh), whose other dimensions hold the same",
            key=name,
        )
    if all(placement.is_replicate() for placement in placements):
        return None
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank that holds a DTensor is in its mesh"
    holder, num_holders = outside, num_outside
    for at, extent, placement in zip(coordinate, mesh.shape, placements, strict=True):
        if placement.is_replicate():
            holder, num_holders = holder * extent + at, num_holders * extent
    return Piece(tuple(tensor.shape), tuple(offset), tuple(shape), holder, num_holders)


def _place_outside(mesh: DeviceMesh) -> tuple[int, int]:
    """Return where this rank is among those at its place in the sisters of a mesh, and their number.

    A mesh that was sliced out of a larger one has a sister for each place
    along the dimensions that were left out. Data parallel training keeps the
    tensors of sisters alike.
    """
    find_root: Callable[[], DeviceMesh] = getattr(mesh, "_get_root_mesh", lambda: mesh)
    root = find_root()
    coordinate = root.get_coordinate()
    if root is mesh or coordinate is None:
        return 0, 1
    inside = torch.isin(root.mesh, mesh.mesh).nonzero()
    outside, num_outside = 0, 1
    for dim, extent in enumerate(root.shape):
        if (inside[:, dim] == inside[0, dim]).all():
            outside, num_outside = outside * extent + coordinate[dim], num_outside * extent
    return outside, num_outside


def whole_piece(tensor: torch.Tensor) -> Piece:
    """Return the piece of a tensor that this rank alone holds, and holds whole."""
    shape = tuple(tensor.shape)
    return Piece(shape, (0,) * len(shape), shape, 0, 1)
