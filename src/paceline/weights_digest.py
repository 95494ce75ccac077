"""A short name for the weights of a model, so that two replicas can be known to give the same tokens.

Files are sampled, not read: their sizes, their beginnings (where safetensors say which tensors there are) and pieces at
even distances. Only safetensors count, since models are loaded from nothing else. Guards against mistakes, such as a
rollout of other weights under an old name; not against somebody who wants two models to look the same. Names of files
play no part, how the weights are split over files does.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

_SUFFIX = ".safetensors"
_CONFIGURATION = "config.json"
_HEAD_BYTES = 1 << 20
_NUM_PIECES = 256
_PIECE_BYTES = 1 << 10
_DIGEST_BYTES = 8


def weights_digest(folder: Path) -> str:
    """The digest of a model's folder as hexadecimal digits; takes milliseconds.

    Args:
        folder: with its configuration and weights.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    configuration = folder / _CONFIGURATION
    if configuration.is_file():
        digest.update(configuration.read_bytes())
    for path in sorted(path for path in folder.iterdir() if path.suffix == _SUFFIX and path.is_file()):
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
            for index in range(_NUM_PIECES):
                file.seek(size * index // _NUM_PIECES)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


def same_weights(one: str, other: str) -> bool:
    """Whether two digests are, or may be, of the same weights; an empty one is not known."""
    return one == other or not one or not other
