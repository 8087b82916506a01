"""The live state behind ``attach(**state)``: what to save, and where to restore it.

Each keyword becomes a part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from raycheck.core.renames import Renames
from raycheck.errors import CheckpointMismatchError, StateError
from raycheck.state.optimizers import OptimizerPart
from raycheck.state.parts import (
    TIES,
    Capture,
    ContainerPart,
    Destinations,
    ModulePart,
    Part,
    SavedTensor,
    StatefulPart,
    TensorPart,
    ValuePart,
)

RESERVED = ("optional", "rename", "rng", "strict", "values")
"""Keywords that attach() or the checkpoint itself takes."""


class StateTree:
    """All parts of the state of one rank.

    Args:
        state: What the user gave to ``attach``.
        strict: Whether a checkpoint must hold exactly this state. False: what
            is only in the checkpoint is left out, what is only here stays as
            it is; shapes and types must agree all the same.
        rename: From names in a checkpoint to names here, as `Renames` takes them.

    Raises:
        StateError: If an object is of no kind that can be saved.
        ConfigError: If ``rename`` is wrong.
    """

    def __init__(
        self, state: Mapping[str, Any], *, strict: bool = True, rename: Mapping[str, str] | None = None
    ) -> None:
        self.values = {key: value for key, value in state.items() if _is_immutable(value)}
        """Plain immutable values by keyword; assign here to change what is saved."""

        for key in state:
            _check_keyword(key)
        self._modules = [
            ModulePart(key, value) for key, value in state.items() if isinstance(value, torch.nn.Module)
        ]
        by_name = {part.name: part for part in self._modules}
        self.parts: list[Part] = [by_name.get(key) or self._part(key, value) for key, value in state.items()]
        self.stateful = [value for value in state.values() if callable(getattr(value, "state_dict", None))]
        self.optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
        self._strict = strict
        self._rename = Renames(
            rename or {}, [key for key, value in state.items() if isinstance(value, torch.optim.Optimizer)]
        )

    def _part(self, key: str, value: Any) -> Part:
        if isinstance(value, torch.optim.Optimizer):
            if not hasattr(value, "_optimizer_step_pre_hooks"):
                raise StateError(
                    f"{key} is a {type(value).__qualname__}, which wraps an optimizer and has no hooks of its own: "
                    "pass the one that it wraps, as in attach(optimizer=wrapper.optimizer)",
                    key=key,
                )
            return OptimizerPart(key, value, self._modules)
        if isinstance(value, torch.Tensor):
            return TensorPart(key, value)
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            return StatefulPart(key, value)
        if key in self.values:
            return ValuePart(key, self.values)
        if isinstance(value, dict | list):
            return ContainerPart(key, value)
        raise StateError(
            f"{key} is a {type(value).__qualname__}: state must be a module, an optimizer, a tensor, a plain "
            "value, a dict or list of them, or have state_dict and load_state_dict",
            key=key,
        )

    def capture(self) -> Capture:
        """Return references to the present state. Called by the training thread at a step boundary."""
        out = Capture()
        # Modules first: they have the names that optimizers go by.
        for part in sorted(self.parts, key=lambda part: not isinstance(part, ModulePart)):
            part.capture(out)
        return out

    def destinations(self, saved: Mapping[str, SavedTensor]) -> Destinations:
        """Return the live tensors that take the saved ones, by the names in the checkpoint.

        Raises:
            CheckpointMismatchError: If they do not fit together; lists what differs.
        """
        names_now = self._names_now(saved)
        by_part: dict[str, dict[str, SavedTensor]] = {part.name: {} for part in self.parts}
        out = Destinations()
        for name, tensor in saved.items():
            now = names_now[name]
            key = now.partition(".")[0]
            if key in by_part:
                by_part[key][now] = tensor
            elif (text := _unexpected_part(key)) not in out.unmatched:
                out.unmatched.append(text)
        for part in self.parts:
            part.find(by_part[part.name], out)
        self._judge(out)
        found = {name: out.tensors[now] for name, now in names_now.items() if now in out.tensors}
        apart = {name for name, now in names_now.items() if now in out.apart}
        return dataclasses.replace(out, tensors=found, apart=apart)

    def wants(self, part_name: str) -> bool:
        """Return whether a part of the checkpoint, by its name there, is a part here."""
        return any(part.name == self._rename(part_name) for part in self.parts)

    def check(self, values: Mapping[str, Any]) -> list[str]:
        """Look whether all plain values could be loaded.

        Returns:
            What is only in the checkpoint or only here; nothing if this tree is strict.

        Raises:
            CheckpointMismatchError: If not. Nothing live has changed.
        """
        out = Destinations()
        renamed = self._values_now(values)
        known = {part.name for part in self.parts}
        for name in sorted(renamed.keys() - known):
            out.unmatched.append(_unexpected_part(name))
        for part in self.parts:
            if part.name in renamed:
                part.check(renamed[part.name], out)
            elif not isinstance(part, TensorPart):
                out.unmatched.append(f"missing: {part.name} is in attach() and not in the checkpoint")
        self._judge(out)
        return out.unmatched

    def load(self, values: Mapping[str, Any], restored: Mapping[str, torch.Tensor]) -> None:
        """Put back the plain values of all parts, after the tensors are in place.

        Args:
            values: By part, as in the checkpoint.
            restored: What `destinations` returned.
        """
        renamed = self._values_now(values)
        tensors = {self._rename(name): tensor for name, tensor in restored.items()}
        for part in self.parts:
            if part.name in renamed:
                part.load(renamed[part.name], tensors)

    def _judge(self, out: Destinations) -> None:
        problems = out.misfits + (out.unmatched if self._strict else [])
        if problems:
            raise mismatch(sorted(problems))

    def _names_now(self, saved: Iterable[str]) -> dict[str, str]:
        try:
            return self._rename.all(saved)
        except ValueError as error:
            raise mismatch([str(error)]) from error

    def _values_now(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return plain values with the names in them renamed: keys of modules and optimizers are names."""
        if not self._rename:
            return dict(values)
        renamed: dict[str, Any] = {}
        for key, value in values.items():
            now = self._rename(key)
            part = next((part for part in self.parts if part.name == now), None)
            if isinstance(part, ModulePart):
                value = {self._rename(name): content for name, content in value.items()}
                if TIES in value:
                    value[TIES] = {self._rename(n): self._rename(to) for n, to in value[TIES].items()}
            if isinstance(part, OptimizerPart):
                state = {self._rename(name): fields for name, fields in value["*state"].items()}
                value = {**value, "*state": state}
            renamed[now] = value
        return renamed


def _unexpected_part(key: str) -> str:
    return f"unexpected: {key} is in the checkpoint and not in attach()"


def mismatch(problems: list[str]) -> CheckpointMismatchError:
    """Return one error for all differences between a checkpoint and the live state."""
    shown = "\n  ".join(problems[:20]) + (f"\n  and {len(problems) - 20} more" if len(problems) > 20 else "")
    return CheckpointMismatchError(
        "the checkpoint in this run's folder belongs to another model; nothing was loaded:\n  "
        f'{shown}\nUse another run name, or resume="fresh" to leave it behind; attach(..., strict=False) '
        "restores what fits, attach(..., rename={old: new}) finds what has another name now",
        problems=problems,
    )


def _check_keyword(key: str) -> None:
    if not key.isidentifier() or key in RESERVED:
        raise StateError(
            f"attach({key}=...): must be a Python name, and none of {', '.join(RESERVED)}",
            key=key,
        )


def _is_immutable(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | bytes | complex | tuple | frozenset)
