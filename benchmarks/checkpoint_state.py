"""States to save: a model and its AdamW, with known sizes."""

from __future__ import annotations

import zlib

import torch

MIB = 1 << 20
BYTES_PER_PARAMETER = 12
"""float32: the parameter and two moments."""


class Block(torch.nn.Module):
    """A GPT-2 block's twelve parameters; it is never run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = torch.nn.LayerNorm(width)
        self.attn = torch.nn.Linear(width, 3 * width)
        self.proj = torch.nn.Linear(width, width)
        self.ln_2 = torch.nn.LayerNorm(width)
        self.fc = torch.nn.Linear(width, 4 * width)
        self.fc_proj = torch.nn.Linear(4 * width, width)


class GptLike(torch.nn.Module):
    """GPT-2's kinds of tensors, in as many blocks as make 500 parameters: 2,000 tensors with AdamW."""

    def __init__(self, size_bytes: int, num_blocks: int = 41) -> None:
        super().__init__()
        num_parameters = size_bytes / BYTES_PER_PARAMETER
        width = int((num_parameters / (12 * num_blocks + 24)) ** 0.5)
        self.wte = torch.nn.Embedding(20 * width, width)
        self.wpe = torch.nn.Embedding(4 * width, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.ln_f = torch.nn.LayerNorm(width)


class Large(torch.nn.Module):
    """Two parameters: eight tensors with AdamW."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        rows = size_bytes // BYTES_PER_PARAMETER // 2 // 4096
        self.first = torch.nn.Parameter(torch.randn(rows, 4096))
        self.second = torch.nn.Parameter(torch.randn(rows, 4096))


def make_state(kind: str, size_bytes: int, device: str = "cpu") -> tuple[torch.nn.Module, torch.optim.AdamW]:
    """Return a model and an AdamW that has made one step; gradients are there for more."""
    torch.manual_seed(0)
    model = {"gpt": GptLike, "large": Large}[kind](size_bytes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return all tensors of the state by the names that raycheck gives them."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        found[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            found[f"optimizer.model.{name}.{key}"] = value
    return found


def fingerprint(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return a checksum of each tensor's bytes."""
    return {
        name: zlib.crc32(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
        for name, tensor in tensors.items()
    }


def from_state_dicts(
    model: torch.nn.Module, model_dict: dict, optimizer_dict: dict
) -> dict[str, torch.Tensor]:
    """Return the tensors in two state dicts by the names that raycheck gives them."""
    found = {f"model.{name}": tensor for name, tensor in model_dict.items()}
    for index, (name, _) in enumerate(model.named_parameters()):
        for key, value in optimizer_dict["state"][index].items():
            found[f"optimizer.model.{name}.{key}"] = value
    return found
