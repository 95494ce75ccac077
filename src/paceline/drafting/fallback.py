"""A chain of methods: for each draft the first one that proposes anything is used.

Put cheap methods that often find nothing first, for instance `ngram`, and one that always proposes last. A method that
finishes without a token hands the draft on within the same step, so a miss costs no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.drafting.method import DraftJob, DraftMethod, MethodInfo
from paceline.errors import CapacityExceeded, ConfigurationError
from paceline.kv_usage import HoldsRows, KvUsage

if TYPE_CHECKING:
    from paceline.engine.features import FeatureTaps


class FallbackMethod:
    """Asks several methods in order.

    A session that finds no room in one of them drafts with the others.

    Args:
        methods: at least one, in order of preference, with different names.
    """

    def __init__(self, methods: Sequence[DraftMethod]) -> None:
        names = [method.info.name for method in methods]
        if not names or len(set(names)) < len(names):
            raise ConfigurationError(f"a chain needs one or more different methods, not {names}", field="methods")
        self._methods = tuple(methods)
        # Which methods hold a session, in order of preference.
        self._holders: dict[str, tuple[DraftMethod, ...]] = {}
        self._info = _joint_info([method.info for method in methods])

    @property
    def info(self) -> MethodInfo:
        """Facts about the chain: what it may propose and cost in all; 0 for a limit that one of its methods lacks."""
        return self._info

    def open(self, session: str) -> None:
        """Opens the session in every method that has room.

        Raises:
            CapacityExceeded: none has.
        """
        self.close(session)
        holders: list[DraftMethod] = []
        refusal: CapacityExceeded | None = None
        for method in self._methods:
            try:
                method.open(session)
            except CapacityExceeded as error:
                refusal = error
            else:
                holders.append(method)
        if refusal is not None and not holders:
            raise refusal
        self._holders[session] = tuple(holders)

    def advance(self, jobs: Sequence[DraftJob]) -> None:
        """Takes one step for all jobs.

        `job.method` says which method a draft is with, so a draft goes on where it began; one that ends without a token
        goes to the next method at once, in this step. `job.only` leaves out all methods but one.
        """
        pending = [job for job in jobs if not job.done]
        for method in self._methods:
            names = method.info.methods
            mine = [job for job in pending if self._may_draft(method, names, job)]
            if not mine:
                continue
            method.advance(mine)
            taken = {id(job) for job in mine}
            missed = [job for job in mine if job.done and not job.tokens]
            for job in missed:
                job.done = False
                job.method = ""
            pending = [job for job in pending if id(job) not in taken] + missed
        for job in pending:
            job.done = True

    def _may_draft(self, method: DraftMethod, names: tuple[str, ...], job: DraftJob) -> bool:
        begun_elsewhere = job.method and job.method not in names
        excluded = job.only and job.only not in names
        return not begun_elsewhere and not excluded and method in self._holders.get(job.session, ())

    def kv_len(self, session: str) -> int:
        """Key/value rows that the session holds in the method that holds most."""
        return max((method.kv_len(session) for method in self._holders.get(session, ())), default=0)

    def kv_usage(self) -> KvUsage:
        """Room taken in all methods together; may be asked from any thread."""
        usages = [method.kv_usage() for method in self._methods if isinstance(method, HoldsRows)]
        return KvUsage(sum(usage.used_tokens for usage in usages), sum(usage.capacity_tokens for usage in usages))

    def close(self, session: str) -> None:
        """Closes the session in every method."""
        for method in self._holders.pop(session, ()):
            method.close(session)


def _joint_info(facts: Sequence[MethodInfo]) -> MethodInfo:
    hashes = {fact.tokenizer_hash for fact in facts if fact.tokenizer_hash}
    if len(hashes) > 1:
        raise ConfigurationError(
            f"the draft models of one chain must share a tokenizer; their fingerprints are {sorted(hashes)}",
            field="methods",
        )
    return MethodInfo(
        name="+".join(fact.name for fact in facts),
        vocab_size=max(fact.vocab_size for fact in facts),
        max_model_len=_loosest([fact.max_model_len for fact in facts]),
        tokenizer_hash=hashes.pop() if hashes else "",
        weights_bytes=sum(fact.weights_bytes for fact in facts),
        kv_bytes=sum(fact.kv_bytes for fact in facts),
        max_sessions=_loosest([fact.max_sessions for fact in facts]),
        vocabulary=next((fact.vocabulary for fact in facts if fact.vocabulary), {}),
        parts=tuple([name for fact in facts for name in fact.methods]),
        taps=_only_taps(facts),
    )


def _only_taps(facts: Sequence[MethodInfo]) -> FeatureTaps | None:
    """The features that one method of the chain builds on."""
    taps = [fact.taps for fact in facts if fact.taps is not None]
    if len(taps) > 1:
        raise ConfigurationError(
            f"of the methods {', '.join(fact.name for fact in facts if fact.taps is not None)} a chain can have one: "
            "each builds on features of its own",
            field="methods",
        )
    return taps[0] if taps else None


def _loosest(limits: Sequence[int]) -> int:
    """The largest limit; 0, which means none, if any is 0."""
    return 0 if 0 in limits else max(limits)
