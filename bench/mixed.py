"""Sixteen sessions of every kind, alone, four and sixteen at once: each gives the tokens of its own plain decoding.

They differ in where drafts come from, in every parameter, in length and seed; several share a long beginning. They
arrive in random order in the middle of one another, at an engine whose passes are so short that prompts are fed in
chunks beside decoding, and whose pool is too small for all of them, so that some are preempted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from bench.crowd import CrowdOutcome, random_arrivals, run_crowd
from bench.lossless import Case, Lossless, chat_prompts
from bench.near_ties import Tally, compare
from bench.reference import GREEDY, SAMPLED, Mode
from paceline.benchmark.prompts import PROMPTS
from paceline.drafting.local import LocalDrafter
from paceline.drafting.method import DraftMethod
from paceline.engine.load_runner import load_runner
from paceline.engine.local import LocalRequest, Propose, no_draft
from paceline.engine.runner_options import RunnerChoice, RunnerOptions
from paceline.engine.target import TargetEngine, TargetOptions
from paceline.messages import SamplingParams
from paceline.speculation.tree import DraftTree
from paceline.text.tokenizer import Tokenizer

NUM_SESSIONS = 16
BATCHES = (1, 4, 16)
PAGE_TOKENS = 16
SPARE_TOKENS = 32
"""Room of the pool beyond what the longest session needs: far less than all that are there at once."""
LIMITS = TargetOptions(max_sessions=NUM_SESSIONS, max_batch_tokens=48, max_draft_tokens=16)
LONG_TOKENS, SHARED_TOKENS = 600, 150
GARBAGE, TREE, PLAIN, TORCH_SOURCE = "garbage", "tree", "plain", "draft_model in torch"
SOURCES = (PLAIN, "ngram", "draft_model", TORCH_SOURCE, GARBAGE, TREE)
"""Where drafts come from: methods by the name that they have in `Mixed.methods`, and scripted ones."""
BLOCK_SIZES = (4, 1, 8, 3, 5)


def modes(sentence_end: int) -> tuple[Mode, ...]:
    """Every parameter, some alone and some together.

    Args:
        sentence_end: a token that texts contain often, to stop at and to be forbidden.
    """
    return (
        GREEDY,
        SAMPLED,
        Mode("top_k", SamplingParams(top_k=20)),
        Mode("min_p", SamplingParams(temperature=1.2, min_p=0.05)),
        Mode("penalties", SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.4)),
        Mode("frequency", SamplingParams(temperature=0.7, frequency_penalty=0.5, repetition_penalty=1.1)),
        Mode("bias", SamplingParams(temperature=0.9, logit_bias={sentence_end: -100.0, 198: 1.5})),
        Mode("min_tokens", SamplingParams(temperature=0.0, min_tokens=14, stop_token_ids=(sentence_end,))),
        Mode("stop ids", SamplingParams(temperature=1.0, top_p=0.9, stop_token_ids=(sentence_end,), min_tokens=4)),
        Mode("all", SamplingParams(temperature=1.1, top_k=50, top_p=0.9, min_p=0.02, presence_penalty=0.3)),
    )


@dataclass(frozen=True, slots=True)
class MixedSession:
    """One of the sessions.

    Attributes:
        case: its prompt, parameters and seed.
        source: where its drafts come from, one of `SOURCES`.
        num_draft_tokens: depth of its blocks.
    """

    case: Case
    source: str
    num_draft_tokens: int

    @property
    def long(self) -> bool:
        """Whether its prompt alone needs most of the pool."""
        return len(self.case.ids) >= LONG_TOKENS

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.case.name}, {self.source} with blocks of {self.num_draft_tokens}"


@dataclass(frozen=True, slots=True)
class MixedReport:
    """What came of one batch size.

    Attributes:
        runner: which code ran the model.
        together: most sessions at once.
        pool_tokens: room for key/value rows.
        num_sessions: sessions in all.
        num_equal: of those, how many gave the tokens of their plain decoding alone; near-ties excepted.
        num_tokens: tokens compared.
        near_ties: what was excused.
        drafted, accepted: draft tokens.
        num_passes: of the engine.
        num_mixed_passes: of those, how many fed a prompt's chunk beside another session's block.
        most_sessions: most sessions in a pass.
        preemptions: sessions that lost their pages and were computed again.
        prefix_hit_tokens: tokens whose rows another session had computed.
    """

    runner: str
    together: int
    pool_tokens: int
    num_sessions: int
    num_equal: int
    num_tokens: int
    near_ties: tuple[str, ...]
    drafted: int
    accepted: int
    num_passes: int
    num_mixed_passes: int
    most_sessions: int
    preemptions: int
    prefix_hit_tokens: int

    @property
    def complaints(self) -> list[str]:
        """What did not happen and has to."""
        found = []
        if not self.prefix_hit_tokens:
            found.append("no session found rows of another one's prefix")
        if self.together > 1 and not self.num_mixed_passes:
            found.append("no prompt was fed beside decoding")
        if not 0 < self.accepted < self.drafted:
            found.append(f"{self.accepted} of {self.drafted} drafts were accepted")
        return [f"{self.together} at once in {self.pool_tokens} tokens: {line}" for line in found]


def never_preempted(reports: Sequence[MixedReport]) -> list[str]:
    """Numbers of sessions at once at which no session was preempted in any of the runs; they must be, in some."""
    together = dict.fromkeys(report.together for report in reports if report.together > 1)
    return [
        f"{count} at once: no session was preempted"
        for count in together
        if not any(report.preemptions for report in reports if report.together == count)
    ]


class Mixed:
    """The sessions, their plain decodings, and engines to put them through together.

    Args:
        lossless: has the reference and the engine for plain decoding alone.
        methods: drafting methods by their names in `SOURCES`; sessions of others draft plainly.
        runner: which code runs the model in the crowd.
    """

    def __init__(self, lossless: Lossless, methods: Mapping[str, DraftMethod], runner: RunnerChoice) -> None:
        self.lossless = lossless
        self.methods = methods
        self._runner = runner

    def sessions(self, count: int = NUM_SESSIONS, variant: int = 0) -> list[MixedSession]:
        """Sessions of all kinds; another variant pairs parameters, prompts and drafts in another way."""
        tokenizer = Tokenizer.load(self.lossless.folder)
        sentence_end = tokenizer.encode(".", add_special_tokens=False)[-1]
        texts = chat_prompts(self.lossless.folder, [prompt.text for prompt in PROMPTS])
        short = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        everything = [token for index in reversed(short) for token in texts[index]]
        shared = tuple(everything[:SHARED_TOKENS])
        kinds = modes(sentence_end)
        found = []
        for index in range(count):
            prompt = short[(index + variant) % len(short)]
            ids = texts[prompt] if index % 2 else (*shared, *texts[prompt])
            if index == 5:
                ids = tuple(everything[-LONG_TOKENS:])
            mode = kinds[(index + 3 * variant) % len(kinds)]
            source = SOURCES[(index + variant) % len(SOURCES)]
            case = Case(PROMPTS[prompt], ids, mode, seed=1000 * variant + index)
            found.append(MixedSession(case, source, BLOCK_SIZES[index % len(BLOCK_SIZES)]))
        return found

    def check(self, sessions: Sequence[MixedSession], together: int) -> MixedReport:
        """Puts the sessions through one engine, `together` at once, and compares each with its plain decoding alone.

        Differences go to the tally of `Lossless` too.
        """
        longest = max(len(session.case.ids) for session in sessions) + self.lossless.max_tokens
        pool_bytes = (longest + SPARE_TOKENS) * self.lossless.kv_bytes_per_token
        options = RunnerOptions(kv_bytes=pool_bytes, page_tokens=PAGE_TOKENS, runner=self._runner)
        runner = load_runner(self.lossless.folder, options=options)
        engine = TargetEngine(runner, eos_token_ids=runner.eos_token_ids, options=LIMITS)
        tally, outcomes = Tally(), []
        num_equal = 0
        for start in range(0, len(sessions), together):
            group = sessions[start : start + together]
            outcome = self._run(engine, group, {})
            outcomes.append(outcome)
            for index, session in enumerate(group):
                num_faults = len(tally.faults)
                self._compare(
                    session, outcome.results[index].tokens, partial(self._behind, engine, group, index), tally
                )
                num_equal += len(tally.faults) == num_faults
        engine.check_integrity()
        if engine.num_sessions or engine.kv_pages_in_use:
            tally.faults.append(f"{engine.num_sessions} sessions and {engine.kv_pages_in_use} pages are left")
        self.lossless.tally.add(tally)
        results = [result for outcome in outcomes for result in outcome.results]
        return MixedReport(
            runner=self._runner.value,
            together=together,
            pool_tokens=runner.pool.capacity_tokens,
            num_sessions=len(sessions),
            num_equal=num_equal,
            num_tokens=tally.num_tokens,
            near_ties=tuple(tally.near_ties),
            drafted=sum(result.num_drafted for result in results),
            accepted=sum(result.num_accepted for result in results),
            num_passes=sum(outcome.num_passes for outcome in outcomes),
            num_mixed_passes=sum(outcome.num_mixed_passes for outcome in outcomes),
            most_sessions=max(outcome.most_sessions for outcome in outcomes),
            preemptions=engine.scheduling.preemptions,
            prefix_hit_tokens=engine.scheduling.prefix_hit_tokens,
        )

    def _compare(
        self,
        session: MixedSession,
        actual: Sequence[int],
        behind: Callable[[Sequence[int]], Sequence[int]],
        tally: Tally,
    ) -> None:
        case = session.case
        compare(
            session.name,
            self.lossless.plain(case),
            actual,
            prompt=case.ids,
            mode=case.mode,
            seed=case.seed,
            reference=self.lossless.reference,
            decode_behind=behind,
            tally=tally,
        )

    def _behind(
        self, engine: TargetEngine, group: Sequence[MixedSession], index: int, forced: Sequence[int]
    ) -> list[int]:
        """One session once more among the others, behind forced tokens."""
        return self._run(engine, group, {index: tuple(forced)}).results[index].tokens

    def _run(
        self, engine: TargetEngine, group: Sequence[MixedSession], forced: Mapping[int, tuple[int, ...]]
    ) -> CrowdOutcome:
        """All sessions of a group, arriving one after another in random order."""
        drafters: list[LocalDrafter] = []
        requests = [
            LocalRequest(
                prompt=(*session.case.ids, *forced.get(index, ())),
                sampling=session.case.sampling,
                max_tokens=self.lossless.max_tokens - len(forced.get(index, ())),
                num_draft_tokens=session.num_draft_tokens,
                propose=self._propose(session, drafters),
                generation_start=len(session.case.ids),
            )
            for index, session in enumerate(group)
        ]
        try:
            arrivals = random_arrivals(requests, seed=group[0].case.seed, most_steps_apart=2)
            return run_crowd(engine, arrivals, eos_token_ids=self.lossless.eos_token_ids)
        finally:
            for drafter in drafters:
                drafter.close()

    def _propose(self, session: MixedSession, drafters: list[LocalDrafter]) -> Propose:
        case = session.case
        if session.source == GARBAGE:
            return _garbage
        if session.source == TREE:
            return partial(_wide_tree, (*case.ids, *self.lossless.plain(case)))
        if session.source not in self.methods:
            return no_draft
        drafters.append(LocalDrafter(self.methods[session.source], case.sampling, len(case.ids)))
        return drafters[-1]


def _garbage(context: Sequence[int], depth: int) -> DraftTree:
    """Random ids, some of which are no tokens."""
    generator = random.Random(len(context))
    return DraftTree.chain([generator.randrange(-5, 60_000) for _ in range(depth)])


def _wide_tree(truth: Sequence[int], context: Sequence[int], depth: int) -> DraftTree:
    """Three wrong children beside the right one, which goes wrong too after a while."""
    generator = random.Random(len(context))
    right = list(truth[len(context) :][:depth])
    wrong = [[generator.randrange(40_000) for _ in range(depth)] for _ in range(3)]
    cut = generator.randint(0, len(right))
    return DraftTree.from_paths([wrong[0][:2], [*right[:1], *wrong[1][:1]], [*right[:cut], *wrong[2][: depth - cut]]])
