"""What a pool publishes for the doors: which replicas there are and what they offer, at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.messages import FeatureFormat
from paceline_gateway.effects import Replica


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """A pool at one moment.

    Attributes:
        ready: replicas that take sessions.
        draining: addresses of those that take none any more, while running sessions may go on there.
        troubles: per address of the others, why they cannot be used.
        settled: discovery has answered, and every replica has been tried at least once.
        seen_methods: methods on offer, now or when a replica that is away was last there.
        nothing_found: why there is no replica to be tried; empty if there is one.
    """

    ready: tuple[Replica, ...] = ()
    troubles: tuple[tuple[str, str], ...] = ()
    settled: bool = False
    draining: tuple[str, ...] = ()
    seen_methods: tuple[str, ...] = ()
    nothing_found: str = ""

    @property
    def max_model_len(self) -> int:
        """Tokens that a session may hold where there is most room; 0 without a replica."""
        return max((replica.info.max_model_len for replica in self.ready), default=0)

    @property
    def vocab_size(self) -> int:
        """Token ids that every replica knows; 0 without a replica."""
        return min((replica.info.vocab_size for replica in self.ready), default=0)

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods on offer, each once; those of a chain one by one."""
        return methods_of(self.ready)

    def offers(self, method: str, served: Sequence[FeatureFormat | None] = (None,)) -> bool:
        """Whether a ready drafter can draft by the method, empty for any, where verifiers serve such features."""
        return any(
            (not method or method in replica.info.methods) and any(map(replica.finds_features, served))
            for replica in self.ready
        )

    def build_on_prompts(self, method: str) -> bool:
        """Of drafters: whether one, by the method if one is named, may need the target's features of whole prompts."""
        wanted = [replica.info.features for replica in self.ready if replica.drafts_by(method)]
        return not wanted or any(features is not None and not features.only_last for features in wanted)

    def draft_themselves(self, method: str) -> bool:
        """Of verifiers: whether a ready one drafts by itself, by the method if one is named."""
        return any(replica.drafts_by(method) for replica in self.ready)

    @property
    def features(self) -> tuple[FeatureFormat | None, ...]:
        """Of verifiers: the features that each ready one serves."""
        return tuple([replica.info.features for replica in self.ready])

    def longest_context(self, method: str) -> int:
        """Tokens of context for the method where there is most room; 0 for no bound, or when nobody offers it."""
        limits = [replica.info.max_model_len for replica in self.ready if not method or method in replica.info.methods]
        return 0 if 0 in limits else max(limits, default=0)

    @property
    def why_not(self) -> str:
        """What keeps the others from being used, as one line."""
        return "; ".join([f"{address}: {trouble}" for address, trouble in self.troubles]) or self.nothing_found


def methods_of(replicas: Iterable[Replica | None]) -> tuple[str, ...]:
    """Methods of replicas, each once."""
    return tuple(dict.fromkeys(method for replica in replicas if replica for method in replica.info.methods))
