"""Resumable data loading: sampler and loader."""

from __future__ import annotations

from raycheck.data.adopt import ray_data

__all__ = ["ray_data"]
