"""Clients of a gateway."""

from paceline.client.client import AsyncClient

__all__ = ["AsyncClient"]
