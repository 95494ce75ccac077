"""Names of the drafting methods that Paceline has.

They stand apart from the methods themselves, which the gateway must not import to know what a request may ask for.
"""

from __future__ import annotations

POOL_METHODS = ("draft_model", "ngram")
"""Methods that need nothing of the target: any drafter may be told to use them."""

HEAD_METHODS = ("medusa", "eagle", "eagle3")
"""Methods of a head that builds on the target's hidden states: a drafter may be told to use one if its verifiers serve
these, and if it is given the head."""

CUT_METHODS = ("layerskip",)
"""Methods of the target's own first layers: a drafter may be told to use one if its model is the target."""

METHOD_NAMES = (*POOL_METHODS, *HEAD_METHODS, *CUT_METHODS)
"""All methods: what a request may name, and a drafter be told to use."""

SELF_DRAFT_METHODS = ("ngram", *HEAD_METHODS, *CUT_METHODS)
"""Methods that a verifier may be told to use."""
