"""What a fleet on one machine consists of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.cli.cores import is_cpu
from paceline.errors import InvalidArgument
from paceline.method_names import POOL_METHODS, where_else

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_PORT = 7400
DEFAULT_HTTP_PORT = 8000
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
DRAFTER_COPY = {"int8": "int8", "int4": "int4"}


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """A fleet on one machine.

    Attributes:
        model: the target, as `paceline.model_source` understands it.
        drafter_model: the draft model; "int8" or "int4" for a quantised copy of the target.
        method: drafting methods, first one first, such as "ngram,draft_model".
        num_speculative_tokens: block size.
        verifiers: number of verifier processes.
        drafters: number of drafter processes; 0 decodes plainly.
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

    @property
    def methods(self) -> tuple[str, ...]:
        """The drafting methods in order."""
        return tuple(name.strip() for name in self.method.split(",") if name.strip())

    @property
    def needs_draft_model(self) -> bool:
        """Whether the drafters load a model."""
        return self.drafters > 0 and "draft_model" in self.methods

    @property
    def copy_bits(self) -> str:
        """Width of the quantised copy of the target that drafts; empty when something else does."""
        return DRAFTER_COPY.get(self.drafter_model, "") if self.needs_draft_model else ""

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
        unknown = set(self.methods) - set(POOL_METHODS)
        if unknown or not self.methods:
            raise InvalidArgument(
                f"--method {self.method!r}: a comma-separated list of {', '.join(POOL_METHODS)}{where_else(unknown)}",
                field="method",
            )
        if self.copy_bits and not is_cpu(self.drafter_device):
            raise InvalidArgument(
                f"--drafter-device {self.drafter_device}: the quantised copy runs on the CPU; name a model of the same "
                "tokenizer with --drafter-model, or draft with --method ngram",
                field="drafter_device",
            )
