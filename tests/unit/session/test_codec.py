from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.messages import AcceptanceRule, SamplingParams
from paceline.session.codec import pack_tokens, record_fields, record_from_fields, unpack_tokens
from paceline.session.store import Positions, SessionRecord, SessionState
from paceline.text.request import SpeculationOptions

int32 = st.integers(0, 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)

samplings = st.builds(
    SamplingParams,
    temperature=finite,
    top_p=finite,
    top_k=int32,
    logit_bias=st.dictionaries(int32, finite, max_size=4),
    stop_token_ids=st.lists(int32, max_size=4).map(tuple),
    ignore_eos=st.booleans(),
    top_logprobs=st.none() | int32,
    seed=int64,
)
records = st.builds(
    SessionRecord,
    session=text,
    epoch=st.integers(0, 2**63 - 1),
    owner=text,
    tenant=text,
    state=st.sampled_from(SessionState),
    model=text,
    sampling=samplings,
    rule=st.sampled_from(AcceptanceRule),
    generation_start=int32,
    tokens=st.lists(int32, max_size=50).map(tuple),
    positions=st.builds(Positions, text, int32, text, int32, finite, text),
    finish_reason=text,
    max_tokens=st.none() | int32,
    stop=st.lists(text, max_size=3).map(tuple),
    speculation=st.builds(SpeculationOptions, st.booleans(), text, st.none() | int32),
)


def raw(fields: dict[str, str]) -> dict[bytes, bytes]:
    return {name.encode(): value.encode() for name, value in fields.items()}


@given(records)
def test_every_record_comes_back_equal(record: SessionRecord) -> None:
    fields = raw(record_fields(record))
    assert record_from_fields(record.session, fields, pack_tokens(record.tokens)) == record


@given(st.lists(int32).map(tuple))
def test_tokens_are_four_bytes_each(tokens: tuple[int, ...]) -> None:
    packed = pack_tokens(tokens)
    assert len(packed) == 4 * len(tokens)
    assert unpack_tokens(packed) == tokens


def test_fields_of_a_neighbouring_version() -> None:
    """Unknown ones are ignored, missing ones take their defaults."""
    record = SessionRecord(
        "s", 1, "o", "", SessionState.RUNNING, "m", SamplingParams(top_k=3), AcceptanceRule.MATCH, 1, (5,)
    )
    fields = record_fields(record) | {"new_field": "1", "sampling": '{"top_k":3,"from_the_future":[1]}'}
    late = ("max_tokens", "stop", "speculation")
    for name in (*late, "verifier", "verifier_kv_len", "drafter", "drafter_kv_len", "acceptance_ewma", "finish_reason"):
        del fields[name]
    assert record_from_fields("s", raw(fields), pack_tokens((5,))) == record


def test_a_hash_and_tokens_that_do_not_fit_together_are_no_record() -> None:
    record = SessionRecord(
        "s", 1, "o", "", SessionState.RUNNING, "m", SamplingParams(), AcceptanceRule.MATCH, 1, (5, 6)
    )
    fields = raw(record_fields(record))
    assert record_from_fields("s", fields, pack_tokens((5,))) is None
    assert record_from_fields("s", fields, b"") is None
    assert record_from_fields("s", {}, pack_tokens((5, 6))) is None
