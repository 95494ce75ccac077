"""Drafting methods put together as the services put them together, in one process.

In the `verifier` a target engine drafts by itself. In the `pool` a method stands beside the engine, and what it needs
of the target's hidden states goes through the bytes that travel and the store that a drafter keeps them in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from paceline_drafter.feature_store import FeatureStore
from paceline_drafter.load import feature_store, method_settings
from paceline_drafter.settings import DrafterSettings
from paceline_verifier.load import self_draft_plan
from paceline_verifier.serving import serve, served_taps
from paceline_verifier.settings import VerifierSettings

from bench.method_cases import Shape, Where
from paceline.drafting.build import build_method
from paceline.drafting.method import DraftJob, DraftMethod
from paceline.engine.features import FeatureTaps
from paceline.engine.load_runner import LoadedRunner, load_runner
from paceline.engine.local import LocalRequest, LocalResult, generate, no_draft
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.target import TargetEngine, TargetOptions
from paceline.messages import SamplingParams
from paceline.method_names import CUT_METHODS
from paceline.speculation.tree import DraftTree
from paceline.text.tokenizer import Tokenizer

KV_BYTES = 256 << 20
MAX_MODEL_LEN = 2048
_SESSIONS = 8

_session_numbers = count()


@dataclass(frozen=True, slots=True)
class Wanted:
    """A generation.

    Attributes:
        prompt: its tokens, forced ones included.
        generation_start: index of its first generated token, forced ones included.
        sampling: parameters.
        max_tokens: new tokens.
    """

    prompt: tuple[int, ...]
    generation_start: int
    sampling: SamplingParams
    max_tokens: int


Decode = Callable[[Sequence[Wanted]], list[LocalResult]]
"""Decodes generations at once, with drafts."""


class MethodEngines:
    """Engines for one target.

    Args:
        folder: of the target.
        draft_model: what `draft_model` drafts with; empty for a quantised copy of the target.
        kv_bytes: of the target, and of drafters.
        max_model_len: most tokens of a session.
    """

    def __init__(
        self, folder: Path, *, draft_model: str = "", kv_bytes: int = KV_BYTES, max_model_len: int = MAX_MODEL_LEN
    ) -> None:
        self._folder = folder
        self._draft_model = draft_model
        self._kv_bytes = kv_bytes
        self._max_model_len = max_model_len
        self._tokenizer = Tokenizer.load(folder)
        self._runner: tuple[str, LoadedRunner] | None = None

    def make(self, method: str, where: Where, shape: Shape, head: Path | None) -> Decode:
        """Everything that is needed to decode with a method.

        Args:
            method: drafting method.
            where: its placement.
            shape: of its drafts.
            head: its checkpoint; None for a method without one.
        """
        return self._inside(method, shape, head) if where is Where.VERIFIER else self._beside(method, shape, head)

    def _inside(self, method: str, shape: Shape, head: Path | None) -> Decode:
        settings = VerifierSettings.model_validate(
            {
                "model": str(self._folder),
                "self_draft_method": method,
                "self_draft_model": "" if method in CUT_METHODS else str(head or ""),
                "self_draft_kv_bytes": self._kv_bytes,
                "max_draft_tokens": shape.max_draft_tokens,
                "num_draft_tokens": shape.max_draft_tokens,
                "eagle_topk": shape.eagle_topk,
                "medusa_tree": shape.medusa_tree,
                "exit_layer": shape.exit_layer,
            }
        )
        plan = self_draft_plan(settings, self._folder)
        if plan is None:
            raise ValueError(f"{method} is no method of a verifier")
        runner = self._runner_for(plan.taps)
        engine = TargetEngine(
            runner,
            eos_token_ids=runner.eos_token_ids,
            options=_limits(shape),
            self_drafter=plan.build(runner, self._tokenizer),
        )

        def decode(wanted: Sequence[Wanted]) -> list[LocalResult]:
            requests = [_request(each, self_draft_depth=shape.depth) for each in wanted]
            results = generate(engine, requests, eos_token_ids=runner.eos_token_ids)
            _check_clean(engine)
            if engine.self_drafting.num_failures:
                raise RuntimeError(f"{method} failed {engine.self_drafting.num_failures} times; see the log")
            return results

        return decode

    def _beside(self, method: str, shape: Shape, head: Path | None) -> Decode:
        settings = self._drafter_settings(method, shape, head)
        drafts = build_method(method_settings(settings))
        store = feature_store(drafts.info, settings)
        taps = None
        if store is not None:
            taps = served_taps(str(head) if method == "eagle3" else "final_norm", self._folder)
        runner = self._runner_for(taps)
        engine = TargetEngine(
            runner,
            eos_token_ids=runner.eos_token_ids,
            options=_limits(shape),
            served=None if store is None else serve(runner, taps, "auto"),
        )

        def decode(wanted: Sequence[Wanted]) -> list[LocalResult]:
            drafters = [_PoolDrafter(drafts, store, engine, each) for each in wanted]
            try:
                requests = [
                    _request(each, depth=shape.depth, drafter=drafter)
                    for each, drafter in zip(wanted, drafters, strict=True)
                ]
                results = generate(engine, requests, eos_token_ids=runner.eos_token_ids)
            finally:
                for drafter in drafters:
                    drafter.close()
            _check_clean(engine)
            return results

        return decode

    def _drafter_settings(self, method: str, shape: Shape, head: Path | None) -> DrafterSettings:
        quantised = method == "draft_model" and not self._draft_model
        return DrafterSettings.model_validate(
            {
                "method": (method,),
                "model": self._draft_model if method == "draft_model" and not quantised else str(self._folder),
                "draft_head": "" if method in CUT_METHODS else str(head or ""),
                "runner": "onnx" if quantised else "auto",
                "kv_cache_bytes": self._kv_bytes,
                "max_sessions": _SESSIONS,
                "max_model_len": self._max_model_len,
                "max_draft_tokens": shape.max_draft_tokens,
                "eagle_topk": shape.eagle_topk,
                "medusa_tree": shape.medusa_tree,
                "exit_layer": shape.exit_layer,
            }
        )

    def _runner_for(self, taps: FeatureTaps | None) -> LoadedRunner:
        """The target keeping these features; one is held at a time."""
        kind = "" if taps is None else taps.kind
        if self._runner is None or self._runner[0] != kind:
            self._runner = None
            options = RunnerOptions(kv_bytes=2 * self._kv_bytes, prefix_caching=False, taps=taps)
            self._runner = (kind, load_runner(self._folder, options=options))
        return self._runner[1]


class _PoolDrafter:
    """Drafts for one generation as a drafter does, with what it fetched of the target's features."""

    def __init__(self, method: DraftMethod, store: FeatureStore | None, engine: TargetEngine, wanted: Wanted) -> None:
        self._method = method
        self._store = store
        self._engine = engine
        self._wanted = wanted
        self.session = f"drafted-{next(_session_numbers)}"
        method.open(self.session)

    def __call__(self, context: Sequence[int], max_depth: int) -> DraftTree:
        """The block after a context."""
        job = DraftJob(self.session, tuple(context), max_depth, self._wanted.sampling, self._wanted.generation_start)
        if self._store is not None:
            self._fetch(self._store, len(context) - 1)
            job.features = self._store.rows(self.session, len(context) - 1)
        while not job.done:
            self._method.advance([job])
        return job.block

    def _fetch(self, store: FeatureStore, num_rows: int) -> None:
        """Brings the target's features up to that row; before the first pass there are none."""
        if not self._engine.kv_len(self.session):
            return
        held = store.of(self.session)
        while held.num_rows < num_rows:
            held = store.add(self.session, self._engine.features(self.session, held.num_rows, num_rows - held.num_rows))

    def close(self) -> None:
        """Frees what the session holds."""
        self._method.close(self.session)
        if self._store is not None:
            self._store.forget(self.session)


def _request(
    wanted: Wanted, *, depth: int = 0, self_draft_depth: int = 0, drafter: _PoolDrafter | None = None
) -> LocalRequest:
    return LocalRequest(
        prompt=wanted.prompt,
        sampling=wanted.sampling,
        max_tokens=wanted.max_tokens,
        num_draft_tokens=depth,
        propose=drafter or no_draft,
        generation_start=wanted.generation_start,
        self_draft_depth=self_draft_depth,
        session="" if drafter is None else drafter.session,
    )


def _limits(shape: Shape) -> TargetOptions:
    return TargetOptions(max_sessions=_SESSIONS, max_draft_tokens=shape.max_draft_tokens)


def _check_clean(engine: TargetEngine) -> None:
    engine.check_integrity()
    if engine.num_sessions or engine.kv_pages_in_use:
        raise RuntimeError(f"{engine.num_sessions} sessions and {engine.kv_pages_in_use} pages are left")
