"""Tensors and their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch


@dataclasses.dataclass(slots=True)
class Named:
    """Tensors under their names, in two lists: to fill a dict of thousands is a good part of a stall."""

    names: list[str] = dataclasses.field(default_factory=list)
    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def add(self, names: Iterable[str], tensors: Iterable[torch.Tensor]) -> None:
        """Append as many names as tensors."""
        self.names.extend(names)
        self.tensors.extend(tensors)

    def by_name(self) -> dict[str, torch.Tensor]:
        """Return a dict of them."""
        return dict(zip(self.names, self.tensors, strict=True))
