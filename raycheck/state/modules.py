"""Finding the tensors of a module under the names of the unwrapped model."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch

from raycheck.state.named import Named

try:
    from torch.distributed.fsdp import FSDPModule
except ImportError:  # a torch without FSDP2
    FSDPModule = None  # type: ignore[assignment,misc]

EXTRA_STATE = "_extra_state"
_WRAPPER_ATTRIBUTES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleContent:
    """What a module holds. A tensor that is there twice counts once, under its first name."""

    parameters: Named
    buffers: Named
    """The persistent ones."""

    ties: dict[str, str]
    """From each further name of a tensor to its first one."""

    with_extra_state: list[tuple[str, torch.nn.Module]]
    """Submodules that have some, by the name that torch gives it in a state dict."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Node:
    """A submodule, and what names of its tensors are made from."""

    module: torch.nn.Module
    prefix: str
    is_wrapper: bool
    """Counts, but adds no tensor and nothing to a name."""


_structure_of = operator.attrgetter("_modules", "_parameters", "_buffers")
_not_kept_of = operator.attrgetter("_non_persistent_buffers_set")
_parameters_of = operator.attrgetter("_parameters")
_values_of = operator.methodcaller("values")


class _Walked:
    """A module's submodules as they were found, and the names of what they hold.

    Everything that is asked at each snapshot is done in whole lists: a call for
    each of hundreds of submodules would be the stall.
    """

    def __init__(self, nodes: list[_Node]) -> None:
        self._modules = [node.module for node in nodes]
        self._with_buffers = [module for module in self._modules if module._buffers]
        self._structure = self._look_at_structure()
        inner = [node for node in nodes if not node.is_wrapper]
        self._inner = [node.module for node in inner]
        self._parameter_names = [f"{node.prefix}.{key}" for node in inner for key in node.module._parameters]
        kept = [
            (node, key)
            for node in inner
            for key in node.module._buffers
            if key not in node.module._non_persistent_buffers_set
        ]
        self._buffer_names = [f"{node.prefix}.{key}" for node, key in kept]
        self._buffer_places = [(node.module, key) for node, key in kept]
        self.with_extra_state = [
            (f"{node.prefix}.{EXTRA_STATE}", node.module) for node in inner if _has_extra_state(node.module)
        ]
        self.gathered: list[Any] = [
            module for module in self._modules if FSDPModule is not None and isinstance(module, FSDPModule)
        ]
        """FSDP2 modules, which may hold whole parameters in place of their shards after a forward."""

    def is_current(self) -> bool:
        """Return whether submodules and keys are what they were; their tensors may be others."""
        return self._look_at_structure() == self._structure

    def parameters(self) -> tuple[list[str], list[Any]]:
        """Return names, and the present parameters, None where there is none."""
        values = itertools.chain.from_iterable(map(_values_of, map(_parameters_of, self._inner)))
        return self._parameter_names, list(values)

    def buffers(self) -> tuple[list[str], list[Any]]:
        """Return names, and the present persistent buffers, None where there is none."""
        return self._buffer_names, [module._buffers[key] for module, key in self._buffer_places]

    def _look_at_structure(self) -> tuple[Any, ...]:
        held = [*zip(*map(_structure_of, self._modules), strict=True)]
        children = list(itertools.chain.from_iterable(map(_values_of, held[0])))
        # One that comes to have buffers is seen by their number.
        held.append(tuple(map(_not_kept_of, self._with_buffers)))
        # Flat lists of keys, and how many are whose: a list for each submodule would take longer to make.
        return (
            children,
            [list(itertools.chain.from_iterable(each)) for each in held],
            [list(map(len, each)) for each in held],
        )


class ModuleWalk:
    """Looks tensors up afresh each time, but joins names only when the structure has changed.

    Args:
        name: What all names begin with.
        module: May be wrapped: compiled, data parallel, checkpointed.
    """

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self._name = name
        self._module = module
        self._walked: _Walked | None = None

    def look(self) -> ModuleContent:
        """Return what the module holds now. Costs about a microsecond per submodule."""
        walked = self._walked
        if walked is None or not walked.is_current():
            walked = self._walked = _Walked(list(_visit(self._module, self._name, set())))
        for module in walked.gathered:
            module.reshard()
        ties: dict[str, str] = {}
        return ModuleContent(
            _once(*walked.parameters(), ties), _once(*walked.buffers(), ties), ties, walked.with_extra_state
        )


def _once(names: list[str], tensors: list[Any], ties: dict[str, str]) -> Named:
    """Return the tensors under their first names, and add the further ones to ``ties``."""
    ids = set(map(id, tensors))
    if len(ids) == len(tensors) and id(None) not in ids:
        return Named(names, tensors)
    first_names: dict[int, str] = {}
    found = Named()
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is None:
            continue
        first = first_names.setdefault(id(tensor), name)
        if first == name:
            found.add([name], [tensor])
        else:
            ties[name] = first
    return found


def _visit(module: torch.nn.Module, prefix: str, seen: set[int]) -> Iterator[_Node]:
    """Yield every submodule once; a wrapper counts, but adds nothing to a name."""
    if id(module) in seen:
        return
    seen.add(id(module))
    inner = _unwrapped(module)
    yield _Node(module, prefix, is_wrapper=inner is not None)
    if inner is not None:
        yield from _visit(inner, prefix, seen)
        return
    for key, child in module._modules.items():
        if child is not None:
            yield from _visit(child, f"{prefix}.{key}", seen)


def _has_extra_state(module: torch.nn.Module) -> bool:
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module inside a wrapper; None if it is none."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        inner: torch.nn.Module = module.module
        return inner
    for attribute in _WRAPPER_ATTRIBUTES:
        if module._modules.get(attribute) is not None:
            return module._modules[attribute]
    return None
