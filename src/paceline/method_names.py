"""Names of the drafting methods that Paceline has.

They stand apart from the methods themselves, which the gateway must not import to know what a request may ask for.
"""

from __future__ import annotations

METHOD_NAMES = ("draft_model", "ngram")
"""Methods that a chain may name, and a request."""
