"""The values inside messages: sampling parameters, blocks, timings, failures, model facts."""

from __future__ import annotations

from collections.abc import Sequence

from paceline import messages as m
from paceline.errors import Failure, InvalidArgument
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from paceline.token_log import MAX_SESSION_TOKENS
from paceline.v1 import common_pb2, verifier_pb2

MAX_BLOCK_NODES = 4096
"""Blocks above this are refused unread; replicas cut at their own, far smaller limit."""

MAX_DRAFT_PROBS = 4096
"""Probabilities per draft token; drafters send far fewer."""

_RULE_TO_PB = {
    m.AcceptanceRule.MATCH: common_pb2.ACCEPTANCE_RULE_MATCH,
    m.AcceptanceRule.RATIO: common_pb2.ACCEPTANCE_RULE_RATIO,
}
_RULE_FROM_PB = {number: rule for rule, number in _RULE_TO_PB.items()} | {
    common_pb2.ACCEPTANCE_RULE_UNSPECIFIED: m.AcceptanceRule.MATCH
}


def rule_to_pb(rule: m.AcceptanceRule) -> common_pb2.AcceptanceRule.ValueType:
    """The rule's number."""
    return _RULE_TO_PB[rule]


def rule_from_pb(rule: int) -> m.AcceptanceRule:
    """The rule; unspecified is `match`.

    Raises:
        InvalidArgument: the number names no rule.
    """
    try:
        return _RULE_FROM_PB[rule]  # type: ignore[index]
    except KeyError:
        raise InvalidArgument(
            f"acceptance_rule {rule} is unknown; use MATCH or RATIO", field="acceptance_rule"
        ) from None


def sampling_to_pb(sampling: m.SamplingParams) -> common_pb2.SamplingParams:
    """All fields are set, defaults too, so that both ends agree whatever their defaults."""
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        top_logprobs=sampling.top_logprobs,
        seed=sampling.seed,
    )


_OPTIONAL_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "top_logprobs",
    "seed",
)


def sampling_from_pb(sampling: common_pb2.SamplingParams) -> m.SamplingParams:
    """Unset fields take the defaults of `SamplingParams`; whether a seed was given, `HasField("seed")` tells."""
    given = {name: getattr(sampling, name) for name in _OPTIONAL_SAMPLING_FIELDS if sampling.HasField(name)}  # type: ignore[arg-type]
    return m.SamplingParams(
        logit_bias=dict(sampling.logit_bias), stop_token_ids=tuple(sampling.stop_token_ids), **given
    )


def tree_to_pb(tree: DraftTree) -> common_pb2.DraftTree:
    """A chain travels without parents."""
    return common_pb2.DraftTree(tokens=tree.tokens, parents=() if tree.is_chain else tree.parents)


def tree_from_pb(tree: common_pb2.DraftTree) -> DraftTree:
    """Token ids are not judged here: a block with useless ids is cut by the verifier.

    Raises:
        InvalidArgument: the parents form no tree, siblings repeat a token, or there are too many nodes.
    """
    tokens, parents = tree.tokens, tree.parents
    if not tokens and not parents:
        return EMPTY_BLOCK
    for name, count in (("tokens", len(tokens)), ("parents", len(parents))):
        if count > MAX_BLOCK_NODES:
            raise InvalidArgument(f"block has {count} {name}; at most {MAX_BLOCK_NODES}", field=f"block.{name}")
    return DraftTree(tuple(tokens), tuple(parents)) if parents else DraftTree.chain(tokens)


def draft_probs_to_pb(probs: m.DraftProbs) -> common_pb2.DraftProbs:
    """What one draft token was drawn from."""
    return common_pb2.DraftProbs(token_ids=probs.token_ids, probs=probs.probs)


def draft_probs_from_pb(messages: Sequence[common_pb2.DraftProbs], block: DraftTree) -> tuple[m.DraftProbs, ...]:
    """What the tokens of a block were drawn from; whether they are distributions, the verifier judges.

    Raises:
        InvalidArgument: there is neither none nor one per token of a chain, or ids and probabilities do not pair.
    """
    if not messages:
        return ()
    if len(messages) != block.num_draft_tokens or not block.is_chain:
        raise InvalidArgument(
            f"draft_probs has {len(messages)} entries for a block of {block.num_draft_tokens} tokens; give one per "
            "token of a chain, or none",
            field="draft_probs",
        )
    for message in messages:
        if len(message.token_ids) != len(message.probs) or len(message.probs) > MAX_DRAFT_PROBS:
            raise InvalidArgument(
                f"draft_probs has {len(message.token_ids)} ids and {len(message.probs)} probabilities for a token; "
                f"give one probability per id, at most {MAX_DRAFT_PROBS}",
                field="draft_probs",
            )
    return tuple(m.DraftProbs(tuple(message.token_ids), tuple(message.probs)) for message in messages)


def timing_to_pb(timing: m.Timing) -> common_pb2.Timing:
    """Microseconds both sides."""
    return common_pb2.Timing(
        queue_us=timing.queue_us,
        forward_us=timing.forward_us,
        total_us=timing.total_us,
        batch_sessions=timing.batch_sessions,
        batch_tokens=timing.batch_tokens,
        draft_us=timing.draft_us,
    )


def timing_from_pb(timing: common_pb2.Timing) -> m.Timing:
    """Microseconds both sides."""
    return m.Timing(
        timing.queue_us,
        timing.forward_us,
        timing.total_us,
        timing.batch_sessions,
        timing.batch_tokens,
        timing.draft_us,
    )


def failure_to_pb(failure: Failure) -> common_pb2.Failure:
    """An error as it travels inside a stream."""
    return common_pb2.Failure(code=failure.code, message=failure.message, field=failure.field)


