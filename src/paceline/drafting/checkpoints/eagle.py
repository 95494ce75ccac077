"""EAGLE heads from a folder, whatever layout they are in."""

from __future__ import annotations

from paceline.drafting.checkpoints.eagle_checkpoint import EagleCheckpoint, EagleConfig, EagleKind

__all__ = ["EagleCheckpoint", "EagleConfig", "EagleKind"]
