"""Checkpoints: what a rank must save, and how it is put back."""

from zero_minimal.checkpoint import sharded_state  # noqa: F401
