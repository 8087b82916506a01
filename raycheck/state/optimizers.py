"""The part of the state that is an optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from raycheck.state.parts import Capture, Destinations, ModulePart, SavedTensor, fits, fresh
from raycheck.state.sharded import whole_piece


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
            found = list(map(out.parameter_names.get, ids))
            out.deferrable += filter(None, found)
            parameters = [name or _place_of(g, i) for i, name in enumerate(found)]
            names.update(zip(ids, parameters, strict=True))
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({**options, "params": parameters})
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
            out.deferrable += full_names
            return {}
        others: dict[str, dict[str, Any]] = {}
        owners = ((name, key) for name, each in zip(parameter_names, keys, strict=True) for key in each)
        for full_name, (name, key), value in zip(self._full_names, owners, values, strict=True):
            if full_name is None or name is None:
                continue
            out.deferrable.append(full_name)
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
