"""Every drafting method in every shape and both placements against plain decoding: a part of `make verify-lossless`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.fitted_heads import read_texts, write_fitted_heads
from bench.lossless import Case, Lossless
from bench.method_cases import MethodCase, MethodReport, Shape, Where
from bench.method_engines import Decode, MethodEngines, Wanted
from bench.near_ties import Tally, compare
from paceline.benchmark.prompts import Prompt
from paceline.engine.local import LocalResult
from paceline.head_source import example_of
from paceline.method_names import HEAD_METHODS


class Methods:
    """The sessions, their plain decodings, and engines that draft.

    Args:
        lossless: has the reference and the engine for plain decoding alone.
        prompts: what sessions begin with; those that n-grams help should be among the first.
        engines: puts methods together.
    """

    def __init__(self, lossless: Lossless, prompts: Sequence[Prompt], engines: MethodEngines) -> None:
        self.lossless = lossless
        self._prompts = tuple(prompts)
        self._engines = engines
        self._made: tuple[tuple[str, Where, Shape], Decode] | None = None

    @property
    def num_layers(self) -> int:
        """Layers of the target."""
        return len(self.lossless.reference.model.model.layers)

    def heads(self, methods: Sequence[str], folder: Path) -> dict[str, Path]:
        """A head for each of these methods that needs one: the example for the target, or one made on the spot.

        Args:
            methods: drafting methods.
            folder: where heads are written.
        """
        needed = [method for method in methods if method in HEAD_METHODS]
        found = {method: Path(example) for method in needed if (example := example_of(method, self.lossless.target))}
        missing = [method for method in needed if method not in found]
        if missing:
            texts = read_texts(self.lossless.reference.model, self._texts())
            fitted = write_fitted_heads(self.lossless.reference.model, texts, folder)
            found |= {method: fitted[method] for method in missing}
        return found

    def check(self, case: MethodCase, head: Path | None, decode: Decode | None = None) -> MethodReport:
        """One case; differences go to the tally of `Lossless` too.

        Args:
            case: what is proved.
            head: of its method; None for a method without one.
            decode: in place of one that is made for the case.
        """
        decode = decode or self._decode_for(case, head)
        sessions = self.lossless.cases(self._prompts[: case.batch.num_sessions], [case.mode])
        together, tally = case.batch.together, Tally()
        results: list[LocalResult] = []
        for start in range(0, len(sessions), together):
            group = sessions[start : start + together]
            found = decode([_wanted(session, case.batch.max_tokens) for session in group])
            results += found
            for session, result in zip(group, found, strict=True):
                self._compare(case, session, result.tokens, decode, tally)
        self.lossless.tally.add(tally)
        return MethodReport(
            method=case.method,
            placement=case.where.value,
            shape=case.shape.name,
            mode=case.mode.name,
            batch=together,
            num_sessions=len(sessions),
            num_tokens=tally.num_tokens,
            ids_equal=not tally.faults,
            drafted=sum(result.num_drafted for result in results),
            accepted=sum(result.num_accepted for result in results),
            tokens_per_pass=sum(len(result.tokens) for result in results) / sum(each.num_rounds for each in results),
            near_ties=tuple(tally.near_ties),
        )

    def _compare(self, case: MethodCase, session: Case, actual: Sequence[int], decode: Decode, tally: Tally) -> None:
        limit = case.batch.max_tokens
        compare(
            f"{case.name} ({session.name})",
            self.lossless.plain(session)[:limit],
            actual,
            prompt=session.ids,
            mode=session.mode,
            seed=session.seed,
            reference=self.lossless.reference,
            decode_behind=lambda forced: decode([_wanted(session, limit, tuple(forced))])[0].tokens,
            tally=tally,
        )

    def _decode_for(self, case: MethodCase, head: Path | None) -> Decode:
        """What the case before had, if only modes and sessions differ."""
        key = (case.method, case.where, case.shape)
        if self._made is None or self._made[0] != key:
            self._made = None
            self._made = (key, self._engines.make(*key, head))
        return self._made[1]

    def _texts(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Prompts with their answers."""
        return [(case.ids, self.lossless.plain(case)) for case in self.lossless.cases(self._prompts)]


def _wanted(case: Case, max_tokens: int, forced: tuple[int, ...] = ()) -> Wanted:
    return Wanted((*case.ids, *forced), len(case.ids), case.sampling, max_tokens - len(forced))
