"""The live state behind ``attach(**state)``: what to save, and where to restore it.

Each keyword becomes a part. A part is walked through references at every
snapshot, so a replaced parameter or a reloaded optimizer is seen. Names are
those of the unwrapped model: no ``module.``, no ``_orig_mod.``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from raycheck.core.plan import Piece
from raycheck.core.renames import Renames
from raycheck.errors import CheckpointMismatchError, StateError
from raycheck.state.modules import ModuleWalk
from raycheck.state.sharded import are_any_sharded, whole_piece

_EXTRA_STATE = "_extra_state"
_TIES = "*ties"

RESERVED = ("optional", "rename", "rng", "strict", "values")
"""Keywords that attach() or the checkpoint itself takes."""


@dataclasses.dataclass(slots=True)
class Capture:
    """References to everything that makes up the state at a step boundary; nothing is copied yet."""

    shared: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Tensors that all ranks hold alike: parameters and the optimizer's state for them."""

    held: dict[str, tuple[torch.Tensor, Piece]] = dataclasses.field(default_factory=dict)
    """Tensors of which this rank holds a part, or which it alone holds."""

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
                if _TIES in value:
                    value[_TIES] = {self._rename(n): self._rename(to) for n, to in value[_TIES].items()}
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
        out.parameter_names.update(zip(map(id, found.parameters.values()), found.parameters, strict=True))
        values: dict[str, Any] = {name: module.get_extra_state() for name, module in found.with_extra_state}
        if found.ties:
            values[_TIES] = found.ties
        out.values[self.name] = values

    def find(self, saved: Mapping[str, SavedTensor], out: Destinations) -> None:
        """Add parameters and buffers."""
        found = self._walk.look()
        extra = {n: t for n, t in saved.items() if _EXTRA_STATE in n}
        out.tensors |= _fresh(extra)
        wanted = {n: t for n, t in saved.items() if n not in extra}
        _match({**found.parameters, **found.buffers}, wanted, out, found.ties)

    def check(self, values: Any, out: Destinations) -> None:
        """Compare the ties: with others, a tensor would silently get what another one had."""
        saved: dict[str, str] = (values or {}).get(_TIES, {})
        live = self._walk.look().ties
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
        return {id(parameter): name for name, parameter in self._walk.look().parameters.items()}


def _tie(first_name: str | None) -> str:
    return f"tied to {first_name}" if first_name else "a tensor of its own"


