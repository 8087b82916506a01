"""Finding the tensors of a module under the names of the unwrapped model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

try:
    from torch.distributed.fsdp import FSDPModule
except ImportError:  # a torch without FSDP2
    FSDPModule = None  # type: ignore[assignment,misc]

_WRAPPER_ATTRIBUTES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleContent:
    """What a module holds. A tensor that is there twice counts once, under its first name."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    """The persistent ones."""

    ties: dict[str, str]
    """From each further name of a tensor to its first one."""

    with_extra_state: list[tuple[str, torch.nn.Module]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Node:
    """A submodule, and what its names were made from."""

    module: torch.nn.Module
    children: list[tuple[str, torch.nn.Module | None]]
    parameter_keys: list[str]
    parameter_names: list[str]
    buffer_keys: list[str]
    buffer_names: list[str]
    not_persistent: set[str]
    extra_state_name: str | None

    def is_current(self) -> bool:
        module = self.module
        return (
            list(module._modules.items()) == self.children
            and list(module._parameters) == self.parameter_keys
            and list(module._buffers) == self.buffer_keys
            and module._non_persistent_buffers_set == self.not_persistent
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
        self._nodes: list[_Node] = []
        self._gathered: list[Any] = []
        """FSDP2 modules, which may hold whole parameters in place of their shards after a forward."""

    def look(self) -> ModuleContent:
        """Return what the module holds now. Costs about a microsecond per submodule."""
        if not self._nodes or not all(map(_Node.is_current, self._nodes)):
            self._nodes = list(_visit(self._module, self._name, set()))
            modules = [node.module for node in self._nodes]
            self._gathered = [m for m in modules if FSDPModule is not None and isinstance(m, FSDPModule)]
        for module in self._gathered:
            module.reshard()
        parameters: list[tuple[str, Any]] = []
        buffers: list[tuple[str, Any]] = []
        with_extra_state = []
        for node in self._nodes:
            if node.parameter_names:
                parameters += zip(node.parameter_names, node.module._parameters.values(), strict=True)
            if node.buffer_names:
                kept = node.not_persistent
                buffers += zip(
                    node.buffer_names,
                    [tensor for key, tensor in node.module._buffers.items() if key not in kept],
                    strict=True,
                )
            if node.extra_state_name is not None:
                with_extra_state.append((node.extra_state_name, node.module))
        ties: dict[str, str] = {}
        return ModuleContent(_once(parameters, ties), _once(buffers, ties), ties, with_extra_state)


def _once(named: list[tuple[str, Any]], ties: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return the tensors by their first names, and add the further ones to ``ties``."""
    found = {name: tensor for name, tensor in named if tensor is not None}
    if len(set(map(id, found.values()))) == len(found):
        return found
    first_names: dict[int, str] = {}
    for name, tensor in found.items():
        first = first_names.setdefault(id(tensor), name)
        if first != name:
            ties[name] = first
    return {name: tensor for name, tensor in found.items() if name not in ties}


def _visit(module: torch.nn.Module, prefix: str, seen: set[int]) -> Iterator[_Node]:
    """Yield every submodule once; a wrapper counts, but adds nothing to a name."""
    if id(module) in seen:
        return
    seen.add(id(module))
    inner = _unwrapped(module)
    is_wrapper = inner is not None
    has_extra_state = type(module).get_extra_state is not torch.nn.Module.get_extra_state
    parameters = [] if is_wrapper else list(module._parameters)
    buffers = [] if is_wrapper else list(module._buffers)
    yield _Node(
        module=module,
        children=list(module._modules.items()),
        parameter_keys=list(module._parameters),
        parameter_names=[f"{prefix}.{key}" for key in parameters],
        buffer_keys=list(module._buffers),
        buffer_names=[f"{prefix}.{key}" for key in buffers if key not in module._non_persistent_buffers_set],
        not_persistent=set(module._non_persistent_buffers_set),
        extra_state_name=prefix if has_extra_state and not is_wrapper else None,
    )
    if inner is not None:
        yield from _visit(inner, prefix, seen)
        return
    for key, child in module._modules.items():
        if child is not None:
            yield from _visit(child, f"{prefix}.{key}", seen)


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module inside a wrapper; None if it is none."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        inner: torch.nn.Module = module.module
        return inner
    for attribute in _WRAPPER_ATTRIBUTES:
        if module._modules.get(attribute) is not None:
            return module._modules[attribute]
    return None