def failure_from_pb(failure: common_pb2.Failure) -> Failure:
    """An error as it travels inside a stream; `paceline.errors.from_failure` makes it an exception."""
    return Failure(failure.code, failure.message, failure.field)


_FEATURE_DTYPES = {
    m.FeatureDtype.FLOAT32: common_pb2.FEATURE_DTYPE_FLOAT32,
    m.FeatureDtype.BFLOAT16: common_pb2.FEATURE_DTYPE_BFLOAT16,
    m.FeatureDtype.FLOAT16: common_pb2.FEATURE_DTYPE_FLOAT16,
}
_FEATURE_DTYPES_FROM_PB = {value: dtype for dtype, value in _FEATURE_DTYPES.items()}


def _feature_dtype(value: common_pb2.FeatureDtype.ValueType) -> m.FeatureDtype:
    dtype = _FEATURE_DTYPES_FROM_PB.get(value)
    if dtype is None:
        raise InvalidArgument(
            f"features.dtype is {value}; send float32, bfloat16 or float16, one of FeatureDtype", field="features.dtype"
        )
    return dtype


def feature_format_to_pb(features: m.FeatureFormat) -> common_pb2.FeatureFormat:
    """Which features a replica serves or needs."""
    return common_pb2.FeatureFormat(
        kind=features.kind, width=features.width, dtype=_FEATURE_DTYPES[features.dtype], only_last=features.only_last
    )


def feature_format_from_pb(features: common_pb2.FeatureFormat) -> m.FeatureFormat:
    """Which features a replica serves or needs.

    Raises:
        InvalidArgument: the kind of numbers is unknown.
    """
    return m.FeatureFormat(features.kind, features.width, _feature_dtype(features.dtype), features.only_last)


def features_to_pb(features: m.Features) -> common_pb2.Features:
    """Rows of features."""
    return common_pb2.Features(
        first_row=features.first_row,
        num_rows=features.num_rows,
        width=features.width,
        dtype=_FEATURE_DTYPES[features.dtype],
        data=features.data,
    )


def features_from_pb(features: common_pb2.Features) -> m.Features:
    """Rows of features.

    Raises:
        InvalidArgument: the bytes are not as many as the rows need, or the rows are none that a session can have.
    """
    read = m.Features(
        features.first_row, features.num_rows, features.width, _feature_dtype(features.dtype), features.data
    )
    if not (read.first_row >= 0 and read.num_rows >= 1 and read.width >= 1 and read.end <= MAX_SESSION_TOKENS):
        raise InvalidArgument(
            f"features of rows [{read.first_row}, {read.end}) with {read.width} numbers: send at least one row of at "
            f"least one number, within [0, {MAX_SESSION_TOKENS})",
            field="features",
        )
    if len(read.data) != read.num_rows * read.row_bytes:
        raise InvalidArgument(
            f"features of {read.num_rows} rows with {read.width} numbers of {read.dtype.num_bytes} bytes have "
            f"{len(read.data)} bytes; send {read.num_rows * read.row_bytes}",
            field="features.data",
        )
    return read


def model_info_to_pb(info: m.ModelInfo) -> common_pb2.ModelInfo:
    """What a replica serves."""
    return common_pb2.ModelInfo(
        model=info.model,
        methods=info.methods,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        tokenizer_hash=info.tokenizer_hash,
        max_draft_tokens=info.max_draft_tokens,
        weights_bytes=info.weights_bytes,
        kv_bytes=info.kv_bytes,
        max_sessions=info.max_sessions,
        boot_id=info.boot_id,
        drafting_bytes=info.drafting_bytes,
        features=None if info.features is None else feature_format_to_pb(info.features),
        weights_digest=info.weights_digest,
        gather_window_us=info.gather_window_us,
    )


def model_info_from_pb(info: common_pb2.ModelInfo) -> m.ModelInfo:
    """What a replica serves."""
    return m.ModelInfo(
        model=info.model,
        methods=tuple(info.methods),
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=tuple(info.eos_token_ids),
        tokenizer_hash=info.tokenizer_hash,
        max_draft_tokens=info.max_draft_tokens,
        weights_bytes=info.weights_bytes,
        kv_bytes=info.kv_bytes,
        max_sessions=info.max_sessions,
        boot_id=info.boot_id,
        drafting_bytes=info.drafting_bytes,
        features=feature_format_from_pb(info.features) if info.HasField("features") else None,
        weights_digest=info.weights_digest,
        gather_window_us=info.gather_window_us,
    )


def vocabulary_chunk_to_pb(chunk: m.VocabularyChunk) -> common_pb2.VocabularyChunk:
    """Part of a vocabulary."""
    return common_pb2.VocabularyChunk(first_id=chunk.first_id, pieces=chunk.pieces)


def vocabulary_chunk_from_pb(chunk: common_pb2.VocabularyChunk) -> m.VocabularyChunk:
    """Part of a vocabulary.

    Raises:
        InvalidArgument: an id is negative.
    """
    if chunk.first_id < 0:
        raise InvalidArgument(f"first_id is {chunk.first_id}; it must not be negative", field="first_id")
    return m.VocabularyChunk(chunk.first_id, tuple(chunk.pieces))


def token_logprobs_to_pb(logprobs: m.TokenLogprobs) -> verifier_pb2.TokenLogprobs:
    """One position's log-probabilities."""
    return verifier_pb2.TokenLogprobs(
        logprob=logprobs.logprob, top_tokens=logprobs.top_tokens, top_logprobs=logprobs.top_logprobs
    )


def token_logprobs_from_pb(logprobs: verifier_pb2.TokenLogprobs) -> m.TokenLogprobs:
    """One position's log-probabilities."""
    return m.TokenLogprobs(logprobs.logprob, tuple(logprobs.top_tokens), tuple(logprobs.top_logprobs))
