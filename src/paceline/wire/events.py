"""Events from a replica to the gateway."""

from __future__ import annotations

from paceline import messages as m
from paceline.errors import InvalidArgument
from paceline.speculation.tree import EMPTY_BLOCK
from paceline.v1 import common_pb2, drafter_pb2, verifier_pb2
from paceline.wire.parts import (
    draft_probs_from_pb,
    draft_probs_to_pb,
    failure_from_pb,
    failure_to_pb,
    features_from_pb,
    features_to_pb,
    timing_from_pb,
    timing_to_pb,
    token_logprobs_from_pb,
    token_logprobs_to_pb,
    tree_from_pb,
    tree_to_pb,
)

_CommonEvent = m.Hello | m.Opened | m.NeedTokens | m.Evicted | m.Closed | m.Failed
_CommonEventPb = (
    common_pb2.Hello
    | common_pb2.Opened
    | common_pb2.NeedTokens
    | common_pb2.Evicted
    | common_pb2.Closed
    | common_pb2.Failed
)


def opened_to_pb(event: m.Opened) -> common_pb2.Opened:
    """`Opened`."""
    return common_pb2.Opened(session=event.session, epoch=event.epoch, kv_len=event.kv_len, cached_len=event.cached_len)


def need_tokens_to_pb(event: m.NeedTokens) -> common_pb2.NeedTokens:
    """`NeedTokens`."""
    return common_pb2.NeedTokens(
        session=event.session, epoch=event.epoch, command_id=event.command_id, have_len=event.have_len
    )


def evicted_to_pb(event: m.Evicted) -> common_pb2.Evicted:
    """`Evicted`."""
    return common_pb2.Evicted(session=event.session, epoch=event.epoch, command_id=event.command_id)


def failed_to_pb(event: m.Failed) -> common_pb2.Failed:
    """`Failed`."""
    return common_pb2.Failed(
        session=event.session,
        epoch=event.epoch,
        command_id=event.command_id,
        failure=failure_to_pb(event.failure),
    )


def verified_to_pb(event: m.Verified) -> verifier_pb2.Verified:
    """`Verified`."""
    return verifier_pb2.Verified(
        session=event.session,
        epoch=event.epoch,
        round=event.round,
        base_len=event.base_len,
        accepted_path=event.accepted_path,
        tokens=event.tokens,
        kv_len=event.kv_len,
        logprobs=[token_logprobs_to_pb(entry) for entry in event.logprobs],
        timing=timing_to_pb(event.timing),
        next_block=tree_to_pb(event.next_block) if event.next_block.tokens else None,
        next_confidences=event.next_confidences,
        next_method=event.next_method,
        features=None if event.features is None else features_to_pb(event.features),
    )


def verified_from_pb(event: verifier_pb2.Verified) -> m.Verified:
    """`Verified`.

    Raises:
        InvalidArgument: the next block is no tree, or the features have not the size that they say.
    """
    return m.Verified(
        session=event.session,
        epoch=event.epoch,
        round=event.round,
        base_len=event.base_len,
        accepted_path=tuple(event.accepted_path),
        tokens=tuple(event.tokens),
        kv_len=event.kv_len,
        logprobs=tuple([token_logprobs_from_pb(entry) for entry in event.logprobs]),
        timing=timing_from_pb(event.timing),
        next_block=tree_from_pb(event.next_block) if event.HasField("next_block") else EMPTY_BLOCK,
        next_confidences=tuple(event.next_confidences),
        next_method=event.next_method,
        features=features_from_pb(event.features) if event.HasField("features") else None,
    )


def drafted_to_pb(event: m.Drafted) -> drafter_pb2.Drafted:
    """`Drafted`."""
    return drafter_pb2.Drafted(
        session=event.session,
        epoch=event.epoch,
        draft_id=event.draft_id,
        block=tree_to_pb(event.block),
        confidences=event.confidences,
        kv_len=event.kv_len,
        method=event.method,
        timing=timing_to_pb(event.timing),
        draft_probs=[draft_probs_to_pb(probs) for probs in event.draft_probs],
        features_len=event.features_len,
    )


