"""Every message survives the way to protobuf bytes and back; nonsense from a peer becomes InvalidArgument."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import messages as m
from paceline import wire
from paceline.errors import Failure, InvalidArgument
from paceline.speculation.tree import DraftTree
from paceline.token_log import MAX_SESSION_TOKENS
from paceline.v1 import common_pb2, drafter_pb2, verifier_pb2

NAMES = st.text(min_size=1, max_size=40)
COUNTS = st.integers(0, 2**31 - 1)
LONGS = st.integers(0, 2**63 - 1)
IDS = st.integers(0, 2**31 - 1)
TOKENS = st.lists(IDS, max_size=8).map(tuple)
DOUBLES = st.floats(allow_nan=False)
FLOATS = st.floats(0, 1, width=32)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(0, 8))):
        parent = draw(st.integers(0, len(tokens)))
        # Any int32, negative too: the verifier cuts useless ids, the wire carries them.
        token = draw(st.integers(-(2**31), 2**31 - 1))
        if (token, parent) not in zip(tokens, parents, strict=True):
            tokens.append(token)
            parents.append(parent)
    return DraftTree(tuple(tokens), tuple(parents))


DRAFT_PROBS = st.lists(st.tuples(IDS, st.floats(0, 1, width=32)), max_size=4).map(
    lambda pairs: m.DraftProbs(tuple([token for token, _ in pairs]), tuple([value for _, value in pairs]))
)


@st.composite
def sampled_chains(draw: st.DrawFn) -> tuple[DraftTree, tuple[m.DraftProbs, ...]]:
    """A chain, with what each of its tokens was drawn from."""
    tokens = draw(TOKENS)
    return DraftTree.chain(tokens), tuple([draw(DRAFT_PROBS) for _ in tokens])


@st.composite
def blocks(draw: st.DrawFn, /, build: Callable[..., Any], **fields: st.SearchStrategy[Any]) -> Any:
    """Messages with a tree, or with a chain and its probabilities."""
    tree, probs = draw(st.tuples(trees(), st.just(())) | sampled_chains())
    return build(block=tree, draft_probs=probs, **{name: draw(values) for name, values in fields.items()})


SAMPLING = st.builds(
    m.SamplingParams,
    temperature=DOUBLES,
    top_p=DOUBLES,
    top_k=COUNTS,
    min_p=DOUBLES,
    repetition_penalty=DOUBLES,
    presence_penalty=DOUBLES,
    frequency_penalty=DOUBLES,
    logit_bias=st.dictionaries(IDS, DOUBLES, max_size=4),
    min_tokens=COUNTS,
    stop_token_ids=TOKENS,
    ignore_eos=st.booleans(),
    top_logprobs=st.none() | COUNTS,
    seed=st.integers(-(2**63), 2**63 - 1),
)
TIMING = st.builds(m.Timing, LONGS, LONGS, LONGS, COUNTS, COUNTS, LONGS)
HASHES = st.integers(-(2**63), 2**63 - 1)


@st.composite
def opens(draw: st.DrawFn) -> m.Open:
    tokens = draw(st.lists(IDS, min_size=1, max_size=8).map(tuple))
    return m.Open(
        draw(NAMES),
        draw(LONGS),
        tokens,
        draw(st.integers(0, len(tokens))),
        draw(SAMPLING),
        draw(st.sampled_from(m.AcceptanceRule)),
        draw(st.text("abc_", max_size=64)),
    )


@st.composite
def features(draw: st.DrawFn) -> m.Features:
    num_rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(m.FeatureDtype))
    size = num_rows * width * dtype.num_bytes
    return m.Features(
        draw(st.integers(0, 2**20 - 3)), num_rows, width, dtype, draw(st.binary(min_size=size, max_size=size))
    )


FORMATS = st.builds(m.FeatureFormat, NAMES, COUNTS, st.sampled_from(m.FeatureDtype), st.booleans())
CLOSES = st.builds(m.Close, NAMES, LONGS)
VERIFIES = blocks(
    m.Verify,
    session=NAMES,
    epoch=LONGS,
    round=st.integers(1, 2**63 - 1),
    base_len=st.integers(8, 2**31 - 1),
    prefix_hash=HASHES,
    catch_up=TOKENS,
    next_depth=COUNTS,
    features_from=st.none() | COUNTS,
)
DRAFTS = st.builds(
    m.Draft,
    session=NAMES,
    epoch=LONGS,
    draft_id=st.integers(1, 2**63 - 1),
    base_len=st.integers(8, 2**31 - 1),
    prefix_hash=HASHES,
    max_depth=COUNTS,
    catch_up=TOKENS,
    assumed=TOKENS,
    features=st.none() | features(),
    starts_short=st.booleans(),
)
LOGPROBS = st.builds(m.TokenLogprobs, DOUBLES, TOKENS, st.lists(DOUBLES, max_size=3).map(tuple))
COMMON_EVENTS = (
    st.builds(m.Hello, NAMES)
    | st.builds(m.Opened, NAMES, LONGS, COUNTS, COUNTS)
    | st.builds(m.Closed, NAMES, LONGS)
    | st.builds(m.NeedTokens, NAMES, LONGS, LONGS, COUNTS)
    | st.builds(m.Evicted, NAMES, LONGS, LONGS)
    | st.builds(m.Failed, NAMES, LONGS, LONGS, st.builds(Failure, NAMES, NAMES, NAMES))
)
VERIFIED = st.builds(
    m.Verified,
    session=NAMES,
    epoch=LONGS,
    round=LONGS,
    base_len=COUNTS,
    accepted_path=TOKENS,
    tokens=TOKENS,
    kv_len=COUNTS,
    logprobs=st.lists(LOGPROBS, max_size=3).map(tuple),
    timing=TIMING,
    next_block=trees(),
    next_confidences=st.lists(FLOATS, max_size=4).map(tuple),
    next_method=st.text(max_size=40),
    features=st.none() | features(),
)
DRAFTED = blocks(
    m.Drafted,
    session=NAMES,
    epoch=LONGS,
    draft_id=LONGS,
    kv_len=COUNTS,
    confidences=st.lists(FLOATS, max_size=4).map(tuple),
    method=NAMES,
    timing=TIMING,
    features_len=COUNTS,
)


@given(opens() | CLOSES | VERIFIES)
def test_verifier_commands_survive_the_wire(command: m.VerifierCommand) -> None:
    data = wire.verifier_command_to_pb(command).SerializeToString()
    pb = verifier_pb2.VerifierCommand.FromString(data)
    assert wire.verifier_command_from_pb(pb) == command
    assert wire.command_ref(pb) == wire.CommandRef(command.session, command.epoch, getattr(command, "round", 0))


@given(opens() | CLOSES | DRAFTS)
def test_drafter_commands_survive_the_wire(command: m.DrafterCommand) -> None:
    data = wire.drafter_command_to_pb(command).SerializeToString()
    pb = drafter_pb2.DrafterCommand.FromString(data)
    assert wire.drafter_command_from_pb(pb) == command
    assert wire.command_ref(pb) == wire.CommandRef(command.session, command.epoch, getattr(command, "draft_id", 0))


@given(COMMON_EVENTS | VERIFIED)
def test_verifier_events_survive_the_wire(event: m.VerifierEvent) -> None:
    data = wire.verifier_event_to_pb(event).SerializeToString()
    assert wire.verifier_event_from_pb(verifier_pb2.VerifierEvent.FromString(data)) == event


@given(COMMON_EVENTS | DRAFTED)
def test_drafter_events_survive_the_wire(event: m.DrafterEvent) -> None:
    data = wire.drafter_event_to_pb(event).SerializeToString()
    assert wire.drafter_event_from_pb(drafter_pb2.DrafterEvent.FromString(data)) == event


@given(
    st.builds(
        m.ModelInfo,
        model=NAMES,
        vocab_size=COUNTS,
        max_model_len=COUNTS,
        eos_token_ids=TOKENS,
        tokenizer_hash=NAMES,
        boot_id=NAMES,
        methods=st.lists(NAMES).map(tuple),
        max_draft_tokens=COUNTS,
        weights_bytes=LONGS,
        kv_bytes=LONGS,
        max_sessions=COUNTS,
        drafting_bytes=LONGS,
        features=st.none() | FORMATS,
        weights_digest=NAMES,
        gather_window_us=LONGS,
    )
)
def test_model_info_survives_the_wire(info: m.ModelInfo) -> None:
    data = wire.model_info_to_pb(info).SerializeToString()
    assert wire.model_info_from_pb(common_pb2.ModelInfo.FromString(data)) == info


@given(st.builds(m.VocabularyChunk, COUNTS, st.lists(st.text(max_size=8)).map(tuple)))
def test_vocabularies_survive_the_wire(chunk: m.VocabularyChunk) -> None:
    data = wire.vocabulary_chunk_to_pb(chunk).SerializeToString()
    assert wire.vocabulary_chunk_from_pb(common_pb2.VocabularyChunk.FromString(data)) == chunk


def test_negative_ids_of_a_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="first_id"):
        wire.vocabulary_chunk_from_pb(common_pb2.VocabularyChunk(first_id=-1, pieces=["a"]))


def test_every_message_has_a_way_through_the_wire() -> None:
    """A field added to a dataclass and forgotten in the wire is found by the round trips; a whole message here."""
    commands = {m.Open, m.Close, m.Verify, m.Draft}
    events = {m.Hello, m.Opened, m.Closed, m.NeedTokens, m.Evicted, m.Failed, m.Verified, m.Drafted}
    assert {field.name for field in verifier_pb2.VerifierEvent.DESCRIPTOR.fields} | {
        field.name for field in drafter_pb2.DrafterEvent.DESCRIPTOR.fields
    } == {"hello", "opened", "verified", "drafted", "need_tokens", "evicted", "closed", "failed"}
    assert commands == set((m.VerifierCommand | m.DrafterCommand).__args__)
    assert events == set((m.VerifierEvent | m.DrafterEvent).__args__)


def test_unset_sampling_fields_take_the_defaults() -> None:
    assert wire.sampling_from_pb(common_pb2.SamplingParams()) == m.SamplingParams()
    assert wire.sampling_from_pb(common_pb2.SamplingParams(temperature=0.0)).temperature == 0.0


def test_unspecified_rule_is_match() -> None:
    assert wire.rule_from_pb(0) is m.AcceptanceRule.MATCH


def test_a_chain_travels_without_parents() -> None:
    assert list(wire.tree_to_pb(DraftTree.chain((5, 6, 7))).parents) == []
    assert list(wire.tree_to_pb(DraftTree((5, 6), (0, 0))).parents) == [0, 0]


BAD_TREES = [
    pytest.param(common_pb2.DraftTree(tokens=[1, 2], parents=[0]), "block", id="lengths differ"),
    pytest.param(common_pb2.DraftTree(tokens=[], parents=[0]), "block", id="parents without tokens"),
    pytest.param(common_pb2.DraftTree(tokens=[1, 2], parents=[0, 2]), "block.parents", id="own parent"),
    pytest.param(common_pb2.DraftTree(tokens=[1, 2], parents=[0, -1]), "block.parents", id="negative parent"),
    pytest.param(common_pb2.DraftTree(tokens=[1, 1], parents=[0, 0]), "block.tokens", id="same sibling twice"),
    pytest.param(common_pb2.DraftTree(tokens=range(wire.MAX_BLOCK_NODES + 1)), "block.tokens", id="too many"),
    pytest.param(
        common_pb2.DraftTree(tokens=[1], parents=[0] * (wire.MAX_BLOCK_NODES + 1)),
        "block.parents",
        id="too many parents",
    ),
]


@pytest.mark.parametrize(("tree", "field"), BAD_TREES)
def test_malformed_tree_is_refused(tree: common_pb2.DraftTree, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        wire.tree_from_pb(tree)
    assert caught.value.field == field


CHAIN = common_pb2.DraftTree(tokens=[5, 6])
SIBLINGS = common_pb2.DraftTree(tokens=[5, 6], parents=[0, 0])
PROBS = common_pb2.DraftProbs(token_ids=[5, 6], probs=[0.5, 0.5])
UNPAIRED = common_pb2.DraftProbs(token_ids=[5, 6], probs=[1.0])
TOO_MANY_PROBS = common_pb2.DraftProbs(
    token_ids=range(wire.MAX_DRAFT_PROBS + 1), probs=[0.0] * (wire.MAX_DRAFT_PROBS + 1)
)
TOO_MANY = [1] * (MAX_SESSION_TOKENS + 1)


def _features(**changes: Any) -> common_pb2.Features:
    """Two rows of three numbers, with something changed."""
    fields: dict[str, Any] = {"first_row": 4, "num_rows": 2, "width": 3, "dtype": 1, "data": b"x" * 24} | changes
    return common_pb2.Features(**fields)


def _verify(**changes: Any) -> verifier_pb2.VerifierCommand:
    fields: dict[str, Any] = {"session": "s", "epoch": 1, "round": 1, "base_len": 3, "catch_up": [1, 2, 3]} | changes
    return verifier_pb2.VerifierCommand(verify=verifier_pb2.Verify(**fields))


def _open(**changes: Any) -> verifier_pb2.VerifierCommand:
    fields: dict[str, Any] = {"session": "s", "epoch": 1, "tokens": [1, 2], "generation_start": 2} | changes
    return verifier_pb2.VerifierCommand(open=common_pb2.Open(**fields))


def _draft(**changes: Any) -> drafter_pb2.DrafterCommand:
    fields: dict[str, Any] = {"session": "s", "epoch": 1, "draft_id": 1, "base_len": 3, "max_depth": 4} | changes
    return drafter_pb2.DrafterCommand(draft=drafter_pb2.Draft(**fields))


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (_verify(session=""), "session"),
        (_verify(session="x" * 257), "session"),
        (_verify(epoch=-1), "epoch"),
        (_verify(round=0), "round"),
        (_verify(base_len=0), "base_len"),
        (_verify(base_len=2), "catch_up"),
        (_verify(next_depth=-1), "next_depth"),
        (_verify(features_from=-1), "features_from"),
        (_verify(catch_up=[1, -2]), "catch_up"),
        (_verify(base_len=2**22, catch_up=TOO_MANY), "catch_up"),
        (_verify(block=common_pb2.DraftTree(tokens=[1], parents=[4])), "block.parents"),
        (_verify(block=CHAIN, draft_probs=[PROBS]), "draft_probs"),
        (_verify(block=CHAIN, draft_probs=[PROBS] * 3), "draft_probs"),
        (_verify(draft_probs=[PROBS]), "draft_probs"),
        (_verify(block=SIBLINGS, draft_probs=[PROBS] * 2), "draft_probs"),
        (_verify(block=CHAIN, draft_probs=[PROBS, UNPAIRED]), "draft_probs"),
        (_verify(block=CHAIN, draft_probs=[PROBS, TOO_MANY_PROBS]), "draft_probs"),
        (_open(tokens=[]), "tokens"),
        (_open(tokens=[3, -1]), "tokens"),
        (_open(tokens=TOO_MANY), "tokens"),
        (_open(generation_start=3), "generation_start"),
        (_open(generation_start=-1), "generation_start"),
        (_open(acceptance_rule=17), "acceptance_rule"),
        (verifier_pb2.VerifierCommand(close=common_pb2.Close(session="", epoch=1)), "session"),
        (verifier_pb2.VerifierCommand(), "command"),
    ],
)
def test_bad_verifier_command_names_the_field(command: verifier_pb2.VerifierCommand, field: str) -> None:
    _assert_refused(wire.verifier_command_from_pb, command, field)


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (_draft(session=""), "session"),
        (_draft(draft_id=0), "draft_id"),
        (_draft(base_len=0), "base_len"),
        (_draft(max_depth=-1), "max_depth"),
        (_draft(assumed=[-1]), "assumed"),
        (_draft(assumed=TOO_MANY), "assumed"),
        (_draft(catch_up=[1] * 4), "catch_up"),
        (_draft(base_len=2**22, catch_up=TOO_MANY), "catch_up"),
        (_draft(features=_features(first_row=-1)), "features"),
        (_draft(features=_features(first_row=MAX_SESSION_TOKENS - 1)), "features"),
        (_draft(features=_features(num_rows=0, data=b"")), "features"),
        (_draft(features=_features(width=0, data=b"")), "features"),
        (_draft(features=_features(data=b"x" * 23)), "features.data"),
        (_draft(features=_features(dtype=2)), "features.data"),
        (_draft(features=_features(dtype=0)), "features.dtype"),
        (_draft(features=_features(dtype=9)), "features.dtype"),
        (drafter_pb2.DrafterCommand(), "command"),
    ],
)
def test_bad_drafter_command_names_the_field(command: drafter_pb2.DrafterCommand, field: str) -> None:
    _assert_refused(wire.drafter_command_from_pb, command, field)


def _assert_refused(parse: Callable[[Any], object], command: object, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse(command)
    assert caught.value.field == field
    assert str(caught.value)


@pytest.mark.parametrize("probs", [[PROBS], [PROBS, UNPAIRED], [PROBS, TOO_MANY_PROBS], [PROBS] * 3])
def test_probabilities_that_do_not_pair_with_their_drafts_are_refused(probs: list[common_pb2.DraftProbs]) -> None:
    drafted = drafter_pb2.Drafted(session="s", epoch=1, draft_id=1, block=CHAIN, draft_probs=probs)
    _assert_refused(wire.drafter_event_from_pb, drafter_pb2.DrafterEvent(drafted=drafted), "draft_probs")


def test_empty_events_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        wire.verifier_event_from_pb(verifier_pb2.VerifierEvent())
    with pytest.raises(InvalidArgument):
        wire.drafter_event_from_pb(drafter_pb2.DrafterEvent())


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_but_invalid_argument(data: bytes) -> None:
    try:
        command = verifier_pb2.VerifierCommand.FromString(data)
    except Exception:
        return  # grpc ends the stream for what is no protobuf
    wire.command_ref(command)
    with contextlib.suppress(InvalidArgument):
        wire.verifier_command_from_pb(command)
