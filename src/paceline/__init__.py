"""Paceline: speculative decoding for large language models, served as a fleet."""

__version__ = "0.1.0"