def drafted_from_pb(event: drafter_pb2.Drafted) -> m.Drafted:
    """`Drafted`.

    Raises:
        InvalidArgument: the block is no tree, or its probabilities do not pair with its tokens.
    """
    block = tree_from_pb(event.block)
    return m.Drafted(
        session=event.session,
        epoch=event.epoch,
        draft_id=event.draft_id,
        block=block,
        confidences=tuple(event.confidences),
        kv_len=event.kv_len,
        method=event.method,
        timing=timing_from_pb(event.timing),
        draft_probs=draft_probs_from_pb(event.draft_probs, block),
        features_len=event.features_len,
    )


def _common_from_pb(kind: str | None, event: _CommonEventPb | None) -> _CommonEvent:
    match event:
        case common_pb2.Hello():
            return m.Hello(event.boot_id)
        case common_pb2.Opened():
            return m.Opened(event.session, event.epoch, event.kv_len, event.cached_len)
        case common_pb2.NeedTokens():
            return m.NeedTokens(event.session, event.epoch, event.command_id, event.have_len)
        case common_pb2.Evicted():
            return m.Evicted(event.session, event.epoch, event.command_id)
        case common_pb2.Closed():
            return m.Closed(event.session, event.epoch)
        case common_pb2.Failed():
            return m.Failed(event.session, event.epoch, event.command_id, failure_from_pb(event.failure))
    raise InvalidArgument(f"the replica sent an event of an unknown kind: {kind}", field="event")


def verifier_event_to_pb(event: m.VerifierEvent) -> verifier_pb2.VerifierEvent:
    """One event of a frame from the verifier."""
    match event:
        case m.Verified():
            return verifier_pb2.VerifierEvent(verified=verified_to_pb(event))
        case m.Opened():
            return verifier_pb2.VerifierEvent(opened=opened_to_pb(event))
        case m.NeedTokens():
            return verifier_pb2.VerifierEvent(need_tokens=need_tokens_to_pb(event))
        case m.Evicted():
            return verifier_pb2.VerifierEvent(evicted=evicted_to_pb(event))
        case m.Closed():
            return verifier_pb2.VerifierEvent(closed=common_pb2.Closed(session=event.session, epoch=event.epoch))
        case m.Failed():
            return verifier_pb2.VerifierEvent(failed=failed_to_pb(event))
        case m.Hello():
            return verifier_pb2.VerifierEvent(hello=common_pb2.Hello(boot_id=event.boot_id))


def verifier_event_from_pb(event: verifier_pb2.VerifierEvent) -> m.VerifierEvent:
    """One event of a frame from the verifier.

    Raises:
        InvalidArgument: it holds nothing known.
    """
    kind = event.WhichOneof("event")
    if kind == "verified":
        return verified_from_pb(event.verified)
    return _common_from_pb(kind, getattr(event, kind) if kind else None)


def drafter_event_to_pb(event: m.DrafterEvent) -> drafter_pb2.DrafterEvent:
    """One event of a frame from a drafter."""
    match event:
        case m.Drafted():
            return drafter_pb2.DrafterEvent(drafted=drafted_to_pb(event))
        case m.Opened():
            return drafter_pb2.DrafterEvent(opened=opened_to_pb(event))
        case m.NeedTokens():
            return drafter_pb2.DrafterEvent(need_tokens=need_tokens_to_pb(event))
        case m.Evicted():
            return drafter_pb2.DrafterEvent(evicted=evicted_to_pb(event))
        case m.Closed():
            return drafter_pb2.DrafterEvent(closed=common_pb2.Closed(session=event.session, epoch=event.epoch))
        case m.Failed():
            return drafter_pb2.DrafterEvent(failed=failed_to_pb(event))
        case m.Hello():
            return drafter_pb2.DrafterEvent(hello=common_pb2.Hello(boot_id=event.boot_id))


def drafter_event_from_pb(event: drafter_pb2.DrafterEvent) -> m.DrafterEvent:
    """One event of a frame from a drafter.

    Raises:
        InvalidArgument: it holds nothing known, or its block is no tree.
    """
    kind = event.WhichOneof("event")
    if kind == "drafted":
        return drafted_from_pb(event.drafted)
    return _common_from_pb(kind, getattr(event, kind) if kind else None)
