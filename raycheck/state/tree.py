"""The live state behind ``attach(**state)``: what to save, and where to restore it.

Each keyword becomes a part. A part is walked through references at every
snapshot, so a replaced parameter or a reloaded optimizer is seen. Names are
those of the unwrapped model: no ``module.``, no ``_orig_mod.``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from raycheck.errors import CheckpointMismatchError, StateError
from raycheck.state.modules import ModuleWalk

_EXTRA_STATE = "_extra_state"
_TIES = "*ties"

RESERVED = ("optional", "rng", "values")
"""Keywords that attach() or the checkpoint itself takes."""


@dataclasses.dataclass(slots=True)
class Capture:
    """References to everything that makes up the state at a step boundary; nothing is copied yet."""

    shared: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Tensors that all ranks hold alike: parameters and the optimizer's state for them."""

    own: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Tensors that may differ from rank to rank."""

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Per part, its plain values; tensors inside them have not been taken out yet."""

    deferrable: set[str] = dataclasses.field(default_factory=set)
    """Names that only a registered optimizer changes: they may be copied until its next step."""

    parameter_names: dict[int, str] = dataclasses.field(default_factory=dict)
    """Names of the modules' parameters by id: an optimizer's state goes by them."""


@dataclasses.dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor as the checkpoint has it."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Part(Protocol):
    """One keyword of ``attach``."""

    name: str

    def capture(self, out: Capture) -> None:
        """Add references to this part's present state."""

    def destinations(self, saved: Mapping[str, SavedTensor]) -> dict[str, torch.Tensor]:
        """Return the live tensors that take the saved ones of this part, by name.

        Raises:
            CheckpointMismatchError: If they do not fit together. Nothing live has changed.
        """

    def load(self, values: Any, restored: Mapping[str, torch.Tensor]) -> None:
        """Put back plain values; called after all destinations are filled."""


class StateTree:
    """All parts of the state of one rank.

    Args:
        state: What the user gave to ``attach``.

    Raises:
        StateError: If an object is of no kind that can be saved.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
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

    def _part(self, key: str, value: Any) -> Part:
        if isinstance(value, torch.optim.Optimizer):
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

    def destinations(self, saved: Mapping[str, SavedTensor]) -> dict[str, torch.Tensor]:
        """Return the live tensor for every saved one.

        Raises:
            CheckpointMismatchError: If any part does not fit; lists what differs.
        """
        found: dict[str, torch.Tensor] = {}
        problems: list[str] = []
        known = {part.name for part in self.parts}
        for key in sorted({name.partition(".")[0] for name in saved} - known):
            problems.append(f"unexpected: {key} is in the checkpoint and not in attach()")
        for part in self.parts:
            mine = {name: tensor for name, tensor in saved.items() if name.partition(".")[0] == part.name}
            try:
                found |= part.destinations(mine)
            except CheckpointMismatchError as error:
                problems += error.facts["problems"]
        if problems:
            raise mismatch(problems)
        return found

    def check(self, values: Mapping[str, Any]) -> None:
        """Ask every part that can tell whether it could load: modules, objects with ``check_state_dict``.

        Raises:
            CheckpointMismatchError: If one could not. Nothing live has changed.
        """
        for part in self.parts:
            if isinstance(part, ModulePart | StatefulPart) and part.name in values:
                part.check(values[part.name])

    def load(self, values: Mapping[str, Any], restored: Mapping[str, torch.Tensor]) -> None:
        """Put back the plain values of all parts, after the tensors are in place."""
        for part in self.parts:
            part.load(values.get(part.name), restored)


def mismatch(problems: list[str]) -> CheckpointMismatchError:
    """Return one error for all differences between a checkpoint and the live state."""
    shown = "\n  ".join(problems[:20]) + (f"\n  and {len(problems) - 20} more" if len(problems) > 20 else "")
    return CheckpointMismatchError(
        "the checkpoint in this run's folder belongs to another model; nothing was loaded:\n  "
        f'{shown}\nUse another run name, or resume="fresh" to leave it behind',
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


class ModulePart:
    """Parameters, persistent buffers and extra state of a module."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name = name
        self._walk = ModuleWalk(name, module)

    def capture(self, out: Capture) -> None:
        """Add the parameters as shared, the buffers as own."""
        found = self._walk.look()
        out.shared.update(found.parameters)
        out.own.update(found.buffers)
        out.parameter_names.update((id(tensor), name) for name, tensor in found.parameters.items())
        values: dict[str, Any] = {name: module.get_extra_state() for name, module in found.with_extra_state}
        if found.ties:
            values[_TIES] = found.ties
        out.values[self.name] = values

    def destinations(self, saved: Mapping[str, SavedTensor]) -> dict[str, torch.Tensor]:
        """Return parameters and buffers by name."""
        found = self._walk.look()
        wanted = {n: t for n, t in saved.items() if _EXTRA_STATE not in n}
        return _match({**found.parameters, **found.buffers}, wanted, found.ties)

    def check(self, values: Any) -> None:
        """Compare the ties: with others, a tensor would silently get what another one had.

        Raises:
            CheckpointMismatchError: If they differ. Nothing live has changed.
        """
        saved: dict[str, str] = (values or {}).get(_TIES, {})
        live = self._walk.look().ties
        problems = [
            f"tied: {name} is {_tie(saved.get(name))} in the checkpoint and {_tie(live.get(name))} here"
            for name in sorted({*saved, *live})
            if saved.get(name) != live.get(name)
        ]
        if problems:
            raise mismatch(problems)

    def load(self, values: Any, restored: Mapping[str, torch.Tensor]) -> None:
        """Put back extra state."""
        for name, module in self._walk.look().with_extra_state:
            if values and name in values:
                module.set_extra_state(values[name])

    def parameter_names(self) -> dict[int, str]:
        """Return the name of each parameter by its id."""
        return {id(parameter): name for name, parameter in self._walk.look().parameters.items()}


