"""Which hidden states of the target a head builds on, and how several become one row."""

from __future__ import annotations

import hashlib

import torch
from torch.nn import functional

from paceline.drafting.checkpoints.eagle import EagleCheckpoint
from paceline.engine.features import FeatureTaps


def make_taps(checkpoint: EagleCheckpoint) -> FeatureTaps:
    """What the target's runner must keep for this head; rows of `eagle3` are joined there, so that a third is kept."""
    config = checkpoint.config
    if config.kind == "eagle":
        return FeatureTaps(width=config.target_hidden_size)
    fusion = FeatureFusion(checkpoint)
    return FeatureTaps(config.aux_layers, fusion, config.hidden_size, fusion.fingerprint)


class FeatureFusion:
    """Makes one row of the residual streams that enter several layers of the target.

    The weights are kept in the number format and on the device of the rows that come.

    Args:
        checkpoint: of kind `eagle3`.
    """

    def __init__(self, checkpoint: EagleCheckpoint) -> None:
        config, weights = checkpoint.config, checkpoint.weights
        self._epsilon = config.rms_norm_eps
        self._weight = weights["fc.weight"]
        self._bias = weights.get("fc.bias")
        norms = [weights["input_norm.weight"]] if config.norm_before_fc else []
        if config.fc_norm:
            norms = [weights[f"fc_norm.{index}.weight"] for index in range(len(config.aux_layers))]
        self._norms = norms

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        tensors = [self._weight, *self._norms] + ([] if self._bias is None else [self._bias])
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def fingerprint(self) -> str:
        """The same for the same weights, wherever they were loaded."""
        digest = hashlib.blake2b(f"{self._epsilon} {len(self._norms)}".encode(), digest_size=8)
        for tensor in [self._weight, *self._norms] + ([] if self._bias is None else [self._bias]):
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def __call__(self, joined: torch.Tensor, /) -> torch.Tensor:
        """The fused rows # [num_rows, num_layers * target_hidden_size] -> [num_rows, hidden_size]."""
        if (self._weight.dtype, self._weight.device) != (joined.dtype, joined.device):
            self._weight = self._weight.to(joined)
            self._bias = None if self._bias is None else self._bias.to(joined)
            self._norms = [norm.to(joined) for norm in self._norms]
        if self._norms:
            # One norm over the whole row, or one for each stream of it.
            parts = joined.chunk(len(self._norms), dim=-1)
            normed = [
                functional.rms_norm(part, norm.shape, norm, self._epsilon)
                for part, norm in zip(parts, self._norms, strict=True)
            ]
            joined = torch.cat(normed, dim=-1)
        return functional.linear(joined, self._weight, self._bias)
