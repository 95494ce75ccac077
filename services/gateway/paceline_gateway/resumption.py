"""Going on with a generation that was begun before, here or on another gateway: what its record says. Pure.

The record holds everything that the next token depends on: the tokens, the seed and the other sampling parameters, and
where the generation began. Its text is a function of these tokens, so that whoever goes on cuts it at the same places.

    client behind     the recorded tokens that it lacks are sent first
    client ahead      it got tokens while the store was silent; they are made again, compared, and not sent twice
    log probabilities are not recorded: the generation goes back to where the client is, and makes them again
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import DataLoss, InvalidArgument
from paceline.generation import Chunk, Evidence, Finished, GenerationEvent, Promise, Started
from paceline.messages import AcceptanceRule, FinishReason, TokenOrigin
from paceline.session.store import SessionRecord, SessionState
from paceline.text.commit import Committer
from paceline.text.request import GenerationRequest, PreparedRequest, ResumeRequest, TokenPrompt
from paceline.text.tokenizer import Tokenizer
from paceline.text.validation import end_settings
from paceline.token_log import EMPTY_HASH, extend_hash
from paceline_gateway.effects import Commit


@dataclass(frozen=True, slots=True)
class Resumption:
    """Where a generation goes on.

    Attributes:
        generation_start: index of its first token.
        recorded: its tokens so far.
        next_token: index of the first token that the client lacks.
        ids_hash: hash of the client's tokens [generation_start, next_token).
        tail: recorded tokens that the client lacks; None if there are none.
        weights_digest: of the weights that gave the recorded tokens; empty where they are not known.
    """

    generation_start: int
    recorded: tuple[int, ...]
    next_token: int
    ids_hash: int
    tail: Commit | None = None
    weights_digest: str = ""

    def check(self, tokens: Sequence[int], from_len: int, *, ended: bool) -> None:
        """Compares the tokens with those of a client that is ahead of them, once they reach it.

        Args:
            tokens: all committed tokens.
            from_len: their number at the last check.
            ended: no more will come.

        Raises:
            DataLoss: they are others, or end before the client's.
        """
        if from_len >= self.next_token:
            return
        reached = len(tokens) >= self.next_token
        if reached and _hash_of(tokens[self.generation_start : self.next_token]) != self.ids_hash:
            raise _other_tokens(self.next_token)
        if ended and not reached:
            raise DataLoss(
                f"the generation ends after {len(tokens)} tokens, and the client has {self.next_token}; start it again",
                field="next_token",
            )


@dataclass(frozen=True, slots=True)
class Replay:
    """A record read to its end.

    Attributes:
        record: the record; without the tokens that are to be made again.
        prepared: the request as it was made.
        committer: has taken the record's generated tokens.
        resumption: where to go on.
    """

    record: SessionRecord
    prepared: PreparedRequest
    committer: Committer
    resumption: Resumption

    @property
    def finish(self) -> FinishReason | None:
        """Why the generation has ended; None if it goes on."""
        return self.committer.finish

    def events(self, promise: Promise) -> list[GenerationEvent]:
        """What the client of a generation that has ended still lacks."""
        assert self.finish is not None, "it has ended"  # noqa: S101
        record, tail, positions = self.record, self.resumption.tail, self.record.positions
        prompt_tokens = record.generation_start
        events: list[GenerationEvent] = [
            Started(record.session, record.model, prompt_tokens, record.sampling.seed, promise)
        ]
        if tail is not None:
            lengths = tuple([len(text) for text in tail.texts])
            events.append(Chunk("".join(tail.texts), tail.tokens, tail.origins, record.committed_len, True, lengths))
        evidence = Evidence(verifier=positions.verifier, drafter=positions.drafter)
        num_tokens = record.committed_len - prompt_tokens
        events.append(Finished(self.finish, prompt_tokens, num_tokens, evidence, self.committer.stop_string or ""))
        return events


def replay_record(record: SessionRecord, asked: ResumeRequest, tokenizer: Tokenizer) -> Replay:
    """Reads a record and compares it with what the client has.

    Takes milliseconds for a long record: call it from a thread where that matters.

    Args:
        record: the session.
        asked: where its client is.
        tokenizer: the model's.

    Raises:
        InvalidArgument: the client asks for tokens of the prompt.
        DataLoss: the client has other tokens or more than can be made again, or the record is not complete.
    """
    start = record.generation_start
    next_token = start if asked.next_token is None else asked.next_token
    if next_token < start:
        raise InvalidArgument(
            f"next_token is {next_token}; the generation begins at {start}, after the prompt", field="next_token"
        )
    if record.sampling.top_logprobs is not None and next_token < record.committed_len:
        record = replace(record, tokens=record.tokens[:next_token], state=SessionState.RUNNING)
    prepared = _request_of(record, tokenizer)
    recorded = record.tokens[start:]
    _check_client(record, next_token, asked.ids_hash, prepared.end.max_new_tokens)
    committer = Committer(tokenizer, prepared.end, prepared.prompt_ids)
    committed = committer.commit_round(recorded)
    ended = committer.finish is not None
    if committed.num_tokens != len(recorded) or (record.state is SessionState.FINISHED and not ended):
        raise DataLoss(
            f"the record of session {record.session!r} and this gateway do not agree on where the generation ends: do "
            "all gateways serve the same model? Start it again",
            field="session",
        )
    known = next_token - start
    tail = None
    if known < len(recorded):
        texts = tuple([token.text for token in committed.tokens[known:]])
        tail = Commit(next_token, recorded[known:], (TokenOrigin.RECORDED,) * len(texts), (), texts)
    weights_digest = record.positions.weights_digest if recorded else ""
    resumption = Resumption(start, recorded, next_token, asked.ids_hash, tail, weights_digest)
    return Replay(record, prepared, committer, resumption)


def _request_of(record: SessionRecord, tokenizer: Tokenizer) -> PreparedRequest:
    """The request as it was when the generation began, its prompt as ids."""
    if record.max_tokens is None:
        raise DataLoss(
            f"the record of session {record.session!r} does not say how the generation ends: an older version wrote "
            "it. Start it again",
            field="session",
        )
    prompt = record.tokens[: record.generation_start]
    request = GenerationRequest(
        TokenPrompt(prompt),
        record.model,
        record.sampling,
        record.sampling.seed,
        record.max_tokens,
        record.stop,
        record.rule,
        record.speculation,
        record.session,
    )
    return PreparedRequest(prompt, end_settings(request, tokenizer, record.max_tokens), request)


def _check_client(record: SessionRecord, next_token: int, ids_hash: int, max_tokens: int) -> None:
    start, committed_len = record.generation_start, record.committed_len
    if next_token <= committed_len:
        if _hash_of(record.tokens[start:next_token]) != ids_hash:
            raise _other_tokens(next_token)
        return
    ended = record.state is SessionState.FINISHED or next_token > start + max_tokens
    exact = record.rule is AcceptanceRule.MATCH or record.sampling.greedy
    if ended or not exact:
        reason = "it has ended" if ended else "under the rule ratio the rest cannot be made again"
        raise DataLoss(
            f"the client has {next_token} tokens of session {record.session!r} and its record {committed_len}, and "
            f"{reason}; start it again",
            field="next_token",
        )


def _hash_of(tokens: Sequence[int]) -> int:
    return extend_hash(EMPTY_HASH, tokens)


def _other_tokens(next_token: int) -> DataLoss:
    return DataLoss(
        f"the client's tokens before {next_token} are not those of this session: ids_hash differs. Check how it is "
        "computed, or start again",
        field="ids_hash",
    )