def _tie(first_name: str | None) -> str:
    return f"tied to {first_name}" if first_name else "a tensor of its own"


class OptimizerPart:
    """An optimizer's state, keyed by parameter name, and its groups' options."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, modules: Sequence[ModulePart]) -> None:
        self.name = name
        self._optimizer = optimizer
        self._modules = modules
        self._field_names: dict[str, tuple[tuple[str, ...], list[str]]] = {}

    def capture(self, out: Capture) -> None:
        """Add the state's tensors as shared, its other values and the groups as values.

        What this optimizer steps is deferrable: its hook guards it.
        """
        names: dict[int, str] = {}
        groups = []
        for g, group in enumerate(self._optimizer.param_groups):
            parameters = [_name_of(p, out.parameter_names, g, i) for i, p in enumerate(group["params"])]
            names.update(zip(map(id, group["params"]), parameters, strict=True))
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({**options, "params": parameters})
        out.deferrable.update(out.shared.keys() & names.values())
        # No keyword of attach() has a star: these names cannot meet a parameter's.
        out.values[self.name] = {"*state": self._capture_state(out, names), "*groups": groups}

    def _capture_state(self, out: Capture, names: Mapping[int, str]) -> dict[str, dict[str, Any]]:
        others: dict[str, dict[str, Any]] = {}
        for parameter, fields in self._optimizer.state.items():
            parameter_name = names.get(id(parameter))
            if parameter_name is None:  # left over: no group has this parameter any more
                continue
            full_names = self._join(parameter_name, tuple(fields))
            out.deferrable.update(full_names)
            for name, key, value in zip(full_names, fields, fields.values(), strict=True):
                if isinstance(value, torch.Tensor):
                    out.shared[name] = value
                else:
                    others.setdefault(parameter_name, {})[key] = value
        return others

    def _join(self, parameter_name: str, keys: tuple[str, ...]) -> list[str]:
        """Return the full names of a parameter's fields; joined again only when the fields change."""
        known = self._field_names.get(parameter_name)
        if known is None or known[0] != keys:
            known = keys, [f"{self.name}.{parameter_name}.{key}" for key in keys]
            self._field_names[parameter_name] = known
        return known[1]

    def destinations(self, saved: Mapping[str, SavedTensor]) -> dict[str, torch.Tensor]:
        """Return a tensor for each saved one; state that is not there yet is made, with no dummy step."""
        by_name = {name: parameter for parameter, name in self._named_parameters()}
        found: dict[str, torch.Tensor] = {}
        problems: list[str] = []
        for name, tensor in saved.items():
            if name.startswith(f"{self.name}.*"):
                found |= _fresh({name: tensor})
                continue
            parameter_name, _, key = name.removeprefix(f"{self.name}.").rpartition(".")
            parameter = by_name.get(parameter_name)
            if parameter is None:
                problems.append(f"unexpected: {name}")
                continue
            found[name] = self._slot(parameter, key, tensor)
        if problems:
            raise mismatch(problems)
        return found

    def load(self, values: Any, restored: Mapping[str, torch.Tensor]) -> None:
        """Install state and group options. Learning rates that are tensors keep their identity."""
        by_name = {name: parameter for parameter, name in self._named_parameters()}
        state: dict[torch.Tensor, dict[str, Any]] = {}
        for name, tensor in restored.items():
            parameter_name, _, key = name.removeprefix(f"{self.name}.").rpartition(".")
            if name.startswith(f"{self.name}.") and parameter_name in by_name:
                state.setdefault(by_name[parameter_name], {})[key] = tensor
        for parameter_name, fields in values["*state"].items():
            state.setdefault(by_name[parameter_name], {}).update(fields)
        self._optimizer.state.clear()
        self._optimizer.state.update(state)
        for group, saved in zip(self._optimizer.param_groups, values["*groups"], strict=True):
            for key, value in saved.items():
                if key == "params":
                    continue
                live = group.get(key)
                if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
                    live.copy_(value)
                else:
                    group[key] = value

    def _slot(self, parameter: torch.Tensor, key: str, saved: SavedTensor) -> torch.Tensor:
        present = self._optimizer.state.get(parameter, {}).get(key)
        if isinstance(present, torch.Tensor) and _fits(present, saved):
            return present
        group = next(g for g in self._optimizer.param_groups if any(p is parameter for p in g["params"]))
        # torch keeps step counters on the CPU unless the update runs in a captured graph or fused kernel.
        on_cpu = key == "step" and not (group.get("capturable") or group.get("fused"))
        device = torch.device("cpu") if on_cpu else parameter.device
        if saved.shape == tuple(parameter.shape):
            return torch.empty_like(parameter, dtype=saved.dtype, device=device, requires_grad=False)
        return torch.empty(saved.shape, dtype=saved.dtype, device=device)

    def _named_parameters(self) -> Iterator[tuple[torch.Tensor, str]]:
        known: dict[int, str] = {}
        for part in self._modules:
            known |= part.parameter_names()
        for g, group in enumerate(self._optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                yield parameter, _name_of(parameter, known, g, i)


def _name_of(parameter: torch.Tensor, known: Mapping[int, str], group: int, index: int) -> str:
    """Return a parameter's name in its module, or its place if it is in none of ours."""
    return known.get(id(parameter)) or f"param[{group}][{index}]"


class TensorPart:
    """A tensor that the user passed itself: each rank's own."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self._tensor = tensor

    def capture(self, out: Capture) -> None:
        """Add the tensor."""
        out.own[self.name] = self._tensor

    def destinations(self, saved: Mapping[str, SavedTensor]) -> dict[str, torch.Tensor]:
        """Return the tensor itself: it is restored in place."""
        return _match({self.name: self._tensor}, saved)

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

    def destinations(self, saved: Mapping[str, SavedTensor]) -> dict[str, torch.Tensor]:
        """Return fresh tensors for those in the saved state dict."""
        return _fresh(saved)

    def check(self, values: Any) -> None:
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

    def destinations(self, saved: Mapping[str, SavedTensor]) -> dict[str, torch.Tensor]:
        """Return fresh tensors for those inside the value."""
        return _fresh(saved)

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

    def destinations(self, saved: Mapping[str, SavedTensor]) -> dict[str, torch.Tensor]:
        """Return fresh tensors for those inside it."""
        return _fresh(saved)

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
        out.own[path] = tensor
        return path

    return on_tensor


def _fresh(saved: Mapping[str, SavedTensor]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in saved.items()}


def _fits(live: torch.Tensor, saved: SavedTensor) -> bool:
    return tuple(live.shape) == saved.shape and live.dtype == saved.dtype


def _match(
    live: Mapping[str, torch.Tensor], saved: Mapping[str, SavedTensor], ties: Mapping[str, str] | None = None
) -> dict[str, torch.Tensor]:
    problems = [
        f"missing: {name} is in the model and not in the checkpoint" for name in live if name not in saved
    ]
    for name in saved:
        if ties and name in ties:
            problems.append(f"tied: {name} is {_tie(None)} in the checkpoint and {_tie(ties[name])} here")
        elif name not in live:
            problems.append(f"unexpected: {name} is in the checkpoint and not in the model")
    for name in live.keys() & saved.keys():
        if not _fits(live[name], saved[name]):
            was, now = saved[name], live[name]
            problems.append(
                f"shape: {name} is {was.dtype} {list(was.shape)} in the checkpoint, "
                f"{now.dtype} {list(now.shape)} in the model"
            )
    if problems:
        raise mismatch(sorted(problems))
    return {name: live[name] for name in saved}
