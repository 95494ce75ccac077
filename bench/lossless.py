"""Decodes real prompts in every way and compares the tokens: what `bench/verify_lossless.py` and its test run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.near_ties import Tally, compare
from bench.prompts import Prompt
from bench.reference import GREEDY, SAMPLED, CacheFreeReference, Mode
from paceline.drafting.build import MethodSettings, RunnerKind, build_method
from paceline.drafting.method import DraftJob, DraftMethod
from paceline.engine.loader import load_model
from paceline.engine.local import LocalRequest, LocalResult, generate, no_draft
from paceline.engine.target import TargetEngine
from paceline.engine.transformers_runner import TransformersRunner
from paceline.messages import SamplingParams
from paceline.model_source import resolve
from paceline.speculation.tree import DraftTree
from paceline.text.chat_template import ChatTemplate
from paceline.text.request import ChatMessage
from paceline.text.tokenizer import Tokenizer

TARGET = "smollm2-135m-instruct"
MODES = (GREEDY, SAMPLED)

_session_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt in one mode.

    Attributes:
        prompt: the prompt.
        ids: its tokens, chat template applied.
        mode: how tokens are chosen.
        seed: of the noise.
    """

    prompt: Prompt
    ids: tuple[int, ...]
    mode: Mode
    seed: int

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.prompt.name}, {self.mode.name}"

    @property
    def sampling(self) -> SamplingParams:
        """The mode as the engine takes it."""
        return replace(self.mode.sampling, seed=self.seed)


class Lossless:
    """The engine under test and the oracles, loaded once.

    Args:
        target: reference of the target model.
        max_tokens: new tokens per prompt.
    """

    def __init__(self, target: str = TARGET, max_tokens: int = 96) -> None:
        folder = resolve(target)
        self.target = target
        self.max_tokens = max_tokens
        self.tally = Tally()
        self._folder = folder
        self.reference = CacheFreeReference(folder)
        runner = TransformersRunner(load_model(folder))
        self.eos_token_ids = runner.eos_token_ids
        self.engine = TargetEngine(runner, eos_token_ids=runner.eos_token_ids)
        self._plain: dict[str, list[int]] = {}

    def cases(self, prompts: Iterable[Prompt], modes: Sequence[Mode] = MODES) -> list[Case]:
        """All prompts in all modes; the seed is the prompt's place."""
        listed = list(prompts)
        ids = chat_prompts(self._folder, [prompt.text for prompt in listed])
        return [Case(prompt, ids[index], mode, seed=index + 1) for mode in modes for index, prompt in enumerate(listed)]

    def plain(self, case: Case) -> list[int]:
        """Plain decoding alone through the engine; decoded once per case."""
        if case.name not in self._plain:
            self._plain[case.name] = self._decode([case])[0].tokens
        return self._plain[case.name]

    def check_reference(self, case: Case) -> None:
        """Plain decoding against the cache-free reference, token by token."""
        plain = self.plain(case)
        choices = self.reference.choices([*case.ids, *plain], len(case.ids), case.mode, case.seed)
        # Every token is compared after the same prefix, so a near-tie needs no decoding behind it.
        compare(
            f"cache-free reference ({case.name})",
            [choice.token for choice in choices],
            plain,
            prompt=case.ids,
            mode=case.mode,
            seed=case.seed,
            reference=self.reference,
            decode_behind=lambda forced: plain[len(forced) :],
            tally=self.tally,
        )

    def check_generate(self, case: Case) -> None:
        """Greedy plain decoding against `transformers.generate`."""
        expected = self.reference.transformers_greedy(case.ids, self.max_tokens)
        self._compare(f"transformers.generate ({case.name})", case, expected, self.plain(case))

    def check_speculation(
        self, cases: Sequence[Case], method: DraftMethod, num_draft_tokens: int, *, together: int
    ) -> float:
        """One block size of one method on all cases, `together` sessions to a pass; returns tokens per round."""
        num_tokens = num_rounds = 0
        for start in range(0, len(cases), together):
            group = cases[start : start + together]
            results = self._decode(group, num_draft_tokens, method)
            for case, result in zip(group, results, strict=True):
                num_tokens += len(result.tokens)
                num_rounds += result.num_rounds
                what = f"{method.info.name} with blocks of {num_draft_tokens} ({case.name})"
                self._compare(what, case, self.plain(case), result.tokens, num_draft_tokens, method)
        return num_tokens / num_rounds

    def _compare(
        self,
        what: str,
        case: Case,
        expected: Sequence[int],
        actual: Sequence[int],
        num_draft_tokens: int = 0,
        method: DraftMethod | None = None,
    ) -> None:
        compare(
            what,
            expected,
            actual,
            prompt=case.ids,
            mode=case.mode,
            seed=case.seed,
            reference=self.reference,
            decode_behind=lambda forced: self._decode([case], num_draft_tokens, method, tuple(forced))[0].tokens,
            tally=self.tally,
        )

    def _decode(
        self,
        cases: Sequence[Case],
        num_draft_tokens: int = 0,
        method: DraftMethod | None = None,
        forced: tuple[int, ...] = (),
    ) -> list[LocalResult]:
        """Decodes all cases at once, behind forced tokens; plainly without a method."""
        proposers = [None if method is None else Proposer(method, case.sampling) for case in cases]
        try:
            requests = [
                LocalRequest(
                    prompt=(*case.ids, *forced),
                    sampling=case.sampling,
                    max_tokens=self.max_tokens - len(forced),
                    num_draft_tokens=num_draft_tokens,
                    propose=proposer or no_draft,
                    generation_start=len(case.ids),
                )
                for case, proposer in zip(cases, proposers, strict=True)
            ]
            return generate(self.engine, requests, eos_token_ids=self.eos_token_ids)
        finally:
            for proposer in proposers:
                if proposer is not None:
                    proposer.close()


class Proposer:
    """One session of a drafting method as a function from tokens to a block.

    Args:
        method: drafts for this and other sessions.
        sampling: of the generation.
    """

    def __init__(self, method: DraftMethod, sampling: SamplingParams) -> None:
        self._method = method
        self._sampling = sampling
        self._session = f"lossless-{next(_session_numbers)}"
        method.open(self._session)

    def __call__(self, context: Sequence[int], max_depth: int) -> DraftTree:
        """Drafts to the end, with nothing beside it."""
        job = DraftJob(self._session, list(context), max_depth, self._sampling)
        while not job.done:
            self._method.advance([job])
        return DraftTree.chain(job.tokens)

    def close(self) -> None:
        """Frees what the method holds for it."""
        self._method.close(self._session)


def chat_prompts(folder: Path, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """User messages as tokens of a model, chat template applied."""
    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate.load(folder, tokenizer.special_tokens)
    return [tokenizer.encode(template.render([ChatMessage("user", text)]), add_special_tokens=False) for text in texts]


def demo_method(name: str, target: str = TARGET) -> DraftMethod:
    """The demo's drafters: `draft_model`, an int8 copy of the target, or `ngram`."""
    return build_method(
        MethodSettings(methods=(name,), draft_model=target, runner=RunnerKind.ONNX, max_sessions=8, max_model_len=2048)
    )
