"""Live tensors as they stand at a step boundary: kinds, addresses and versions.

Everything here is done in whole lists and arrays: with thousands of tensors,
a microsecond for each is the stall.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from raycheck.core.plan import Piece
from raycheck.errors import StateError
from raycheck.state.named import Named
from raycheck.state.parts import Capture
from raycheck.state.sharded import Shards
from raycheck.state.spans import Addresses

_kind_of = operator.attrgetter("shape", "dtype", "layout", "device", "__class__")
_CPU = torch.device("cpu")
_address_of = torch.Tensor.data_ptr
_version_of = operator.attrgetter("_version")
_is_contiguous = torch.Tensor.is_contiguous
_AT_ONCE = 100
_GIVE_WAY_S = 50e-6
"""Long enough for a thread that waits for the lock to wake up and take it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Live:
    """The tensors of a capture: shared ones, then pieces, then this rank's own.

    Holds references, so drop it after use.
    """

    names: list[str]
    tensors: list[torch.Tensor]
    """Of a DTensor, the local one."""

    num_shared: int
    pieces: list[Piece]
    """Of sharded tensors, which boxes ``tensors[num_shared : num_shared + len(pieces)]`` are."""

    @classmethod
    def of(cls, capture: Capture, shards: Shards) -> Live:
        """Return the tensors of a capture.

        Raises:
            StateError: If a DTensor cannot be saved.
        """
        shared, own, held = capture.shared, capture.own, capture.held
        names = [*shared.names, *own]
        tensors, pieces = shards.look(names, [*shared.tensors, *own.values()])
        num_shared = len(shared.names)
        parts = Named(list(held), [tensor for tensor, _ in held.values()])
        boxes = [piece for _, piece in held.values()]
        found = [piece for piece in pieces if piece is not None]
        if found:
            are_parts = list(map(operator.is_not, pieces, itertools.repeat(None)))
            parts.add(itertools.compress(names, are_parts), itertools.compress(tensors, are_parts))
            are_whole = list(map(operator.not_, are_parts))
            names = list(itertools.compress(names, are_whole))
            tensors = list(itertools.compress(tensors, are_whole))
            num_shared = sum(are_whole[:num_shared])
        return cls(
            [*names[:num_shared], *parts.names, *names[num_shared:]],
            [*tensors[:num_shared], *parts.tensors, *tensors[num_shared:]],
            num_shared,
            boxes + found,
        )


class Acquaintance:
    """What is known of live tensors, so that the same ones need not be examined again.

    Holds no tensor: one that the user replaces is freed at once.

    Args:
        live: The tensors.
        before: What was known of their predecessors, if anything: of the same
            kinds they can be stored too.

    Raises:
        StateError: If one of them cannot be stored.
    """

    def __init__(self, live: Live, before: Acquaintance | None = None) -> None:
        self.names = live.names
        self.num_shared = live.num_shared
        self.pieces = live.pieces
        try:
            kinds = _kinds(live.tensors)
        except RuntimeError:
            # A tensor that is not made yet has no shape.
            _check_all(live)
            raise
        self.kinds = kinds
        """What decides the layout, besides the names, and whether a tensor can be stored."""

        if before is None or self.kinds != before.kinds:
            _check_all(live)
        self.are_flat = _are_flat(live.tensors, self.kinds)
        """Which ones are one run of host memory in the order of their elements."""

        self.are_tracked = _are_tracked(live.tensors)
        """Which ones count their in-place changes; inference tensors do not."""

        self.shared_bytes = np.array([tensor.nbytes for tensor in live.tensors[: live.num_shared]], np.int64)
        self.addresses = _addresses(live.tensors)
        self._ids = list(map(id, live.tensors))

    def recognises(self, live: Live) -> bool:
        """Return whether these are the same tensors at the same addresses.

        Quick: shape, dtype and strides could still have been changed in place,
        or be those of a new tensor that got both the id and the memory of an
        old one, which `holds_for` finds out.
        """
        return (
            live.names == self.names
            and live.num_shared == self.num_shared
            and live.pieces == self.pieces
            and list(map(id, live.tensors)) == self._ids
            and bool(np.array_equal(_addresses(live.tensors), self.addresses))
        )

    def holds_for(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether tensors that were recognised are of the kinds that were known.

        For a thread beside the training: it lets go of the interpreter lock again and again, for which
        a training thread would wait as long as the whole takes, or five milliseconds.
        """
        for begin in range(0, len(tensors), _AT_ONCE):
            some = slice(begin, begin + _AT_ONCE)
            kinds = _kinds(tensors[some])
            if not (
                kinds == self.kinds[some]
                and np.array_equal(_are_flat(tensors[some], kinds), self.are_flat[some])
                and np.array_equal(_are_tracked(tensors[some]), self.are_tracked[some])
            ):
                return False
            time.sleep(_GIVE_WAY_S)
        return True


def _kinds(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    return list(map(_kind_of, tensors))


def _addresses(tensors: Sequence[torch.Tensor]) -> Addresses:
    return np.fromiter(map(_address_of, tensors), dtype=np.uint64, count=len(tensors))


def _are_flat(tensors: Sequence[torch.Tensor], kinds: list[tuple[Any, ...]]) -> npt.NDArray[np.bool_]:
    num = len(tensors)
    flat = np.fromiter(map(_is_contiguous, tensors), dtype=np.bool_, count=num)
    flat &= np.fromiter((kind[3] == _CPU for kind in kinds), dtype=np.bool_, count=num)
    if any(dtype.is_complex for dtype in {kind[1] for kind in kinds}):
        # A conjugated view has the bytes of what it conjugates.
        flat &= ~np.fromiter(map(torch.is_conj, tensors), dtype=np.bool_, count=num)
    return flat


def _are_tracked(tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.bool_]:
    return ~np.fromiter(map(torch.Tensor.is_inference, tensors), dtype=np.bool_, count=len(tensors))


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the counters of in-place changes; 0 for an inference tensor, which has none."""
    try:
        return list(map(_version_of, tensors))
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _check_all(live: Live) -> None:
    for name, tensor in zip(live.names, live.tensors, strict=True):
        check_storable(name, tensor)


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Refuse what has no plain bytes.

    Raises:
        StateError: Names the tensor and says what it is.
    """
    is_wrapper: Callable[[object], bool] = is_traceable_wrapper_subclass  # its type guard misleads mypy
    kind = None
    if is_wrapper(tensor) or torch.nn.parameter.is_lazy(tensor):
        kind = type(tensor).__name__
    elif tensor.layout != torch.strided:
        kind = "sparse"
    elif tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "meta"
    if kind is not None:
        remedy = (
            "call to_empty(device=...) before attach()" if kind == "meta" else "leave it out of the state"
        )
        raise StateError(f"{name} is a {kind} tensor, which cannot be saved; {remedy}", key=name)
