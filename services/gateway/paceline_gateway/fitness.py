"""Whether a replica fits the gateway: the same model, and the same token for every id."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from paceline.errors import ConfigurationError, PacelineError
from paceline.messages import FeatureFormat, ModelInfo
from paceline.text.tokenizer import Tokenizer
from paceline_gateway.effects import Lane

logger = logging.getLogger(__name__)

_HASH_CHARS = 12

AskVocabulary = Callable[[], Awaitable[Mapping[int, str]]]
"""Asks the replica for its vocabulary; raises `PacelineError`."""

AskFeatures = Callable[[], Awaitable[tuple[FeatureFormat | None, ...]]]
"""Tells the features that each verifier serves; nothing as long as there is no verifier."""

Check = Callable[[str, ModelInfo, AskVocabulary], Awaitable[None]]
"""Raises `ConfigurationError` for a replica, named by its address, that does not fit."""


class Fitness:
    """What replicas are measured by.

    Args:
        model: name of the target that the gateway offers.
        tokenizer: the gateway's.
        served: asks which features each verifier serves; None where nobody knows.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        served: AskFeatures | None = None,
    ) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._served = served
        # Per fingerprint what came of the comparison: a vocabulary is large, a replica that does not fit is tried again
        # and again, and the pods of one model come and go under ever new addresses.
        self._differences: dict[str, str] = {}
        self._weights: dict[str, str] = {}

    async def check(self, lane: Lane, address: str, info: ModelInfo, ask: AskVocabulary) -> None:
        """Refuses a replica that does not fit.

        A drafter without a tokenizer of its own, such as ngram, repeats the ids that it is given: it always fits.

        Args:
            lane: its kind.
            address: its address.
            info: what it says of itself.
            ask: asks for its vocabulary; used only when the fingerprints differ.

        Raises:
            ConfigurationError: names both sides of the difference.
        """
        if info.model != self.model:
            raise ConfigurationError(
                f"{lane.value} {address} serves model {info.model!r}, but this gateway offers {self.model!r}; "
                "start both with the same model_name",
                field="model_name",
            )
        if lane is Lane.DRAFTER:
            await self._check_features(address, info)
        elif info.weights_digest:
            self._compare_weights(address, info.weights_digest)
        if lane is Lane.DRAFTER and not info.tokenizer_hash:
            return
        if info.tokenizer_hash != self._tokenizer.fingerprint:
            difference = await self._difference(address, info, ask)
            raise ConfigurationError(
                f"{lane.value} {address} has another tokenizer: {difference}; use models of one family", field="model"
            )

    def _compare_weights(self, address: str, digest: str) -> None:
        """Other weights of the same name are welcome, as while they are rolled out: each session keeps to its own."""
        others = {other: there for other, there in self._weights.items() if other != digest}
        if others and digest not in self._weights:
            logger.warning(
                "verifier %s serves other weights of model %s (digest %s) than %s: no session can move between them",
                address,
                self.model,
                digest,
                ", ".join([f"{there} ({other})" for other, there in others.items()]),
            )
        self._weights[digest] = address

    async def _check_features(self, address: str, info: ModelInfo) -> None:
        """Refuses a drafter that builds on features which no verifier serves; without a verifier nobody knows."""
        wanted = info.features
        if wanted is None or self._served is None:
            return
        served = await self._served()
        if not served or any(map(wanted.fits, served)):
            return
        there = ", ".join(sorted({"none" if features is None else str(features) for features in served}))
        raise ConfigurationError(
            f"{Lane.DRAFTER.value} {address} builds on the target's features {wanted}, but verifiers serve {there}; "
            "give them what this drafter needs with served_features, or let them draft by themselves",
            field="served_features",
        )

    async def _difference(self, address: str, info: ModelInfo, ask: AskVocabulary) -> str:
        """Names the first token that differs, or both fingerprints where the replica does not tell its tokens."""
        known = self._differences.get(info.tokenizer_hash)
        if known is not None:
            return known
        difference = (
            f"{_short(info.tokenizer_hash)}, {info.vocab_size} ids; the gateway's: "
            f"{_short(self._tokenizer.fingerprint)}, {self._tokenizer.vocab_size} ids"
        )
        try:
            vocabulary = await ask()
        except PacelineError as error:
            logger.info("%s does not tell its vocabulary: %s", address, error.message)
            return difference
        if vocabulary:
            found = await asyncio.to_thread(self._tokenizer.first_difference, vocabulary)
            difference = difference if found is None else str(found)
        self._differences[info.tokenizer_hash] = difference
        return difference


def _short(tokenizer_hash: str) -> str:
    return f"hash {tokenizer_hash[:_HASH_CHARS]}" if tokenizer_hash else "no hash"
