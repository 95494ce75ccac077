"""Medusa heads from a folder, whatever layout they are in."""

from __future__ import annotations

from paceline.drafting.checkpoints.medusa_checkpoint import MedusaCheckpoint, MedusaConfig, ResidualLayer

__all__ = ["MedusaCheckpoint", "MedusaConfig", "ResidualLayer"]
