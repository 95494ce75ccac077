"""Reads checkpoint files strictly: configurations, tensors, adapters. Knows no drafting method and no engine."""
