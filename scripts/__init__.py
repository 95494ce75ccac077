"""Tools for developers: run them from the repository root."""
