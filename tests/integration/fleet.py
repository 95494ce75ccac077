"""A whole fleet in one process: real gRPC, real services, weightless models, any session store.

    async with Fleet.start(tmp_path, hash_law(VOCAB), drafts=perfect) as fleet, fleet.client() as client:
        run = await generate(client, fleet.request([1, 2, 3], max_tokens=20))

A replica can be cut off (its port closes, its actor lives), killed (its actor dies too) and brought back on the same
port, as the same life or as a new one. On leaving, nothing may be left: no session, page, stream, actor or task.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline_drafter.draft_actor import DraftActor
from paceline_drafter.draft_limits import DraftLimits
from paceline_drafter.servicer import DrafterService, drafter_door
from paceline_gateway.pool import Pool
from paceline_gateway.service import GatewayService
from paceline_gateway.settings import GatewaySettings
from paceline_verifier.servicer import VerifierService, verifier_door
from paceline_verifier.verify_actor import VerifyActor

from paceline.client import AsyncClient
from paceline.drafting.method import DraftMethod
from paceline.engine.judging import JudgeRequest, Verdict, judge
from paceline.engine.target import TargetEngine, TargetOptions
from paceline.generation import Chunk, Evidence, Finished, Started
from paceline.messages import FinishReason, ModelInfo, SamplingParams, TokenOrigin
from paceline.runtime.grpc_server import GrpcServer
from paceline.runtime.replica_actor import ActorLimits
from paceline.runtime.replica_service import Replica
from paceline.runtime.settings import ServiceSettings
from paceline.runtime.supervisor import Supervisor
from paceline.session.store import SessionStore
from paceline.speculation.tree import EMPTY_BLOCK
from paceline.text.request import GenerationRequest, Prompt, SpeculationOptions, TokenPrompt
from paceline.text.tokenizer import Tokenizer
from tests.fakes import scripted_drafter
from tests.fakes.scripted_drafter import ScriptedDrafter, StepGate
from tests.fakes.tiny_tokenizer import write_letters
from tests.fakes.toy_runner import Law, ToyRunner
from tests.integration.node import DrafterNode, Life, Node, VerifierNode

VOCAB = 32
EOS = VOCAB - 1
GREEDY = SamplingParams(temperature=0.0)
TIMEOUT_S = 20.0
MODEL = "toy"

RunnerFactory = Callable[[Law], ToyRunner]
MethodFactory = Callable[[], DraftMethod]


def target_law(law: Law, vocab_size: int = VOCAB) -> scripted_drafter.Law:
    """What the target chooses after a context under a request's parameters, its noise included."""

    def choose(context: Sequence[int], sampling: SamplingParams) -> int:
        logits = law(tuple(context)).unsqueeze(0)
        verdict = judge([JudgeRequest(logits, EMPTY_BLOCK, context, len(context), sampling, vocab_size)])[0]
        assert isinstance(verdict, Verdict)
        return verdict.tokens[0]

    return choose


def plain_tokens(law: Law, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams = GREEDY) -> list[int]:
    """What plain decoding gives, without any service; ends with the end-of-sequence token if it comes."""
    choose, tokens = target_law(law), list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(choose(tokens, sampling))
        if tokens[-1] == EOS and not sampling.ignore_eos:
            break
    return tokens[len(prompt) :]


@dataclass(frozen=True, slots=True)
class Run:
    """One generation as its client saw it."""

    started: Started
    chunks: tuple[Chunk, ...]
    finished: Finished

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def origins(self) -> list[TokenOrigin]:
        return [origin for chunk in self.chunks for origin in chunk.origins]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def reason(self) -> FinishReason:
        return self.finished.finish_reason

    @property
    def evidence(self) -> Evidence:
        return self.finished.evidence

    def check_counts(self) -> None:
        """Oracle 3: the same number, whichever way it is counted."""
        evidence, tokens = self.evidence, self.tokens
        assert self.finished.completion_tokens == len(tokens) == len(self.origins)
        assert 0 <= evidence.accepted_tokens <= evidence.draft_tokens
        assert evidence.accepted_tokens == self.origins.count(TokenOrigin.ACCEPTED)
        assert evidence.accepted_tokens == sum(evidence.accepted_per_position)
        assert evidence.target_passes > 0
        assert evidence.tokens_per_target_pass == len(tokens) / evidence.target_passes
        position = self.started.prompt_tokens
        for chunk in self.chunks:
            position += len(chunk.token_ids)
            assert chunk.next_token == position
            assert sum(chunk.text_lengths) == len(chunk.text)
            assert len(chunk.text_lengths) == len(chunk.token_ids)


async def generate(client: AsyncClient, request: GenerationRequest, timeout_s: float = TIMEOUT_S) -> Run:
    """Runs one generation to its end and checks its counts."""
    events = [event async for event in client.generate(request, timeout_s=timeout_s)]
    started, *chunks, finished = events
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    run = Run(started, tuple([chunk for chunk in chunks if isinstance(chunk, Chunk)]), finished)
    run.check_counts()
    return run


