"""What a state is made of: its parts, what they hold, and where saved tensors go back to.

A part is walked through references at every snapshot, so a replaced parameter
or a reloaded optimizer is seen. Names are those of the unwrapped model: no
``module.``, no ``_orig_mod.``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from raycheck.core.plan import Piece
from raycheck.errors import StateError
from raycheck.state.modules import EXTRA_STATE, ModuleWalk
from raycheck.state.named import Named
from raycheck.state.sharded import are_any_sharded

TIES = "*ties"


@dataclasses.dataclass(slots=True)
class Capture:
    """References to everything that makes up the state at a step boundary; nothing is copied yet."""

    shared: Named = dataclasses.field(default_factory=Named)
    """Tensors that all ranks hold alike: parameters and the optimizer's state for them."""

    held: dict[str, tuple[torch.Tensor, Piece]] = dataclasses.field(default_factory=dict)
    """Tensors of which this rank holds a part, or which it alone holds."""

    own: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Tensors that may differ from rank to rank."""

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Per part, its plain values; tensors inside them have not been taken out yet."""

    deferrable: list[str] = dataclasses.field(default_factory=list)
    """Names that only a registered optimizer changes: they may be copied until its next step."""

    parameter_names: list[dict[int, str]] = dataclasses.field(default_factory=list)
    """Per module, the names of its parameters by id: an optimizer's state goes by them."""


@dataclasses.dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor as the checkpoint has it."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclasses.dataclass(slots=True)
class Destinations:
    """Where saved tensors go."""

    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """The live tensor for each saved one that this rank takes, by name."""

    apart: set[str] = dataclasses.field(default_factory=set)
    """Names that some ranks take and others do not; the same set on all ranks."""

    misfits: list[str] = dataclasses.field(default_factory=list)
    """What cannot be restored because it is of another kind here."""

    unmatched: list[str] = dataclasses.field(default_factory=list)
    """What is only in the checkpoint, or only here."""


class Part(Protocol):
    """One keyword of ``attach``."""

    name: str

    def capture(self, out: Capture) -> None:
        """Add references to this part's present state."""

    def find(self, saved: Mapping[str, SavedTensor], out: Destinations) -> None:
        """Add the live tensors that take the saved ones of this part, and what does not fit."""

    def check(self, values: Any, out: Destinations) -> None:
        """Add what of the saved plain values does not fit. Nothing live changes."""

    def load(self, values: Any, restored: Mapping[str, torch.Tensor]) -> None:
        """Put back plain values; called after all destinations are filled."""


class ModulePart:
    """Parameters, persistent buffers and extra state of a module."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name = name
        self._walk = ModuleWalk(name, module)
        self._parameter_names: dict[int, str] = {}

    def capture(self, out: Capture) -> None:
        """Add the parameters as shared, the buffers as own."""
        found = self._walk.look()
        out.shared.add(found.parameters.names, found.parameters.tensors)
        out.own.update(found.buffers.by_name())
        out.parameter_names.append(self._names_by_id(found.parameters))
        values: dict[str, Any] = {name: module.get_extra_state() for name, module in found.with_extra_state}
        if found.ties:
            values[TIES] = found.ties
        out.values[self.name] = values

    def find(self, saved: Mapping[str, SavedTensor], out: Destinations) -> None:
        """Add parameters and buffers."""
        found = self._walk.look()
        extra = {n: t for n, t in saved.items() if EXTRA_STATE in n}
        out.tensors |= fresh(extra)
        wanted = {n: t for n, t in saved.items() if n not in extra}
        _match({**found.parameters.by_name(), **found.buffers.by_name()}, wanted, out, found.ties)

    def check(self, values: Any, out: Destinations) -> None:
        """Compare who has extra state, and the ties: with others, a tensor would get what another one had."""
        found = self._walk.look()
        was = {name for name in values or {} if name.endswith(EXTRA_STATE)}
        now = {name for name, _ in found.with_extra_state}
        out.unmatched += [
            f"missing: {n} is in the model and not in the checkpoint" for n in sorted(now - was)
        ]
        out.unmatched += [
            f"unexpected: {n} is in the checkpoint and not in the model" for n in sorted(was - now)
        ]
        saved: dict[str, str] = (values or {}).get(TIES, {})
        live = found.ties
        out.misfits += [
            f"tied: {name} is {_tie(saved.get(name))} in the checkpoint and {_tie(live.get(name))} here"
            for name in sorted({*saved, *live})
            if saved.get(name) != live.get(name)
        ]

    def load(self, values: Any, restored: Mapping[str, torch.Tensor]) -> None:
        """Put back extra state."""
        for name, module in self._walk.look().with_extra_state:
            if values and name in values:
                module.set_extra_state(values[name])

    def parameter_names(self) -> dict[int, str]:
        """Return the name of each parameter by its id."""
        return self._names_by_id(self._walk.look().parameters)

    def _names_by_id(self, parameters: Named) -> dict[int, str]:
        """Return the same dict as long as it would be equal, so that nobody need compare more than that."""
        present = self._parameter_names
        ids = list(map(id, parameters.tensors))
        if ids != list(present) or parameters.names != list(present.values()):
            self._parameter_names = dict(zip(ids, parameters.names, strict=True))
        return self._parameter_names


def _tie(first_name: str | None) -> str:
    return f"tied to {first_name}" if first_name else "a tensor of its own"


class TensorPart:
    """A tensor that the user passed itself: each rank's own."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self._tensor = tensor

    def capture(self, out: Capture) -> None:
        """Add the tensor."""
        out.own[self.name] = self._tensor

    def find(self, saved: Mapping[str, SavedTensor], out: Destinations) -> None:
        """Add the tensor itself: it is restored in place."""
        _match({self.name: self._tensor}, saved, out)

    def check(self, values: Any, out: Destinations) -> None:
        """Do nothing: a tensor has no plain values."""

    def load(self, values: Any, restored: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: the tensor has been filled."""


class StatefulPart:
    """An object with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, name: str, target: Any) -> None:
        self.name = name
        self._target = target

    def capture(self, out: Capture) -> None:
        """Add its state dict."""
        out.values[self.name] = self._target.state_dict()

    def find(self, saved: Mapping[str, SavedTensor], out: Destinations) -> None:
        """Add fresh tensors for those in the saved state dict."""
        out.tensors |= fresh(saved)

    def check(self, values: Any, out: Destinations) -> None:
        """Let the target judge its saved state dict, if it has a method for that."""
        judge = getattr(self._target, "check_state_dict", None)
        if callable(judge):
            judge(values)

    def load(self, values: Any, restored: Mapping[str, torch.Tensor]) -> None:
        """Give it the saved state dict."""
        self._target.load_state_dict(values)


