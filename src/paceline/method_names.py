"""Names of the drafting methods that Paceline has.

They stand apart from the methods themselves, which the gateway must not import to know what a request may ask for.
"""

from __future__ import annotations

METHOD_NAMES = ("draft_model", "ngram", "medusa", "eagle", "eagle3", "layerskip")
"""All methods: what a request may name."""

POOL_METHODS = ("draft_model", "ngram")
"""Methods that a drafter may be told to use, alone or in a chain."""

HEAD_METHODS = ("medusa", "eagle", "eagle3")
"""Methods of a head that builds on the target's hidden states: a drafter may be told to use one if its verifiers serve
these, and if it is given the head."""

CUT_METHODS = ("layerskip",)
"""Methods of the target's own first layers: a drafter may be told to use one if its model is the target."""

SELF_DRAFT_METHODS = ("ngram", "medusa", "eagle", "eagle3", "layerskip")
"""Methods that a verifier may be told to use."""