async def until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Returns when the condition holds; looks once per millisecond."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  (the condition lies in other services: nothing tells)
            await asyncio.sleep(0.001)


@dataclass
class FleetOptions:
    """How a fleet differs from the smallest one.

    Attributes:
        method: makes the drafting method of each drafter; None for no drafter.
        settings: settings of the gateway that are not the default.
        runner: makes the toy runner of each verifier.
        server: settings of the replicas' servers that are not the default.
        tokenizer_hash: what drafters say theirs is; None for that of their tokenizer.
        drafter_tokenizer: theirs; None for the gateway's.
        verifier_tokenizer: theirs; None for the gateway's.
        weights: tells the digest of the weights that a verifier begins a life with.
        vocab_size: of the target, and of the tokenizer that `write_model` writes.
    """

    method: MethodFactory | None = None
    num_verifiers: int = 1
    num_drafters: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    store: SessionStore | None = None
    runner: RunnerFactory = lambda law: ToyRunner(law, VOCAB, max_model_len=256)
    target: TargetOptions = field(default_factory=TargetOptions)
    limits: ActorLimits = field(default_factory=ActorLimits)
    draft_limits: DraftLimits = field(default_factory=DraftLimits)
    drafter_context: int = 0
    tokenizer_hash: str | None = None
    drafter_tokenizer: Tokenizer | None = None
    verifier_tokenizer: Tokenizer | None = None
    weights: Callable[[], str] = lambda: ""
    vocab_size: int = VOCAB
    write_model: Callable[[Path], Path] = lambda folder: write_letters(folder, VOCAB, max_model_len=256)