class ValuePart:
    """A plain immutable value, kept where the user can replace it."""

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        self.name = name
        self._values = values

    def capture(self, out: Capture) -> None:
        """Add the value."""
        out.values[self.name] = self._values[self.name]

    def find(self, saved: Mapping[str, SavedTensor], out: Destinations) -> None:
        """Add fresh tensors for those inside the value."""
        out.tensors |= fresh(saved)

    def check(self, values: Any, out: Destinations) -> None:
        """Do nothing: any value will do."""

    def load(self, values: Any, restored: Mapping[str, torch.Tensor]) -> None:
        """Replace the value."""
        self._values[self.name] = values


class ContainerPart:
    """A dict or list of plain values and tensors, restored in place."""

    def __init__(self, name: str, container: dict[Any, Any] | list[Any]) -> None:
        self.name = name
        self._container = container

    def capture(self, out: Capture) -> None:
        """Add its content."""
        out.values[self.name] = self._container

    def find(self, saved: Mapping[str, SavedTensor], out: Destinations) -> None:
        """Add fresh tensors for those inside it."""
        out.tensors |= fresh(saved)

    def check(self, values: Any, out: Destinations) -> None:
        """Do nothing: any value will do."""

    def load(self, values: Any, restored: Mapping[str, torch.Tensor]) -> None:
        """Replace the content, keeping the container."""
        if isinstance(self._container, dict):
            self._container.clear()
            self._container.update(values)
        else:
            self._container[:] = values


def take_tensors(out: Capture) -> Callable[[str, torch.Tensor], str]:
    """Return the callback that moves tensors found inside plain values to ``out.own``."""

    def on_tensor(path: str, tensor: torch.Tensor) -> str:
        if are_any_sharded([tensor]):
            # Nobody would know how to shard it again when it is restored.
            raise StateError(
                f"{path} is a DTensor inside plain values; pass the module or the tensor itself to attach()",
                key=path,
            )
        # {"a.b": ..., "a": {"b": ...}} has two tensors at one path.
        while path in out.own:
            path += "#"
        out.own[path] = tensor
        return path

    return on_tensor


def fresh(saved: Mapping[str, SavedTensor]) -> dict[str, torch.Tensor]:
    """Return a new host tensor for each saved one."""
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in saved.items()}


def fits(live: torch.Tensor, saved: SavedTensor) -> bool:
    """Return whether a live tensor takes a saved one as it is."""
    return tuple(live.shape) == saved.shape and live.dtype == saved.dtype


def _match(
    live: Mapping[str, torch.Tensor],
    saved: Mapping[str, SavedTensor],
    out: Destinations,
    ties: Mapping[str, str] | None = None,
) -> None:
    """Pair live tensors with saved ones, and say what does not fit."""
    out.unmatched += [
        f"missing: {name} is in the model and not in the checkpoint" for name in live if name not in saved
    ]
    for name, was in saved.items():
        now = live.get(name)
        if ties and name in ties:
            out.misfits.append(f"tied: {name} is {_tie(None)} in the checkpoint and {_tie(ties[name])} here")
        elif now is None:
            out.unmatched.append(f"unexpected: {name} is in the checkpoint and not in the model")
        elif fits(now, was):
            out.tensors[name] = now
        else:
            out.misfits.append(
                f"shape: {name} is {was.dtype} {list(was.shape)} in the checkpoint, "
                f"{now.dtype} {list(now.shape)} in the model"
            )
