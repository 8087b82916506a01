"""Which of a checkpoint's tensors an export takes, and under which names. Pure.

A component is what one keyword of ``attach()`` saved; the names of its tensors
begin with its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raycheck.core.layout import SAFETENSORS_DTYPES, Chunk
from raycheck.errors import ConfigError

TIES = "*ties"
GROUPS = "*groups"
STATE = "*state"
_NOT_COMPONENTS = ("rng", "values")


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """What goes into an export."""

    names: tuple[str, ...]
    """The components, in the order of the checkpoint."""

    chunks: tuple[Chunk, ...]
    """Their tensors, whole, with their names in the checkpoint."""

    values: Mapping[str, Any]
    """Their plain values, as they are coded."""

    is_bare: bool
    """Whether one component alone was asked for: its name is then left out of those of its tensors."""

    def name_of(self, name: str) -> str:
        """Return the name of a tensor in the export."""
        return name.removeprefix(f"{self.names[0]}.") if self.is_bare else name

    @property
    def ties(self) -> dict[str, str]:
        """From each further name of a tensor that modules share to the one that it is stored under."""
        found: dict[str, str] = {}
        for name in self.names:
            ties = ties_of(self.values.get(name))
            found.update({self.name_of(tied): self.name_of(first) for tied, first in ties.items()})
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(chunk.num_bytes for chunk in self.chunks)


def component_of(name: str) -> str:
    """Return the component that a tensor belongs to."""
    return name.partition(".")[0].partition("[")[0]


def ties_of(coded: Any) -> dict[str, str]:
    """Return the ties among the coded values of a component; none if it is no module."""
    ties = coded.get(TIES) if isinstance(coded, dict) else None
    if not isinstance(ties, dict):
        return {}
    return {str(tied): str(first) for tied, first in ties.items()}


def components(chunks: Iterable[Chunk], values: Mapping[str, Any]) -> list[str]:
    """Return the components of a checkpoint, in the order of their values."""
    names = [*values, *(component_of(chunk.name) for chunk in chunks)]
    return [name for name in dict.fromkeys(names) if name not in _NOT_COMPONENTS]


def choose_components(
    chunks: Sequence[Chunk], values: Mapping[str, Any], only: Sequence[str], *, must_be_one: bool
) -> Selection:
    """Return what an export takes.

    Args:
        chunks: All tensors of the checkpoint.
        values: All plain values, by component.
        only: The components that were asked for; empty: all.
        must_be_one: Whether the format is that of a single module.

    Raises:
        ConfigError: If there is no such component, or more than one where one must be.
    """
    known = components(chunks, values)
    listed = ", ".join(known)
    for name in only:
        if name not in known:
            raise ConfigError(
                f"--only {name}: no such component in the checkpoint; there are {listed}",
                field="only",
                value=name,
            )
    chosen = tuple(name for name in known if not only or name in only)
    if must_be_one and len(only) != 1:
        raise ConfigError(
            f"--format hf is for one module: give --only with one of {listed}", field="only", value=list(only)
        )
    return Selection(
        names=chosen,
        chunks=tuple(chunk for chunk in chunks if component_of(chunk.name) in chosen),
        values={name: values[name] for name in chosen if name in values},
        is_bare=len(only) == 1,
    )


def refuse_unknown_dtypes(chunks: Iterable[Chunk]) -> None:
    """Refuse tensors that a safetensors file cannot name the type of.

    Raises:
        ConfigError: If there is one.
    """
    for chunk in chunks:
        if chunk.dtype not in SAFETENSORS_DTYPES:
            raise ConfigError(
                f"{chunk.name} is {chunk.dtype}, which safetensors files cannot hold; "
                "use --format pt or dcp, or leave it out with --only",
                field="format",
                value=chunk.dtype,
            )


def in_files(chunks: Sequence[Chunk], *, max_file_bytes: float) -> list[list[Chunk]]:
    """Deal tensors to files in their order; a file is larger than allowed only if one tensor is."""
    files: list[list[Chunk]] = [[]]
    left = max_file_bytes
    for chunk in chunks:
        if files[-1] and chunk.num_bytes > left:
            files.append([])
            left = max_file_bytes
        files[-1].append(chunk)
        left -= chunk.num_bytes
    return files
