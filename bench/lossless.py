"""Decodes real prompts in every way and compares the tokens: what `bench/verify_lossless.py` and its test run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.near_ties import Tally, compare
from bench.reference import GREEDY, SAMPLED, CacheFreeReference, Mode
from bench.target import TARGET
from paceline.benchmark.prompts import Prompt
from paceline.drafting.build import MethodSettings, RunnerKind, build_method
from paceline.drafting.local import LocalDrafter
from paceline.drafting.method import DraftMethod
from paceline.engine.load_runner import load_runner
from paceline.engine.local import LocalRequest, LocalResult, generate, no_draft
from paceline.engine.runner_options import RunnerChoice, RunnerOptions
from paceline.engine.target import TargetEngine
from paceline.messages import SamplingParams
from paceline.model_source import resolve
from paceline.text.chat_template import ChatTemplate
from paceline.text.request import ChatMessage
from paceline.text.tokenizer import Tokenizer

MODES = (GREEDY, SAMPLED)


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
        runner_choice: which code runs the target.
    """

    def __init__(
        self, target: str = TARGET, max_tokens: int = 96, runner_choice: RunnerChoice = RunnerChoice.AUTO
    ) -> None:
        folder = resolve(target)
        self.target = target
        self.max_tokens = max_tokens
        self.tally = Tally()
        self.folder = folder
        self.reference = CacheFreeReference(folder)
        # Without prefix caching every decoding is one on a fresh engine.
        runner = load_runner(folder, options=RunnerOptions(prefix_caching=False, runner=runner_choice))
        self.eos_token_ids = runner.eos_token_ids
        self.kv_bytes_per_token = runner.info.kv_bytes_per_token
        self.engine = TargetEngine(runner, eos_token_ids=runner.eos_token_ids)
        self._plain: dict[tuple[tuple[int, ...], str, int], list[int]] = {}

    def cases(self, prompts: Iterable[Prompt], modes: Sequence[Mode] = MODES) -> list[Case]:
        """All prompts in all modes; the seed is the prompt's place."""
        listed = list(prompts)
        ids = chat_prompts(self.folder, [prompt.text for prompt in listed])
        return [Case(prompt, ids[index], mode, seed=index + 1) for mode in modes for index, prompt in enumerate(listed)]

    def plain(self, case: Case) -> list[int]:
        """Plain decoding alone through the engine; decoded once per case."""
        key = (case.ids, case.mode.name, case.seed)
        if key not in self._plain:
            self._plain[key] = self._decode([case])[0].tokens
        return self._plain[key]

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
        proposers = [None if method is None else LocalDrafter(method, case.sampling, len(case.ids)) for case in cases]
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


def torch_method(target: str = TARGET) -> DraftMethod:
    """The target itself as its own drafter, in float32."""
    return build_method(
        MethodSettings(methods=("draft_model",), draft_model=target, runner=RunnerKind.TORCH, max_model_len=2048)
    )
