"""Seeds of the choices of one request.

Each choice is a session of its own, so each has a seed of its own: a pure function of the request's seed and of the
choice's place. The first one's is the request's, so that asking for more choices does not change it.
"""

from __future__ import annotations

import hashlib
import struct

_SEED_BITS = 63


def choice_seed(seed: int, prompt_index: int, choice_index: int) -> int:
    """Seed of one choice.

    Args:
        seed: the request's, in 64 bits with sign.
        prompt_index: which of the request's prompts.
        choice_index: which of the prompt's choices.

    Returns:
        `seed` itself for (0, 0), else 63 bits of a hash.
    """
    if prompt_index == 0 and choice_index == 0:
        return seed
    packed = struct.pack("<qqq", seed, prompt_index, choice_index)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"choice seed").digest()
    return int.from_bytes(digest, "little") & ((1 << _SEED_BITS) - 1)
