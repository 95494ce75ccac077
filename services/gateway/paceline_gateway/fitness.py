"""Whether a replica fits the gateway: the same model, and the same token for every id."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigurationError
from paceline.messages import ModelInfo
from paceline.text.tokenizer import Tokenizer
from paceline_gateway.effects import Lane

_HASH_CHARS = 12


@dataclass(frozen=True, slots=True)
class Fitness:
    """What replicas are measured by.

    Attributes:
        model: name of the target that the gateway offers.
        tokenizer_hash: fingerprint of the gateway's tokenizer.
        vocab_size: ids that it knows.
    """

    model: str
    tokenizer_hash: str
    vocab_size: int

    @classmethod
    def of(cls, model: str, tokenizer: Tokenizer) -> Fitness:
        """Measured by a tokenizer."""
        return cls(model, tokenizer.fingerprint, tokenizer.vocab_size)

    def check(self, lane: Lane, address: str, info: ModelInfo) -> None:
        """Refuses a replica that does not fit.

        A drafter without a tokenizer of its own, such as ngram, repeats the ids that it is given: it always fits.

        Raises:
            ConfigurationError: names both sides of the difference.
        """
        if info.model != self.model:
            raise ConfigurationError(
                f"{lane.value} {address} serves model {info.model!r}, but this gateway offers {self.model!r}; "
                "start both with the same model_name",
                field="model_name",
            )
        if lane is Lane.DRAFTER and not info.tokenizer_hash:
            return
        if info.tokenizer_hash != self.tokenizer_hash:
            raise ConfigurationError(
                f"{lane.value} {address} has another tokenizer: {_short(info.tokenizer_hash)}, {info.vocab_size} ids; "
                f"the gateway's: {_short(self.tokenizer_hash)}, {self.vocab_size} ids; use models of one family",
                field="model",
            )


def _short(tokenizer_hash: str) -> str:
    return f"hash {tokenizer_hash[:_HASH_CHARS]}" if tokenizer_hash else "no hash"
