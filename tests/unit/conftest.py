from __future__ import annotations

import gc

from hypothesis import settings

# A busy machine is no failure, and a failure must be there again on the next run.
settings.register_profile("paceline", deadline=None, derandomize=True)
settings.load_profile("paceline")

# What imports make lives to the end. Looking through it for garbage, again and again, took a tenth of the time.
gc.disable()


def pytest_collection_finish() -> None:
    """Everything is imported: from here on garbage is looked for, but among new objects only."""
    gc.freeze()
    gc.enable()
