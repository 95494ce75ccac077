"""Everything the gateway can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from paceline.runtime.grpc_client import ClientTls
from paceline.runtime.settings import ServiceSettings, settings_config
from paceline_gateway.breaker import BreakerLimits
from paceline_gateway.discovery.targets import Target, parse_target, split_target
from paceline_gateway.plan import Patience
from paceline_gateway.services import SessionLimits

MEMORY_STORE = "memory://"


class GatewaySettings(ServiceSettings):
    """Settings of the gateway service."""

    model_config = settings_config("gateway")

    model: str
    """Target model, for its tokenizer and chat template: a folder, GGUF file, hub id or built-in name."""
    model_name: str = ""
    """Name that clients ask for; empty takes the last part of `model`. Replicas must serve the same name."""
    verifiers: Annotated[tuple[str, ...], NoDecode] = ()
    """Where verifiers are: host:port,host:port or dns:///host:port or k8s://namespace/service[:port-name-or-number]."""
    drafters: Annotated[tuple[str, ...], NoDecode] = ()
    """Where drafters are, in the same form; none: everything is decoded plainly."""
    dns_interval_s: float = Field(default=3.0, gt=0)
    """Pause between two lookups of a dns:/// name, in seconds."""
    kubeconfig_file: Path | None = None
    """Credentials for k8s://; none takes the pod's service account, or else the user's own kubeconfig."""
    http_port: int | None = Field(default=0, ge=0, le=65535)
    """Port of the OpenAI-compatible HTTP server on `host`; 0 takes a free one, none starts no HTTP server."""
    max_body_bytes: int = Field(default=8 * 2**20, ge=1024)
    """Largest body of an HTTP request, in bytes."""
    max_choices: int = Field(default=32, ge=1)
    """Most completions that one HTTP request may ask for: prompts times `n`."""
    api_keys_file: Path | None = None
    """File with the API keys that clients must show, one `name: key` on each line; none asks for no key."""
    log_prompts: bool = False
    """Log prompts and generated text, which may be confidential."""
    redis_url: SecretStr = SecretStr(MEMORY_STORE)
    """Where sessions are recorded: redis://host:port, rediss://, unix://, or memory:// for this process only."""
    redis_timeout_ms: int = Field(default=1000, ge=1)
    """Time for one call of the store, in milliseconds."""
    redis_ack_timeout_ms: int = Field(default=50, ge=1)
    """Silence of the store after which streams go on undurable, in milliseconds."""
    session_ttl_s: float = Field(default=3600.0, gt=0)
    """Life of a session's record after its last write, in seconds."""
    num_speculative_tokens: int = Field(default=4, ge=0, le=64)
    """Block size of requests that do not say, the largest with `governor`; 0 decodes plainly."""
    governor: bool = True
    """Choose for each round how large a block pays, and whether any does. Requests may fix the size all the same."""
    draft_ahead: bool = True
    """Draft the next block while one is being verified."""
    fetch_features: bool = True
    """Bring a drafter with a head the hidden states that it lacks, such as a long prompt's; else it drafts without."""
    max_concurrent_generations: int = Field(default=256, ge=1)
    """Generations at once; more are refused with RESOURCE_EXHAUSTED."""
    max_generation_s: float = Field(default=3600.0, gt=0)
    """Most time of one generation, in seconds."""
    max_buffered_chunks: int = Field(default=256, ge=2)
    """Chunks that may wait for a slow client; no round is started while they do."""
    max_buffered_bytes: int = Field(default=256 * 1024, ge=1024)
    """Rough size of these chunks, in bytes."""
    client_stall_s: float = Field(default=60.0, gt=0)
    """A client that leaves its full buffer unread, or stops within a body, is cut off after so long, in seconds."""
    startup_wait_s: float = Field(default=10.0, ge=0)
    """At start, how long to wait for replicas before serving without them, in seconds."""
    verifier_wait_ms: int = Field(default=2_000, ge=0)
    """How long a new request waits for a verifier, in milliseconds."""
    verifier_patience_ms: int = Field(default=10_000, ge=0)
    """How long a running generation waits for a verifier after it lost its own, in milliseconds."""
    return_window_ms: int = Field(default=1_000, ge=0)
    """How long a generation waits for a lost replica before it moves to another, in milliseconds."""
    verifier_silence_ms: int = Field(default=10_000, ge=1)
    """A verifier that owes an answer for so long, or 20 times its usual time, is left for another, in milliseconds."""
    verifier_prompt_silence_ms: int = Field(default=60_000, ge=1)
    """The same while it reads a whole session: the first round and the first one after a move, in milliseconds."""
    draft_wait_floor_ms: int = Field(default=50, ge=0)
    """Least time to wait for a draft, in milliseconds; else thrice the drafter's usual time or twice the verifier's."""
    draft_wait_ceiling_ms: int = Field(default=1_000, ge=0)
    """Most time that a generation waits for a draft, in milliseconds."""
    drafter_silence_ms: int = Field(default=10_000, ge=1)
    """A drafter that answers nothing for so long is given up for a while, in milliseconds."""
    breaker_failures: int = Field(default=5, ge=1)
    """Failures in a row after which a replica gets no session for a while: lost streams, silence, internal errors."""
    breaker_pause_ms: int = Field(default=1_000, ge=1)
    """How long it gets none until one session tries it, in milliseconds; doubles with each try that fails ..."""
    breaker_max_pause_ms: int = Field(default=30_000, ge=1)
    """... up to this, in milliseconds."""
    link_tls: bool = False
    """Speak TLS to verifiers and drafters."""
    link_tls_ca_file: Path | None = None
    """PEM authorities that replicas' certificates must come from; none takes the system's."""
    link_tls_cert_file: Path | None = None
    """PEM certificate chain that this gateway shows to replicas (mutual TLS)."""
    link_tls_key_file: Path | None = None
    """PEM private key of `link_tls_cert_file`."""
    link_tls_server_name: str = ""
    """Name that replicas' certificates must carry, for replicas found by address; empty takes the address's host."""

    @field_validator("verifiers", "drafters", mode="before")
    @classmethod
    def _split_addresses(cls, value: Any) -> Any:
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, (list, tuple)) or not all(isinstance(part, str) for part in given):
            return value
        return [address for part in given for address in split_target(part)]

    @field_validator("verifiers", "drafters")
    @classmethod
    def _check_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        parse_target(value)
        return value

    @model_validator(mode="after")
    def _check_links(self) -> Self:
        files = (self.link_tls_ca_file, self.link_tls_cert_file, self.link_tls_key_file)
        if (any(files) or self.link_tls_server_name) and not self.link_tls:
            raise ValueError("link_tls_* files and link_tls_server_name need link_tls")
        if (self.link_tls_cert_file is None) != (self.link_tls_key_file is None):
            raise ValueError("link_tls_cert_file and link_tls_key_file belong together; give both or none")
        if self.draft_wait_floor_ms > self.draft_wait_ceiling_ms:
            raise ValueError("draft_wait_floor_ms must not exceed draft_wait_ceiling_ms")
        if self.breaker_pause_ms > self.breaker_max_pause_ms:
            raise ValueError("breaker_pause_ms must not exceed breaker_max_pause_ms")
        return self

    @property
    def verifier_target(self) -> Target:
        """Where verifiers are."""
        return parse_target(self.verifiers)

    @property
    def drafter_target(self) -> Target:
        """Where drafters are."""
        return parse_target(self.drafters)

    @property
    def client_tls(self) -> ClientTls | None:
        """How links speak to replicas."""
        if not self.link_tls:
            return None
        return ClientTls(
            self.link_tls_ca_file, self.link_tls_cert_file, self.link_tls_key_file, self.link_tls_server_name
        )

    @property
    def patience(self) -> Patience:
        """How long sessions wait for what."""
        return Patience(
            first_verifier_s=self.verifier_wait_ms / 1000,
            verifier_s=self.verifier_patience_ms / 1000,
            return_window_s=self.return_window_ms / 1000,
            verifier_silence_s=self.verifier_silence_ms / 1000,
            prompt_silence_s=self.verifier_prompt_silence_ms / 1000,
            draft_floor_s=self.draft_wait_floor_ms / 1000,
            draft_ceiling_s=self.draft_wait_ceiling_ms / 1000,
            drafter_silence_s=self.drafter_silence_ms / 1000,
        )

    @property
    def breaker_limits(self) -> BreakerLimits:
        """When a replica counts as not doing its work."""
        return BreakerLimits(self.breaker_failures, self.breaker_pause_ms / 1000, self.breaker_max_pause_ms / 1000)

    @property
    def session_limits(self) -> SessionLimits:
        """Bounds of each session."""
        return SessionLimits(
            max_buffered_chunks=self.max_buffered_chunks,
            max_buffered_bytes=self.max_buffered_bytes,
            client_stall_s=self.client_stall_s,
            max_generation_s=self.max_generation_s,
            ack_timeout_s=self.redis_ack_timeout_ms / 1000,
            record_expiry_s=self.session_ttl_s,
        )
