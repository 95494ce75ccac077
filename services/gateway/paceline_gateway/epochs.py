"""The fencing number of whoever owns a session next: newer than all before, and nobody else's.

The record tells the number before. But a store that fails over may have forgotten the newest ones, while the gateways
that took them go on until they hear of it, and replicas hold their sessions; two owners under one number would be given
each other's verdicts. So a number comes from the clock, and its last bits from chance: it is newer than a forgotten
one, and another even if two gateways take theirs in one millisecond, or after a record of one whose clock is ahead.
"""

from __future__ import annotations

import secrets
import time

_CHANCE_BITS = 20
"""Below the milliseconds since 1970, which leave room for them in 63 bits until the year 2248."""


def next_epoch(before: int = 0) -> int:
    """A number for the next owner of a name.

    Args:
        before: that of its record; 0 where the store knows nothing of the name.
    """
    now_ms = time.time_ns() // 1_000_000
    return max(before, now_ms << _CHANCE_BITS) + 1 + secrets.randbits(_CHANCE_BITS)
