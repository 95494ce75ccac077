"""The judge of the chaos suite: what it must not let pass, and what it must excuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.errors import DataLoss, PacelineError, Unavailable
from paceline.generation import Chunk, Evidence, Finished, Started
from paceline.messages import FinishReason, SamplingParams, TokenOrigin
from paceline.text.request import GenerationRequest, TokenPrompt
from tests.chaos.fleet import Blackouts
from tests.chaos.models import ChaosModels
from tests.chaos.oracle import Oracle, Undisturbed
from tests.chaos.streams import Reading, Trouble

PROMPT = (1, 2, 3, 4)
DEADLINE_S = 20.0
REQUEST = GenerationRequest(
    TokenPrompt(PROMPT), sampling=SamplingParams(temperature=0.9, ignore_eos=True), seed=3, max_tokens=24
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ChaosModels:
    return ChaosModels.write(tmp_path_factory.mktemp("models"))


@pytest.fixture
def oracle(models: ChaosModels) -> Oracle:
    return Oracle(models)


def undisturbed(oracle: Oracle, request: GenerationRequest = REQUEST) -> Undisturbed:
    return oracle.undisturbed([request])[0]


def reading_of(told: Undisturbed, request: GenerationRequest = REQUEST) -> Reading:
    """What the client sees of a generation, in two chunks."""
    reading = Reading("a stream", request, DEADLINE_S)
    reading.take(Started("s", "tiny", len(PROMPT), request.seed or 0))
    for ids, text in ((told.tokens[:5], told.text[:5]), (told.tokens[5:], told.text[5:])):
        at = len(PROMPT) + len(reading.tokens) + len(ids)
        reading.take(Chunk(text, ids, (TokenOrigin.PLAIN,) * len(ids), at, True, (1,) * len(ids)))
    assert told.reason is not None
    reading.take(Finished(told.reason, len(PROMPT), len(told.tokens), Evidence(), told.stop_string))
    return reading


def faults(oracle: Oracle, reading: Reading, blackouts: Blackouts | None = None) -> list[str]:
    oracle.judge([reading], blackouts or Blackouts())
    return [*oracle.faults, *oracle.tally.faults]


def test_what_the_undisturbed_run_says_passes(oracle: Oracle) -> None:
    told = undisturbed(oracle)
    assert (len(told.tokens), len(told.text), told.reason) == (24, 24, FinishReason.LENGTH)
    assert faults(oracle, reading_of(told)) == []
    assert (oracle.num_complete, oracle.tally.num_tokens) == (1, 24)


def test_a_stop_string_ends_the_undisturbed_run_too(oracle: Oracle) -> None:
    text = undisturbed(oracle).text
    request = replace(REQUEST, stop=(text[6:8],))
    told = undisturbed(oracle, request)
    assert told.text == text[: text.index(text[6:8])]
    assert (told.reason, told.stop_string) == (FinishReason.STOP, text[6:8])
    assert faults(oracle, reading_of(told, request)) == []


def spoil_token(reading: Reading) -> None:
    reading.tokens[9] = (reading.tokens[9] + 1) % 60


def lose_token(reading: Reading) -> None:
    del reading.tokens[9]


def repeat_token(reading: Reading) -> None:
    reading.tokens.insert(9, reading.tokens[9])


def lose_tail(reading: Reading) -> None:
    del reading.tokens[20:]


def spoil_text(reading: Reading) -> None:
    reading.text = reading.text[:-1]


def forget_end(reading: Reading) -> None:
    reading.finished = None


@pytest.mark.parametrize("spoil", [spoil_token, lose_token, repeat_token, lose_tail, spoil_text, forget_end])
def test_whatever_is_not_as_it_should_be_is_a_fault(oracle: Oracle, spoil: object) -> None:
    reading = reading_of(undisturbed(oracle))
    spoil(reading)  # type: ignore[operator]
    assert len(faults(oracle, reading)) == 1


def test_events_out_of_order_are_a_fault(oracle: Oracle) -> None:
    reading = reading_of(undisturbed(oracle))
    reading.take(Started("s", "tiny", len(PROMPT), 3))
    assert len(faults(oracle, reading)) == 2


def test_a_client_that_left_is_compared_as_far_as_it_had_read(oracle: Oracle) -> None:
    reading = reading_of(undisturbed(oracle))
    reading.finished, reading.left, reading.tokens = None, True, reading.tokens[:7]
    assert faults(oracle, reading) == []
    assert (oracle.num_left, oracle.tally.num_tokens) == (1, 7)
    spoil_token(other := reading_of(undisturbed(oracle)))
    other.finished, other.left, other.tokens = None, True, other.tokens[:12]
    assert len(faults(oracle, other)) == 1


@pytest.mark.parametrize(
    ("error", "dark", "is_fault"),
    [
        (Unavailable("no verifier"), (0.0, DEADLINE_S), False),
        (Unavailable("no verifier"), (0.0, DEADLINE_S / 2), True),
        (Unavailable("no verifier"), (2 * DEADLINE_S, 3 * DEADLINE_S), True),
        (DataLoss("other tokens"), (0.0, DEADLINE_S), True),
    ],
)
def test_an_error_is_excused_only_where_no_verifier_was_there(
    oracle: Oracle, error: PacelineError, dark: tuple[float, float], is_fault: bool
) -> None:
    reading = Reading("a stream", REQUEST, DEADLINE_S, troubles=[Trouble(error, 0.0, DEADLINE_S + 1.0)])
    assert bool(faults(oracle, reading, Blackouts([dark]))) is is_fault
    assert oracle.num_excused == (not is_fault)
