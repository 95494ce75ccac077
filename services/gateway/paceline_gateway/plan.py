"""What one generation is to do, fixed at admission."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.generation import Promise
from paceline.messages import AcceptanceRule, Open, SamplingParams
from paceline.text.request import Prompt, SpeculationOptions
from paceline.token_log import TokenLog
from paceline_gateway.effects import Lane
from paceline_gateway.resumption import Resumption

EPOCH_OF_A_NEW_SESSION = 1


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """A request after validation and tokenisation.

    Attributes:
        session: its name.
        session_drawn: the gateway drew the name, so that nobody else has it.
        model: name of the target.
        prompt: prompt tokens, at least one.
        sampling: parameters, seed included.
        rule: acceptance rule.
        max_tokens: most tokens to generate; prompt and output fit the context.
        stop: stop strings.
        num_draft_tokens: block size, the largest where it is governed; 0 is plain decoding.
        governed: the governor chooses the block size of each round, up to the largest.
        method: the only method to draft by; empty for whatever the drafter does.
        draft_ahead: draft the next block while one is being verified.
        fetch_features: bring a drafter that builds on the target's features those that it lacks.
        prompt_features: a drafter may build on the target's features of the whole prompt, and not of its end alone.
        epoch: fencing number of this owner.
        tenant: owner of the session; empty without API keys.
        request_id: name of the request in logs.
        logged_prompt: the prompt as it was sent; None where prompts and generated text are not logged.
        speculation: what the request said of speculation.
        resumption: where the generation goes on; None for one that begins.
        last_verifier: address of the verifier that had the session last and may still hold its rows; empty for none.
        last_drafter: the same of a drafter, which keeps none of a generation that has ended.
    """

    session: str
    session_drawn: bool
    model: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    num_draft_tokens: int
    rule: AcceptanceRule = AcceptanceRule.MATCH
    stop: tuple[str, ...] = ()
    method: str = ""
    governed: bool = False
    draft_ahead: bool = True
    fetch_features: bool = True
    prompt_features: bool = True
    epoch: int = EPOCH_OF_A_NEW_SESSION
    tenant: str = ""
    request_id: str = ""
    logged_prompt: Prompt | None = None
    speculation: SpeculationOptions = SpeculationOptions()  # noqa: RUF009  (frozen)
    resumption: Resumption | None = None
    last_verifier: str = ""
    last_drafter: str = ""

    def last(self, lane: Lane) -> str:
        """Address of the replica that may still hold the session's rows; empty for none."""
        return self.last_verifier if lane is Lane.VERIFIER else self.last_drafter

    @property
    def committed(self) -> tuple[int, ...]:
        """Tokens that are final from the start: the prompt, and what was generated before."""
        return self.prompt if self.resumption is None else self.prompt + self.resumption.recorded

    @property
    def promise(self) -> Promise:
        """What the client may rely on. Without chance both rules give the same tokens, those of plain decoding."""
        exact = self.rule is AcceptanceRule.MATCH or self.sampling.greedy
        return Promise.EXACT if exact else Promise.DISTRIBUTION

    def opening(self, log: TokenLog) -> Open:
        """The command that registers the session with a replica: all committed tokens, and how it goes on."""
        return Open(
            session=self.session,
            epoch=self.epoch,
            tokens=log.slice(0, len(log)),
            generation_start=len(self.prompt),
            sampling=self.sampling,
            rule=self.rule,
            method=self.method,
        )


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a session waits for what, in seconds.

    Attributes:
        first_verifier_s: for a verifier at the start.
        verifier_s: for a verifier when one was lost.
        return_window_s: for a lost replica, before another one is taken.
        verifier_silence_s: for a verifier's answer, before another one is asked, at least ...
        silence_factor: ... or this multiple of its usual time.
        prompt_silence_s: the same while it reads all tokens: the first round, and the first one after a move.
        draft_floor_s: for a draft, at least ...
        draft_ceiling_s: ... and at most.
        draft_factor: multiple of the drafter's usual time, between these two ...
        round_factor: ... or of the verifier's, if that is more: a draft saves whole passes.
        drafter_silence_s: for any answer of a drafter before it is given up.
        drafter_pause_s: before a drafter that was given up may be tried again.
        refusal_pause_s: before a verifier that is full or shuts down, or another one, is asked again; doubles.
        refusal_retries: how often.
    """

    first_verifier_s: float = 2.0
    verifier_s: float = 10.0
    return_window_s: float = 1.0
    verifier_silence_s: float = 10.0
    silence_factor: float = 20.0
    prompt_silence_s: float = 60.0
    draft_floor_s: float = 0.05
    draft_ceiling_s: float = 1.0
    draft_factor: float = 3.0
    round_factor: float = 2.0
    drafter_silence_s: float = 10.0
    drafter_pause_s: float = 1.0
    refusal_pause_s: float = 0.05
    refusal_retries: int = 5
