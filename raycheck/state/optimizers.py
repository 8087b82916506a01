"""The part of the state that is an optimizer."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from raycheck.state.parts import Capture, Destinations, ModulePart, SavedTensor, fits, fresh
from raycheck.state.sharded import whole_piece


class _Stepping:
    """The names of the parameters that an optimizer steps.

    Args:
        ids: Per group, those of its parameters.
        parameter_names: By id, per module.
    """

    def __init__(self, ids: list[list[int]], parameter_names: list[dict[int, str]]) -> None:
        self._made_from = ids, parameter_names
        # Of a parameter in several modules the last name counts, as it does in `_named_parameters`.
        known = collections.ChainMap(*reversed(parameter_names))
        found = [list(map(known.get, each)) for each in ids]
        self.deferrable = [name for each in found for name in each if name is not None]
        self.names = [
            [name or _place_of(g, i) for i, name in enumerate(each)] for g, each in enumerate(found)
        ]
        """Per group."""

        self.by_id = {
            id_: name
            for each, names in zip(ids, self.names, strict=True)
            for id_, name in zip(each, names, strict=True)
        }

    def is_made_from(self, ids: list[list[int]], parameter_names: list[dict[int, str]]) -> bool:
        return (ids, parameter_names) == self._made_from


class _Fields:
    """The names of the fields of an optimizer's state.

    Args:
        name: What all names begin with.
        stepping: What it steps.
        ids: Those of the parameters that have state.
        counts: How many fields each has.
        keys: Of all fields.
    """

    def __init__(
        self, name: str, stepping: _Stepping, ids: list[int], counts: list[int], keys: list[Any]
    ) -> None:
        self._stepping, self._made_from = stepping, (ids, counts, keys)
        owners = [stepping.by_id.get(id_) for id_ in ids]
        self.owners = [owner for owner, count in zip(owners, counts, strict=True) for _ in range(count)]
        """Per field, its parameter; None: left over, no group has this parameter any more."""

        self.full_names = [f"{name}.{owner}.{key}" for owner, key in zip(self.owners, keys, strict=True)]
        self.has_left_over = None in owners

    def is_made_from(self, stepping: _Stepping, ids: list[int], counts: list[int], keys: list[Any]) -> bool:
        return stepping is self._stepping and (ids, counts, keys) == self._made_from


class OptimizerPart:
    """An optimizer's state, keyed by parameter name, and its groups' options."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, modules: Sequence[ModulePart]) -> None:
        self.name = name
        self._optimizer = optimizer
        self._modules = modules
        self._stepping = _Stepping([], [])
        self._fields = _Fields(name, self._stepping, [], [], [])

    def capture(self, out: Capture) -> None:
        """Add the state's tensors as shared, its other values and the groups as values.

        What this optimizer steps is deferrable: its hook guards it.
        """
        groups = self._optimizer.param_groups
        ids = [list(map(id, group["params"])) for group in groups]
        if not self._stepping.is_made_from(ids, out.parameter_names):
            self._stepping = _Stepping(ids, out.parameter_names)
        out.deferrable += self._stepping.deferrable
        described = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": names}
            for group, names in zip(groups, self._stepping.names, strict=True)
        ]
        # No keyword of attach() has a star: these names cannot meet a parameter's.
        out.values[self.name] = {"*state": self._capture_state(out), "*groups": described}

    def _capture_state(self, out: Capture) -> dict[str, dict[str, Any]]:
        """Add the state's tensors; return its other values by parameter and key."""
        state = _stepped(self._optimizer).state
        fields = self._fields
        ids, counts = list(map(id, state)), list(map(len, state.values()))
        keys = list(itertools.chain.from_iterable(state.values()))
        if not fields.is_made_from(self._stepping, ids, counts, keys):
            fields = self._fields = _Fields(self.name, self._stepping, ids, counts, keys)
        values = list(itertools.chain.from_iterable(map(dict.values, state.values())))
        is_alone = _is_zero(self._optimizer)
        is_plain = all(issubclass(kind, torch.Tensor) for kind in set(map(type, values)))
        if is_plain and not is_alone and not fields.has_left_over:
            # A thousand tensors: no loop of ours.
            out.shared.add(fields.full_names, values)
            out.deferrable += fields.full_names
            return {}
        others: dict[str, dict[str, Any]] = {}
        for full_name, owner, key, value in zip(fields.full_names, fields.owners, keys, values, strict=True):
            if owner is None:
                continue
            out.deferrable.append(full_name)
            if not isinstance(value, torch.Tensor):
                others.setdefault(owner, {})[key] = value
            elif is_alone:
                out.held[full_name] = value, whole_piece(value)
            else:
                out.shared.add([full_name], [value])
        return others

    def find(self, saved: Mapping[str, SavedTensor], out: Destinations) -> None:
        """Add a tensor for each saved one; state that is not there yet is made, with no dummy step."""
        by_name = {name: parameter for parameter, name in self._named_parameters()}
        here = _held_here(self._optimizer)
        for name, tensor in saved.items():
            if name.startswith(f"{self.name}.*"):
                out.tensors |= fresh({name: tensor})
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
        if isinstance(present, torch.Tensor) and fits(present, saved):
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
