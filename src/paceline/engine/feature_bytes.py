"""Features as bytes on the wire and back."""

from __future__ import annotations

import torch

from paceline.engine.features import FeatureTaps
from paceline.errors import InvalidArgument
from paceline.messages import MAX_FEATURE_BYTES, FeatureDtype, FeatureFormat, Features

_DTYPES = {
    FeatureDtype.FLOAT32: torch.float32,
    FeatureDtype.BFLOAT16: torch.bfloat16,
    FeatureDtype.FLOAT16: torch.float16,
}


def feature_format(taps: FeatureTaps, width: int, dtype: FeatureDtype) -> FeatureFormat:
    """What a replica says of the features that it serves or needs.

    Args:
        taps: which.
        width: numbers per row.
        dtype: how they are sent.
    """
    return FeatureFormat(taps.kind, width, dtype, taps.only_last)


def feature_dtype(dtype: torch.dtype) -> FeatureDtype:
    """How rows of a dtype are sent without loss; float32 for those that the wire does not know."""
    return next((name for name, known in _DTYPES.items() if known == dtype), FeatureDtype.FLOAT32)


def rows_per_message(width: int, dtype: FeatureDtype) -> int:
    """Rows that fit into one message, at least one."""
    return max(1, MAX_FEATURE_BYTES // (width * dtype.num_bytes))


def to_features(rows: torch.Tensor, first_row: int, dtype: FeatureDtype) -> Features:
    """Rows # [num_rows, width], the first of which is `first_row`, for the wire."""
    numbers = rows.detach().to(device="cpu", dtype=_DTYPES[dtype]).contiguous()
    return Features(first_row, rows.shape[0], rows.shape[1], dtype, numbers.view(torch.uint8).numpy().tobytes())


def from_features(features: Features, *, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The rows # [num_rows, width].

    Args:
        features: from a peer; as many bytes as they say.
        width: numbers per row that are expected.
        dtype: of the result.
        device: of the result.

    Raises:
        InvalidArgument: rows of another width came.
    """
    if features.width != width:
        raise InvalidArgument(
            f"features have {features.width} numbers per row, this drafter builds on {width}: let gateway and verifier "
            "serve the features of its own head",
            field="features.width",
        )
    numbers = torch.frombuffer(bytearray(features.data), dtype=_DTYPES[features.dtype])
    return numbers.view(features.num_rows, width).to(device=device, dtype=dtype)
