"""Clients of a gateway."""

from paceline.client.client import AsyncClient
from paceline.client.resuming import ResumeFailed, ResumePolicy
from paceline.client.sync import Client

__all__ = ["AsyncClient", "Client", "ResumeFailed", "ResumePolicy"]
