"""The live state behind ``attach(**state)``: what to save, and where to restore it.

Each keyword becomes a part. A part is walked through references at every
snapshot, so a replaced parameter or a reloaded optimizer is seen. Names are
those of the unwrapped model: no ``module.``, no ``_orig_mod.``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from raycheck.errors import CheckpointMismatchError, StateError

_WRAPPER_ATTRIBUTES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_EXTRA_STATE = "_extra_state"

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
        modules = {key: value for key, value in state.items() if isinstance(value, torch.nn.Module)}
        self.values = {key: value for key, value in state.items() if _is_immutable(value)}
        """Plain immutable values by keyword; assign here to change what is saved."""

        self.parts: list[Part] = []
        for key, value in state.items():
            _check_keyword(key)
            self.parts.append(self._part(key, value, modules))
        self.stateful = [value for value in state.values() if callable(getattr(value, "state_dict", None))]
        self.optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]

    def _part(self, key: str, value: Any, modules: Mapping[str, torch.nn.Module]) -> Part:
        if isinstance(value, torch.nn.Module):
            return ModulePart(key, value)
        if isinstance(value, torch.optim.Optimizer):
            return OptimizerPart(key, value, modules)
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
        for part in self.parts:
            part.capture(out)
        # Only what an optimizer of ours steps is guarded by its hook.
        stepped = {id(p) for o in self.optimizers for group in o.param_groups for p in group["params"]}
        out.deferrable |= {name for name, tensor in out.shared.items() if id(tensor) in stepped}
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
        """Ask every object that can tell, by a method ``check_state_dict``, whether it could load.

        Raises:
            CheckpointMismatchError: If one could not. Nothing live has changed.
        """
        for part in self.parts:
            if isinstance(part, StatefulPart) and part.name in values:
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
        self._module = module

    def capture(self, out: Capture) -> None:
        """Add the parameters as shared, the buffers as own."""
        for name, tensor, is_parameter in self._tensors():
            (out.shared if is_parameter else out.own)[name] = tensor
        extra = {
            name: module.get_extra_state()
            for name, module in unwrapped_modules(self._module, self.name)
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state
        }
        out.values[self.name] = extra

    def destinations(self, saved: Mapping[str, SavedTensor]) -> dict[str, torch.Tensor]:
        """Return parameters and buffers by name."""
        live = {name: tensor for name, tensor, _ in self._tensors()}
        return _match(live, {n: t for n, t in saved.items() if _EXTRA_STATE not in n})

    def load(self, values: Any, restored: Mapping[str, torch.Tensor]) -> None:
        """Put back extra state."""
        for name, module in unwrapped_modules(self._module, self.name):
            if values and name in values:
                module.set_extra_state(values[name])

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        seen: set[int] = set()
        for prefix, module in unwrapped_modules(self._module, self.name):
            for name, parameter in module._parameters.items():
                # A tied parameter is stored once, under its first name.
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{prefix}.{name}", parameter, True
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}", buffer, False


def unwrapped_modules(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield every submodule once with its name below ``prefix``, looking through wrappers."""
    yield from _walk(module, prefix, set())


def _walk(module: torch.nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, torch.nn.Module]]:
    module = _unwrap(module)
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}.{name}", seen)


def _unwrap(module: torch.nn.Module) -> torch.nn.Module:
    while True:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            module = module.module
            continue
        for attribute in _WRAPPER_ATTRIBUTES:
            if attribute in module._modules:
                inner = module._modules[attribute]
                assert inner is not None
                module = inner
                break
        else:
            return module


class OptimizerPart:
    """An optimizer's state, keyed by parameter name, and its groups' options."""

    def __init__(
        self, name: str, optimizer: torch.optim.Optimizer, modules: Mapping[str, torch.nn.Module]
    ) -> None:
        self.name = name
        self._optimizer = optimizer
        self._modules = modules

    def capture(self, out: Capture) -> None:
        """Add the state's tensors as shared, its other values and the groups as values."""
        names = self._parameter_names()
        state: dict[str, dict[str, Any]] = {}
        for parameter, fields in self._optimizer.state.items():
            parameter_name = names[id(parameter)]
            for key, value in fields.items():
                if isinstance(value, torch.Tensor):
                    name = f"{self.name}.{parameter_name}.{key}"
                    out.shared[name] = value
                    out.deferrable.add(name)
                else:
                    state.setdefault(parameter_name, {})[key] = value
        groups = [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [names[id(parameter)] for parameter in group["params"]],
            }
            for group in self._optimizer.param_groups
        ]
        # No keyword of attach() has a star: these names cannot meet a parameter's.
        out.values[self.name] = {"*state": state, "*groups": groups}

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
        names = {
            id(tensor): name
            for key, module in self._modules.items()
            for name, tensor, is_parameter in ModulePart(key, module)._tensors()
            if is_parameter
        }
        for g, group in enumerate(self._optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                yield parameter, names.get(id(parameter), f"param[{g}][{i}]")

    def _parameter_names(self) -> dict[int, str]:
        return {id(parameter): name for parameter, name in self._named_parameters()}


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


def _match(live: Mapping[str, torch.Tensor], saved: Mapping[str, SavedTensor]) -> dict[str, torch.Tensor]:
    problems = [
        f"missing: {name} is in the model and not in the checkpoint" for name in live if name not in saved
    ]
    problems += [
        f"unexpected: {name} is in the checkpoint and not in the model" for name in saved if name not in live
    ]
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