class OptimizerPart:
    """An optimizer's state, keyed by parameter name, and its groups' options."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, modules: Sequence[ModulePart]) -> None:
        self.name = name
        self._optimizer = optimizer
        self._modules = modules
        self._structure: tuple[list[str | None], list[tuple[Any, ...]]] = [], []
        self._full_names: list[str | None] = []

    def capture(self, out: Capture) -> None:
        """Add the state's tensors as shared, its other values and the groups as values.

        What this optimizer steps is deferrable: its hook guards it.
        """
        names: dict[int, str] = {}
        groups = []
        for g, group in enumerate(self._optimizer.param_groups):
            ids = list(map(id, group["params"]))
            found = map(out.parameter_names.get, ids)
            parameters = [name or _place_of(g, i) for i, name in enumerate(found)]
            names.update(zip(ids, parameters, strict=True))
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({**options, "params": parameters})
        out.deferrable.update(out.shared.keys() & names.values())
        # No keyword of attach() has a star: these names cannot meet a parameter's.
        out.values[self.name] = {"*state": self._capture_state(out, names), "*groups": groups}

    def _capture_state(self, out: Capture, names: Mapping[int, str]) -> dict[str, dict[str, Any]]:
        """Add the state's tensors; return its other values by parameter and key."""
        state = _stepped(self._optimizer).state
        # None: left over, no group has this parameter any more.
        parameter_names = list(map(names.get, map(id, state)))
        keys = list(map(tuple, state.values()))
        if (parameter_names, keys) != self._structure:
            self._structure = parameter_names, keys
            self._full_names = self._join(parameter_names, keys)
        values = list(itertools.chain.from_iterable(map(dict.values, state.values())))
        is_alone = _held_here(self._optimizer) is not None
        is_plain = all(issubclass(kind, torch.Tensor) for kind in set(map(type, values)))
        if is_plain and not is_alone and None not in self._full_names:
            # A thousand tensors: no loop of ours.
            full_names: list[Any] = self._full_names
            out.shared.update(zip(full_names, values, strict=True))
            out.deferrable.update(full_names)
            return {}
        others: dict[str, dict[str, Any]] = {}
        owners = ((name, key) for name, each in zip(parameter_names, keys, strict=True) for key in each)
        for full_name, (name, key), value in zip(self._full_names, owners, values, strict=True):
            if full_name is None or name is None:
                continue
            out.deferrable.add(full_name)
            if not isinstance(value, torch.Tensor):
                others.setdefault(name, {})[key] = value
            elif is_alone:
                out.held[full_name] = value, whole_piece(value)
            else:
                out.shared[full_name] = value
        return others

    def _join(
        self, parameter_names: Sequence[str | None], keys: Sequence[tuple[Any, ...]]
    ) -> list[str | None]:
        """Return the full names of all fields; joined again only when parameters or fields change."""
        return [
            None if name is None else f"{self.name}.{name}.{key}"
            for name, each in zip(parameter_names, keys, strict=True)
            for key in each
        ]

    def find(self, saved: Mapping[str, SavedTensor], out: Destinations) -> None:
        """Add a tensor for each saved one; state that is not there yet is made, with no dummy step."""
        by_name = {name: parameter for parameter, name in self._named_parameters()}
        here = _held_here(self._optimizer)
        for name, tensor in saved.items():
            if name.startswith(f"{self.name}.*"):
                out.tensors |= _fresh({name: tensor})
                continue
            parameter_name, _, key = name.removeprefix(f"{self.name}.").rpartition(".")
            parameter = by_name.get(parameter_name)
            if parameter is None:
                out.unmatched.append(f"unexpected: {name} is in the checkpoint and not in the optimizer")
                continue
            if here is not None:
                out.apart.add(name)
            if here is None or id(parameter) in here:
                out.tensors[name] = self._slot(parameter, key, tensor)

    def check(self, values: Any, out: Destinations) -> None:
        """Compare the number of groups: their options are restored one by one."""
        saved, live = len(values["*groups"]), len(self._optimizer.param_groups)
        if saved != live:
            out.unmatched.append(f"groups: {self.name} has {saved} in the checkpoint and {live} here")

    def load(self, values: Any, restored: Mapping[str, torch.Tensor]) -> None:
        """Install state and group options. Learning rates that are tensors keep their identity."""
        by_name = {name: parameter for parameter, name in self._named_parameters()}
        state: dict[torch.Tensor, dict[str, Any]] = {}
        for name, tensor in restored.items():
            parameter_name, _, key = name.removeprefix(f"{self.name}.").rpartition(".")
            if name.startswith(f"{self.name}.") and parameter_name in by_name:
                state.setdefault(by_name[parameter_name], {})[key] = tensor
        for parameter_name, fields in values["*state"].items():
            if parameter_name in by_name:
                state.setdefault(by_name[parameter_name], {}).update(fields)
        live = _stepped(self._optimizer).state
        live.clear()
        live.update(state)
        groups = self._optimizer.param_groups
        if len(groups) == len(values["*groups"]):
            for group, saved in zip(groups, values["*groups"], strict=True):
                _restore_options(group, saved)

    def _slot(self, parameter: torch.Tensor, key: str, saved: SavedTensor) -> torch.Tensor:
        present = _stepped(self._optimizer).state.get(parameter, {}).get(key)
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


def _stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that has the state: that of ZeRO is inside, for the parameters of this rank."""
    inner: torch.optim.Optimizer = (
        getattr(optimizer, "optim", optimizer) if _is_zero(optimizer) else optimizer
    )
    return inner


def _held_here(optimizer: torch.optim.Optimizer) -> set[int] | None:
    """Return the ids of the parameters whose state this rank alone holds; None if all ranks hold all."""
    if not _is_zero(optimizer):
        return None
    return {id(p) for group in _stepped(optimizer).param_groups for p in group["params"]}


def _is_zero(optimizer: torch.optim.Optimizer) -> bool:
    # By name: importing the class fails where torch has no distributed package.
    return any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__)


def _restore_options(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        if key == "params":
            continue
        live = group.get(key)
        if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
            live.copy_(value)
        else:
            group[key] = value


def _name_of(parameter: torch.Tensor, known: Mapping[int, str], group: int, index: int) -> str:
    """Return a parameter's name in its module, or its place if it is in none of ours."""
    return known.get(id(parameter)) or _place_of(group, index)


def _place_of(group: int, index: int) -> str:
    return f"param[{group}][{index}]"


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
        out.tensors |= _fresh(saved)

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
        out.tensors |= _fresh(saved)

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
        out.tensors |= _fresh(saved)

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
        out.own[path] = tensor
        return path

    return on_tensor


def _fresh(saved: Mapping[str, SavedTensor]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in saved.items()}


def _fits(live: torch.Tensor, saved: SavedTensor) -> bool:
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
        elif _fits(now, was):
            out.tensors[name] = now
        else:
            out.misfits.append(
                f"shape: {name} is {was.dtype} {list(was.shape)} in the checkpoint, "
                f"{now.dtype} {list(now.shape)} in the model"
            )
