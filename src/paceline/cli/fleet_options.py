"""What a fleet on one machine consists of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.cli.cores import is_cpu
from paceline.cli.drafting_options import Placement, check_drafting, placement_of
from paceline.errors import InvalidArgument
from paceline.head_source import example_of
from paceline.method_names import CUT_METHODS, HEAD_METHODS

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_PORT = 7400
DEFAULT_HTTP_PORT = 8000
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
DRAFTER_COPY = {"int8": "int8", "int4": "int4"}


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """A fleet on one machine.

    Attributes:
        model: the target, as `paceline.model_source` understands it; with an adapter of layerskip the model that it is
            added to.
        drafter_model: the draft model; "int8" or "int4" for a quantised copy of the target.
        method: drafting methods, first one first, such as "ngram,draft_model".
        head: checkpoint of medusa, eagle or eagle3: a folder or a hub id; of layerskip the adapter, or the whole model,
            that takes the target's place. Empty takes the example for the built-in target.
        placement: where drafts are made; AUTO as the method needs it.
        num_speculative_tokens: block size; the depth of a tree.
        eagle_topk: candidates per node of an EAGLE tree, 1 for chains; None for the services' default.
        num_draft_tokens: most nodes of a tree; None for the services' default.
        exit_layer: layers after which layerskip drafts; None for the one that the checkpoint names.
        verifiers: number of verifier processes.
        drafters: number of drafter processes, if the method is not placed in the verifiers; 0 decodes plainly.
        verifier_device: cpu, cuda or cuda:N.
        drafter_device: the same for the drafters.
        dtype: of the target's weights.
        port: of the gateway's gRPC server; 0 takes a free one.
        http_port: of the gateway's HTTP server; 0 takes a free one.
        redis_url: an existing Redis; empty starts an embedded one.
        log_dir: folder of the processes' logs.
        ready_timeout_s: how long a process may take to be ready, in seconds.
        drain_timeout_s: how long running generations may take to end at a stop, in seconds.
        cold_prompts: whether verifiers read every prompt anew, shared beginnings included: for comparisons.
    """

    model: str = DEFAULT_MODEL
    drafter_model: str = "int8"
    method: str = "draft_model"
    num_speculative_tokens: int = 4
    verifiers: int = 1
    drafters: int = 1
    verifier_device: str = "cpu"
    drafter_device: str = "cpu"
    dtype: str = "float32"
    port: int = DEFAULT_PORT
    http_port: int = DEFAULT_HTTP_PORT
    redis_url: str = ""
    log_dir: Path = Path("paceline-logs")
    ready_timeout_s: float = 600.0
    drain_timeout_s: float = 10.0
    cold_prompts: bool = False
    head: str = ""
    placement: Placement = Placement.AUTO
    eagle_topk: int | None = None
    num_draft_tokens: int | None = None
    exit_layer: int | None = None

    @property
    def methods(self) -> tuple[str, ...]:
        """The drafting methods in order."""
        return tuple(name.strip() for name in self.method.split(",") if name.strip())

    @property
    def self_draft_method(self) -> str:
        """The method with which the verifiers draft by themselves; empty when they do not."""
        return self.methods[0] if self._inside and self.num_speculative_tokens else ""

    @property
    def num_drafters(self) -> int:
        """Drafter processes that are started."""
        return 0 if self._inside else self.drafters

    @property
    def target(self) -> str:
        """Reference of the model whose text is wanted: `model`, or what layerskip has of it."""
        return (self._checkpoint if set(self.methods) & set(CUT_METHODS) else "") or self.model

    @property
    def base(self) -> str:
        """What an adapter of layerskip is added to; empty for the model that it names itself, if no other is named."""
        return self.model if self.model not in (DEFAULT_MODEL, self.target) else ""

    @property
    def head_reference(self) -> str:
        """Checkpoint of the head; empty where nothing drafts with one."""
        drafts = self.num_drafters > 0 or bool(self.self_draft_method)
        return self._checkpoint if drafts and set(self.methods) & set(HEAD_METHODS) else ""

    @property
    def needs_draft_model(self) -> bool:
        """Whether the drafters load a draft model."""
        return self.num_drafters > 0 and "draft_model" in self.methods

    @property
    def drafters_compute(self) -> bool:
        """Whether the drafters run a model: they then want a device, or cores of their own."""
        return self.num_drafters > 0 and set(self.methods) != {"ngram"}

    @property
    def copy_bits(self) -> str:
        """Width of the quantised copy of the target that drafts; empty when something else does."""
        return DRAFTER_COPY.get(self.drafter_model, "") if self.needs_draft_model else ""

    @property
    def _inside(self) -> bool:
        return placement_of(self.methods, self.placement) is Placement.VERIFIER

    @property
    def _checkpoint(self) -> str:
        """What `head` names, or the example in its place; with an exit layer of its own the model needs none."""
        if self.head or self.exit_layer is not None:
            return self.head
        trained = [name for name in self.methods if name in {*HEAD_METHODS, *CUT_METHODS}]
        return example_of(trained[0], self.model) if trained else ""

    def check(self) -> None:
        """Refuses what can never work.

        Raises:
            InvalidArgument: names the option and what is allowed.
        """
        if self.verifiers < 1:
            raise InvalidArgument(f"--verifiers is {self.verifiers}: at least 1 is needed", field="verifiers")
        if self.drafters < 0:
            raise InvalidArgument(f"--drafters is {self.drafters}: 0 or more", field="drafters")
        if self.port and self.port == self.http_port:
            raise InvalidArgument(
                f"--port and --http-port are both {self.port}: the gateway needs two; 0 takes a free one",
                field="http_port",
            )
        check_drafting(self, self._checkpoint)
        if self.copy_bits and not is_cpu(self.drafter_device):
            raise InvalidArgument(
                f"--drafter-device {self.drafter_device}: the quantised copy runs on the CPU; name a model of the same "
                "tokenizer with --drafter-model, or draft with --method ngram",
                field="drafter_device",
            )
