"""Resumable data loading: sampler and loader."""
