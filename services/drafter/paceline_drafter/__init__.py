"""The drafter service."""
