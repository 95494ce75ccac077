"""Commands to a replica. They come from untrusted peers: each `_from_pb` checks what can be checked without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline import messages as m
from paceline.errors import InvalidArgument
from paceline.token_log import MAX_SESSION_TOKENS
from paceline.v1 import common_pb2, drafter_pb2, verifier_pb2
from paceline.wire.parts import (
    draft_probs_from_pb,
    draft_probs_to_pb,
    features_from_pb,
    features_to_pb,
    rule_from_pb,
    rule_to_pb,
    sampling_from_pb,
    sampling_to_pb,
    tree_from_pb,
    tree_to_pb,
)

MAX_SESSION_NAME_CHARS = 256
MAX_METHOD_NAME_CHARS = 64


@dataclass(frozen=True, slots=True)
class CommandRef:
    """What a command calls itself; enough to answer it with `Failed` when the rest makes no sense."""

    session: str
    epoch: int
    command_id: int


def command_ref(command: verifier_pb2.VerifierCommand | drafter_pb2.DrafterCommand) -> CommandRef:
    """Session, epoch and round or draft_id of a command, unchecked; empty when the command holds nothing."""
    kind = command.WhichOneof("command")
    if kind is None:
        return CommandRef("", 0, 0)
    body = getattr(command, kind)
    command_id = body.round if kind == "verify" else body.draft_id if kind == "draft" else 0
    return CommandRef(body.session, body.epoch, command_id)


def _check_name(session: str, epoch: int) -> None:
    if not 0 < len(session) <= MAX_SESSION_NAME_CHARS:
        raise InvalidArgument(
            f"session has {len(session)} characters; it must have 1 to {MAX_SESSION_NAME_CHARS}", field="session"
        )
    if epoch < 0:
        raise InvalidArgument(f"epoch is {epoch}; it must not be negative", field="epoch")


def _check_at_least(value: int, least: int, field: str) -> None:
    if value < least:
        raise InvalidArgument(f"{field} is {value}; it must be at least {least}", field=field)


def _checked_tokens(tokens: Sequence[int], field: str) -> tuple[int, ...]:
    if len(tokens) > MAX_SESSION_TOKENS:
        raise InvalidArgument(
            f"{field} has {len(tokens)} tokens; a session has at most {MAX_SESSION_TOKENS}", field=field
        )
    checked = tuple(tokens)
    if checked and min(checked) < 0:
        raise InvalidArgument(f"{field} holds the negative id {min(checked)}", field=field)
    return checked


def _checked_catch_up(tokens: Sequence[int], base_len: int) -> tuple[int, ...]:
    _check_at_least(base_len, 1, "base_len")
    checked = _checked_tokens(tokens, "catch_up")
    if len(checked) > base_len:
        raise InvalidArgument(f"catch_up has {len(checked)} tokens but base_len is {base_len}", field="catch_up")
    return checked


def open_to_pb(command: m.Open) -> common_pb2.Open:
    """`Open`, shared by both services."""
    return common_pb2.Open(
        session=command.session,
        epoch=command.epoch,
        tokens=command.tokens,
        generation_start=command.generation_start,
        sampling=sampling_to_pb(command.sampling),
        acceptance_rule=rule_to_pb(command.rule),
        method=command.method,
    )


def open_from_pb(command: common_pb2.Open) -> m.Open:
    """`Open`, shared by both services.

    Raises:
        InvalidArgument: a field is out of range.
    """
    _check_name(command.session, command.epoch)
    tokens = _checked_tokens(command.tokens, "tokens")
    if not tokens:
        raise InvalidArgument("tokens is empty; a session starts with at least one token", field="tokens")
    if not 0 <= command.generation_start <= len(tokens):
        raise InvalidArgument(
            f"generation_start is {command.generation_start}; it must be in [0, {len(tokens)}]",
            field="generation_start",
        )
    if len(command.method) > MAX_METHOD_NAME_CHARS:
        raise InvalidArgument(
            f"method has {len(command.method)} characters; at most {MAX_METHOD_NAME_CHARS}", field="method"
        )
    return m.Open(
        session=command.session,
        epoch=command.epoch,
        tokens=tokens,
        generation_start=command.generation_start,
        sampling=sampling_from_pb(command.sampling),
        rule=rule_from_pb(command.acceptance_rule),
        method=command.method,
    )


def close_to_pb(command: m.Close) -> common_pb2.Close:
    """`Close`, shared by both services."""
    return common_pb2.Close(session=command.session, epoch=command.epoch)


def close_from_pb(command: common_pb2.Close) -> m.Close:
    """`Close`, shared by both services.

    Raises:
        InvalidArgument: a field is out of range.
    """
    _check_name(command.session, command.epoch)
    return m.Close(command.session, command.epoch)


def verify_to_pb(command: m.Verify) -> verifier_pb2.Verify:
    """`Verify`."""
    return verifier_pb2.Verify(
        session=command.session,
        epoch=command.epoch,
        round=command.round,
        base_len=command.base_len,
        prefix_hash=command.prefix_hash,
        catch_up=command.catch_up,
        block=tree_to_pb(command.block),
        draft_probs=[draft_probs_to_pb(probs) for probs in command.draft_probs],
        next_depth=command.next_depth,
        features_from=command.features_from,
        follows=command.follows,
        expected=command.expected,
    )


def verify_from_pb(command: verifier_pb2.Verify) -> m.Verify:
    """`Verify`.

    Raises:
        InvalidArgument: a field is out of range or the block is no tree.
    """
    _check_name(command.session, command.epoch)
    _check_at_least(command.round, 1, "round")
    _check_at_least(command.next_depth, 0, "next_depth")
    _check_at_least(command.follows, 0, "follows")
    expected = _checked_tokens(command.expected, "expected")
    if command.follows and (command.follows >= command.round or not 0 < len(expected) <= command.base_len):
        raise InvalidArgument(
            f"round {command.round} cannot follow round {command.follows}: name an earlier one, and the tokens that "
            "are expected of its verdict",
            field="follows",
        )
    features_from = command.features_from if command.HasField("features_from") else None
    _check_at_least(features_from or 0, 0, "features_from")
    block = tree_from_pb(command.block)
    return m.Verify(
        session=command.session,
        epoch=command.epoch,
        round=command.round,
        base_len=command.base_len,
        prefix_hash=command.prefix_hash,
        catch_up=_checked_catch_up(command.catch_up, command.base_len),
        block=block,
        draft_probs=draft_probs_from_pb(command.draft_probs, block),
        next_depth=command.next_depth,
        features_from=features_from,
        follows=command.follows,
        expected=expected,
    )


def draft_to_pb(command: m.Draft) -> drafter_pb2.Draft:
    """`Draft`."""
    return drafter_pb2.Draft(
        session=command.session,
        epoch=command.epoch,
        draft_id=command.draft_id,
        base_len=command.base_len,
        prefix_hash=command.prefix_hash,
        catch_up=command.catch_up,
        assumed=command.assumed,
        max_depth=command.max_depth,
        features=None if command.features is None else features_to_pb(command.features),
        starts_short=command.starts_short,
    )


def draft_from_pb(command: drafter_pb2.Draft) -> m.Draft:
    """`Draft`.

    Raises:
        InvalidArgument: a field is out of range.
    """
    _check_name(command.session, command.epoch)
    _check_at_least(command.draft_id, 1, "draft_id")
    _check_at_least(command.max_depth, 0, "max_depth")
    return m.Draft(
        session=command.session,
        epoch=command.epoch,
        draft_id=command.draft_id,
        base_len=command.base_len,
        prefix_hash=command.prefix_hash,
        max_depth=command.max_depth,
        catch_up=_checked_catch_up(command.catch_up, command.base_len),
        assumed=_checked_tokens(command.assumed, "assumed"),
        features=features_from_pb(command.features) if command.HasField("features") else None,
        starts_short=command.starts_short,
    )


def verifier_command_to_pb(command: m.VerifierCommand) -> verifier_pb2.VerifierCommand:
    """One command of a frame to the verifier."""
    match command:
        case m.Verify():
            return verifier_pb2.VerifierCommand(verify=verify_to_pb(command))
        case m.Open():
            return verifier_pb2.VerifierCommand(open=open_to_pb(command))
        case m.Close():
            return verifier_pb2.VerifierCommand(close=close_to_pb(command))


def verifier_command_from_pb(command: verifier_pb2.VerifierCommand) -> m.VerifierCommand:
    """One command of a frame to the verifier.

    Raises:
        InvalidArgument: it holds nothing known, or a field is out of range.
    """
    match command.WhichOneof("command"):
        case "verify":
            return verify_from_pb(command.verify)
        case "open":
            return open_from_pb(command.open)
        case "close":
            return close_from_pb(command.close)
    raise InvalidArgument("the command is empty or of an unknown kind; send open, verify or close", field="command")


def drafter_command_to_pb(command: m.DrafterCommand) -> drafter_pb2.DrafterCommand:
    """One command of a frame to a drafter."""
    match command:
        case m.Draft():
            return drafter_pb2.DrafterCommand(draft=draft_to_pb(command))
        case m.Open():
            return drafter_pb2.DrafterCommand(open=open_to_pb(command))
        case m.Close():
            return drafter_pb2.DrafterCommand(close=close_to_pb(command))


def drafter_command_from_pb(command: drafter_pb2.DrafterCommand) -> m.DrafterCommand:
    """One command of a frame to a drafter.

    Raises:
        InvalidArgument: it holds nothing known, or a field is out of range.
    """
    match command.WhichOneof("command"):
        case "draft":
            return draft_from_pb(command.draft)
        case "open":
            return open_from_pb(command.open)
        case "close":
            return close_from_pb(command.close)
    raise InvalidArgument("the command is empty or of an unknown kind; send open, draft or close", field="command")