class Fleet:
    """A gateway with its replicas; see the module's docstring."""

    def __init__(self, folder: Path, law: Law, options: FleetOptions) -> None:
        self.law = law
        self.options = options
        self.folder = options.write_model(folder / "model")
        self.tokenizer = Tokenizer.load(self.folder)
        self.verifiers: list[VerifierNode] = [
            Node(self._verifier_life, options.server) for _ in range(options.num_verifiers)
        ]
        num_drafters = options.num_drafters if options.method else 0
        self.drafters: list[DrafterNode] = [Node(self._drafter_life, options.server) for _ in range(num_drafters)]
        self.address = ""
        self.gateway = self._new_gateway()

    def _new_gateway(self) -> GatewayService:
        settings = {
            "verifiers": tuple(node.address for node in self.verifiers),
            "drafters": tuple(node.address for node in self.drafters),
            "model_name": MODEL,
            "http_port": None,
            # A pass of a toy takes no time, so no draft pays: blocks have their full size unless a test asks for more.
            "governor": False,
            **self.options.settings,
        }
        return GatewayService(GatewaySettings(model=str(self.folder), **settings), self.options.store)

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, folder: Path, law: Law, **options: Any) -> AsyncIterator[Fleet]:
        """A running fleet.

        Args:
            folder: for the model's files.
            law: the target.
            options: of `FleetOptions`.
        """
        fleet = cls(folder, law, FleetOptions(**options))
        async with contextlib.AsyncExitStack() as stack:
            for node in fleet.nodes:
                stack.push_async_callback(node.close)
                await node.boot()
            fleet.address = await stack.enter_async_context(fleet._serve(fleet.gateway))
            yield fleet

    async def add_verifier(self) -> VerifierNode:
        """One more, which the gateway finds only if discovery tells it; whoever adds it closes it."""
        node = Node(self._verifier_life, self.options.server)
        await node.boot()
        self.verifiers.append(node)
        return node

    @property
    def http_url(self) -> str:
        """Where the gateway's HTTP server is; needs `settings={"http_port": 0}`."""
        return f"http://{self.gateway.addresses['http']}"

    @property
    def verifier_pool(self) -> Pool:
        assert self.gateway.verifiers is not None
        return self.gateway.verifiers

    @property
    def drafter_pool(self) -> Pool:
        assert self.gateway.drafters is not None
        return self.gateway.drafters

    @property
    def nodes(self) -> list[Node[Any]]:
        """All replicas."""
        return [*self.verifiers, *self.drafters]

    @contextlib.asynccontextmanager
    async def another_gateway(self) -> AsyncIterator[tuple[GatewayService, str]]:
        """A second gateway with the same replicas and settings, and its address; they share only a store on a server,
        or the one of the options."""
        gateway = self._new_gateway()
        async with self._serve(gateway) as address:
            yield gateway, address

    @contextlib.asynccontextmanager
    async def _serve(self, gateway: GatewayService) -> AsyncIterator[str]:
        server = GrpcServer(ServiceSettings(), gateway.grpc_services)
        gateway.register(server.server)
        address = await server.start()
        async with Supervisor("gateway") as supervisor:
            try:
                await gateway.start(supervisor, lambda healthy: None)
                yield address
                await self.quiet(gateway)
            finally:
                await gateway.stop()
                await server.stop(1.0)
        assert not supervisor.children

    async def quiet(self, gateway: GatewayService | None = None) -> None:
        """Oracle 5: returns when nothing runs anywhere any more."""
        gateway = gateway or self.gateway
        sessions, pools = gateway.sessions, (gateway.verifiers, gateway.drafters)
        await until(lambda: not sessions.num_running and not sessions.actors)
        await until(lambda: all(pool is None or pool.num_sessions + pool.num_searching == 0 for pool in pools))
        await until(lambda: all(node.num_sessions == 0 for node in self.nodes))

    def client(self, api_key: str | None = None) -> AsyncClient:
        """One that tells everything: it resumes nothing by itself."""
        return AsyncClient(self.address, api_key=api_key, resume=None)

    def request(
        self,
        prompt: Sequence[int] | Prompt,
        *,
        max_tokens: int | None = 20,
        sampling: SamplingParams = GREEDY,
        num_speculative_tokens: int | None = None,
        method: str = "",
        **fields: Any,
    ) -> GenerationRequest:
        """A request with token ids, greedy unless told otherwise."""
        ready = prompt if not isinstance(prompt, Sequence) else TokenPrompt(tuple(prompt))
        speculation = SpeculationOptions(True, method, num_speculative_tokens)
        return GenerationRequest(ready, sampling=sampling, max_tokens=max_tokens, speculation=speculation, **fields)

    def _info(self, boot_id: str, **fields: Any) -> ModelInfo:
        return ModelInfo(
            MODEL, self.options.vocab_size, boot_id=boot_id, eos_token_ids=(EOS,), weights_bytes=1000, **fields
        )

    def _verifier_life(self, boot_id: str) -> Life[ToyRunner]:
        runner = self.options.runner(self.law)
        engine = TargetEngine(runner, eos_token_ids=(EOS,), options=self.options.target)
        actor = VerifyActor(engine, self.options.limits)
        tokenizer = self.options.verifier_tokenizer or self.tokenizer
        info = self._info(
            boot_id,
            max_model_len=runner.info.max_model_len,
            tokenizer_hash=tokenizer.fingerprint,
            max_draft_tokens=self.options.target.max_draft_tokens,
            weights_digest=self.options.weights(),
        )
        return Life(actor, VerifierService(verifier_door(), lambda: Replica(actor, info, tokenizer.vocabulary)), runner)

    def _drafter_life(self, boot_id: str) -> Life[DraftMethod]:
        assert self.options.method is not None
        method = self.options.method()
        actor = DraftActor(method, self.options.draft_limits, self.options.limits)
        tokenizer = self.options.drafter_tokenizer or self.tokenizer
        stated = self.options.tokenizer_hash
        info = self._info(
            boot_id,
            methods=method.info.methods,
            max_model_len=self.options.drafter_context,
            tokenizer_hash=tokenizer.fingerprint if stated is None else stated,
            max_draft_tokens=self.options.draft_limits.max_draft_tokens,
        )
        return Life(actor, DrafterService(drafter_door(), lambda: Replica(actor, info, tokenizer.vocabulary)), method)


def perfect_method(law: Law, *, gate: StepGate | None = None, at_once: bool = False) -> MethodFactory:
    """A drafter that proposes what the target will choose."""
    return lambda: ScriptedDrafter(scripted_drafter.perfect(target_law(law)), gate=gate, at_once=at_once)


def scripted_methods(law: Law, vocab_size: int = VOCAB) -> Iterator[tuple[str, MethodFactory]]:
    """Every kind of scripted drafter by name."""
    choose = target_law(law, vocab_size)
    scripts: dict[str, Callable[[], scripted_drafter.Script]] = {
        "perfect": lambda: scripted_drafter.perfect(choose),
        "wrong_at_0": lambda: scripted_drafter.wrong_at(choose, 0, vocab_size),
        "wrong_at_2": lambda: scripted_drafter.wrong_at(choose, 2, vocab_size),
        "eos_at_1": lambda: scripted_drafter.eos_at(choose, 1, EOS),
        "out_of_vocab": lambda: scripted_drafter.out_of_vocab(choose, 1, vocab_size),
        "negative_id": lambda: scripted_drafter.out_of_vocab(choose, 1, -1),
        "empty": scripted_drafter.empty,
        "too_long": lambda: scripted_drafter.too_long(choose, 7),
        "garbage": lambda: scripted_drafter.garbage(5, vocab_size),
        "broken": scripted_drafter.broken,
    }
    for name, make in scripts.items():
        yield name, lambda make=make: ScriptedDrafter(make())  # type: ignore[misc]
