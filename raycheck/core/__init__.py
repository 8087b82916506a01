"""Decisions: pure functions and state machines. Standard library only; no clock, no I/O."""
