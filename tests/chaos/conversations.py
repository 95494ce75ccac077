"""What clients ask for: conversations of one to three turns, drawn from a seed.

They differ in everything that decides which tokens come: length, temperature, penalties, ends, seeds. Some share a
beginning, some pin or forbid speculation, some clients leave in the middle.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from paceline.messages import SamplingParams
from paceline.text.request import GenerationRequest, SpeculationOptions, TokenPrompt
from tests.chaos.models import LETTERS, MAX_MODEL_LEN
from tests.fakes.tiny_tokenizer import LETTERS as ALPHABET

MAX_TURNS = 3
_SHARED = tuple(range(7, 39))
"""A beginning that many conversations have, of two pages."""
_SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.4),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=1.0, top_k=20),
    SamplingParams(temperature=1.2, min_p=0.05, min_tokens=12),
    SamplingParams(temperature=0.7, frequency_penalty=0.5, repetition_penalty=1.1),
    SamplingParams(temperature=0.9, logit_bias={3: -100.0, 5: 1.5}),
    SamplingParams(temperature=1.0, stop_token_ids=(17,), min_tokens=6),
)
_SPECULATIONS = (
    SpeculationOptions(),
    SpeculationOptions(),
    SpeculationOptions(enabled=False),
    SpeculationOptions(num_speculative_tokens=1),
    SpeculationOptions(num_speculative_tokens=3),
    SpeculationOptions(num_speculative_tokens=5, method="draft_model"),
    SpeculationOptions(num_speculative_tokens=4, method="ngram"),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation, before it is known what came before.

    Attributes:
        new_ids: what the user says.
        request: everything but the prompt.
        leaves_after: the client leaves when it has so many tokens; None: it stays.
    """

    new_ids: tuple[int, ...]
    request: GenerationRequest
    leaves_after: int | None

    def after(self, text: tuple[int, ...]) -> GenerationRequest | None:
        """The request behind the conversation so far; None where there is no room for it."""
        prompt = (*text, *self.new_ids)
        room = MAX_MODEL_LEN - len(prompt)
        max_tokens = min(self.request.max_tokens or 0, room)
        if max_tokens <= self.request.sampling.min_tokens:
            return None
        return replace(self.request, prompt=TokenPrompt(prompt), max_tokens=max_tokens)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Some turns of one client.

    Attributes:
        name: in messages.
        turns: at least one.
    """

    name: str
    turns: tuple[Turn, ...]


def draw_conversation(seed: int, number: int, *, longest: int = 150) -> Conversation:
    """The conversation of that number in the run of that seed.

    Args:
        seed: of the run.
        number: of the conversation.
        longest: most tokens of a turn.
    """
    dice = random.Random(f"{seed}/{number}")
    name = f"chaos-{seed}-{number}"
    num_turns = dice.choice([1, 1, 2, MAX_TURNS])
    # Those of several turns are sessions by name; of the others the gateway draws the name, or the client does.
    session = name if num_turns > 1 or dice.random() < 0.3 else None
    turns = [_draw_turn(dice, session, longest // num_turns, first=index == 0) for index in range(num_turns)]
    return Conversation(name, tuple(turns))


def _draw_turn(dice: random.Random, session: str | None, longest: int, *, first: bool) -> Turn:
    own = tuple(dice.choices(range(LETTERS), k=dice.randrange(1, 25)))
    beginning = _SHARED if first and dice.random() < 0.4 else ()
    letters = ALPHABET[:20]
    stop = ("".join(dice.choices(letters, k=2)), dice.choice(letters) * 3) if dice.random() < 0.3 else ()
    request = GenerationRequest(
        TokenPrompt(own),
        sampling=replace(dice.choice(_SAMPLINGS), ignore_eos=dice.random() < 0.7),
        seed=dice.randrange(2**63),
        max_tokens=dice.randrange(min(16, longest), longest + 1),
        stop=stop,
        speculation=dice.choice(_SPECULATIONS),
        session=session,
    )
    leaves_after = dice.randrange(1, 30) if dice.random() < 0.05 else None
    return Turn((*beginning, *own), request, leaves_after)
