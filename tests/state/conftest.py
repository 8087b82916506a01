import pytest

from raycheck.state import placement

REAL_AT_ONCE_BYTES = placement.AT_ONCE_BYTES


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch):
    """Have these tests' little tensors wait and be guarded, as large ones are."""
    monkeypatch.setattr(placement, "AT_ONCE_BYTES", 0)
