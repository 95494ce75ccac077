"""Checkpoints of drafting heads: strict loaders for the layouts in the wild, and writers for our own.

Loaders consume every key, fill every parameter, take sizes from the tensors and hold them against the configuration and
the target; what does not fit is refused with a list. A head that is loaded wrongly does not fail, it only drafts badly,
so nothing is guessed.
"""
