"""What every stream has to show: the tokens, the text and the end of an undisturbed run, or an error with an excuse.

The undisturbed run is plain decoding in this process, in float32, of the request as it was sent. Where a stream differs
from it in a near-tie, as `bench.near_ties` defines it, the rest is compared behind the stream's own token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bench.near_ties import Tally, compare
from bench.reference import CacheFreeReference, Mode
from paceline.engine.load_runner import load_runner
from paceline.engine.local import LocalRequest, generate
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.target import TargetEngine, TargetOptions
from paceline.errors import Unavailable
from paceline.messages import FinishReason, SamplingParams
from paceline.text.commit import Committer, EndSettings
from paceline.text.request import GenerationRequest, TokenPrompt
from paceline.text.tokenizer import Tokenizer
from tests.chaos.fleet import Blackouts
from tests.chaos.models import ChaosModels
from tests.chaos.streams import Reading, Trouble

BATCH = 64
EXCUSED_SHARE = 0.75
"""Part of a client's deadline that must have been blackout: links take a while to break and to come back."""


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """What a generation comes to.

    Attributes:
        tokens: ids, the last one included.
        text: what they read as.
        reason: why it ends.
        stop_string: that ended it; empty if none did.
    """

    tokens: tuple[int, ...]
    text: str
    reason: FinishReason | None
    stop_string: str


class Oracle:
    """Judges readings.

    Args:
        models: what the fleet served.

    Attributes:
        tally: tokens compared, near-ties, and differences that are faults.
        faults: all else that is wrong.
        num_complete: generations that ended as the undisturbed run does.
        num_left: those whose client left, compared as far as it had read.
        num_excused: typed errors while no verifier was there for a client's whole deadline.
    """

    def __init__(self, models: ChaosModels) -> None:
        runner = load_runner(models.target, options=RunnerOptions(prefix_caching=False))
        self._engine = TargetEngine(
            runner, eos_token_ids=runner.eos_token_ids, options=TargetOptions(max_sessions=BATCH)
        )
        self._eos_token_ids = runner.eos_token_ids
        self._tokenizer = Tokenizer.load(models.target)
        self._reference = CacheFreeReference(models.target)
        self.tally = Tally()
        self.faults: list[str] = []
        self.num_complete = 0
        self.num_left = 0
        self.num_excused = 0

    def judge(self, readings: Sequence[Reading], blackouts: Blackouts) -> None:
        """Judges all readings."""
        torch.set_num_threads(1)
        for start in range(0, len(readings), BATCH):
            group = readings[start : start + BATCH]
            plain = self.undisturbed([reading.request for reading in group])
            for reading, undisturbed in zip(group, plain, strict=True):
                self._judge(reading, undisturbed, blackouts)

    def _judge(self, reading: Reading, undisturbed: Undisturbed, blackouts: Blackouts) -> None:
        self.faults += [f"{reading.name}: {line}" for line in reading.disorder]
        for trouble in reading.troubles:
            if excused(trouble, reading.deadline_s, blackouts):
                self.num_excused += 1
            else:
                waited_s, dark_s = trouble.at - trouble.since, blackouts.seconds_in(trouble.since, trouble.at)
                self.faults.append(
                    f"{reading.name} (session {reading.session or reading.request.session}): "
                    f"{type(trouble.error).__name__} after {waited_s:.1f} s without a token, in {dark_s:.1f} s of "
                    f"which no verifier was there: {trouble.error.message}"
                )
        if not reading.tokens and reading.finished is None:
            return
        before = len(self.tally.near_ties), len(self.tally.faults)
        self._compare_tokens(reading, undisturbed)
        if (len(self.tally.near_ties), len(self.tally.faults)) != before:
            return  # it took another course, and has been compared on that
        if reading.finished is None:
            self.num_left += reading.left
            if not reading.left and not reading.troubles:
                self.faults.append(f"{reading.name}: ended without a word after {len(reading.tokens)} tokens")
            return
        self._check_end(reading, undisturbed)

    def _compare_tokens(self, reading: Reading, undisturbed: Undisturbed) -> None:
        request = reading.request
        length = len(reading.tokens) if reading.finished is None else None
        compare(
            f"{reading.name} (session {reading.session}), expected being the fleet's",
            reading.tokens,
            undisturbed.tokens[:length],
            prompt=_ids(request),
            mode=Mode("chaos", request.sampling),
            seed=request.seed or 0,
            reference=self._reference,
            decode_behind=lambda forced: self.undisturbed([request], tuple(forced))[0].tokens[len(forced) : length],
            tally=self.tally,
        )

    def _check_end(self, reading: Reading, undisturbed: Undisturbed) -> None:
        finished = reading.finished
        assert finished is not None
        shown = (reading.text, finished.finish_reason, finished.stop_string)
        wanted = (undisturbed.text, undisturbed.reason, undisturbed.stop_string)
        counts = (finished.prompt_tokens, finished.completion_tokens, reading.prompt_tokens)
        right_counts = (len(_ids(reading.request)), len(reading.tokens), len(_ids(reading.request)))
        if shown != wanted or counts != right_counts:
            self.faults.append(f"{reading.name}: shows {shown} {counts} instead of {wanted} {right_counts}")
        else:
            self.num_complete += 1

    def undisturbed(self, requests: Sequence[GenerationRequest], forced: tuple[int, ...] = ()) -> list[Undisturbed]:
        """Plain decoding of all requests, behind forced tokens if any."""
        local = [
            LocalRequest(
                prompt=(*_ids(request), *forced),
                sampling=_with_seed(request),
                max_tokens=(request.max_tokens or 0) - len(forced),
                generation_start=len(_ids(request)),
            )
            for request in requests
        ]
        results = generate(self._engine, local, eos_token_ids=self._eos_token_ids)
        return [
            self._cut(request, (*forced, *result.tokens)) for request, result in zip(requests, results, strict=True)
        ]

    def _cut(self, request: GenerationRequest, tokens: tuple[int, ...]) -> Undisturbed:
        """The generation up to its end, which may be a stop string that plain decoding knows nothing of."""
        end = EndSettings(
            max_new_tokens=request.max_tokens or 0,
            eos_token_ids=frozenset(self._eos_token_ids),
            stop_token_ids=frozenset(request.sampling.stop_token_ids),
            stop=request.stop,
            min_tokens=request.sampling.min_tokens,
            ignore_eos=request.sampling.ignore_eos,
        )
        committed = Committer(self._tokenizer, end, _ids(request)).commit_round(tokens)
        return Undisturbed(committed.token_ids, committed.text, committed.finish, committed.stop_string or "")


def excused(trouble: Trouble, deadline_s: float, blackouts: Blackouts) -> bool:
    """Whether a typed error is what the client must get: no verifier could be used for all of its deadline."""
    dark_s = blackouts.seconds_in(trouble.since, trouble.at)
    return isinstance(trouble.error, Unavailable) and dark_s >= EXCUSED_SHARE * deadline_s


def _ids(request: GenerationRequest) -> tuple[int, ...]:
    assert isinstance(request.prompt, TokenPrompt)
    return request.prompt.ids


def _with_seed(request: GenerationRequest) -> SamplingParams:
    return replace(request.sampling, seed=request.seed or 0)
