"""Runs models: loading, key/value cache, forward passes, sampling."""
