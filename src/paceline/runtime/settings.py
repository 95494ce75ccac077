"""Settings shared by the services: environment variables and command line flags, checked once at start.

Each service has one class built on these. A field `max_sessions` of the verifier is `PACELINE_VERIFIER_MAX_SESSIONS` in
the environment and `--max-sessions` on the command line, which wins. Nothing else reads the environment.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliApp, NoDecode, SettingsConfigDict, SettingsError

from paceline.errors import ConfigurationError
from paceline.runtime.environment import check_environment

SettingsT = TypeVar("SettingsT", bound="ServiceSettings")


def settings_config(service: str) -> SettingsConfigDict:
    """The pydantic configuration of a service's settings class: its prefix, its flags, its program name."""
    return SettingsConfigDict(
        env_prefix=f"PACELINE_{service.upper()}_",
        cli_prog_name=f"paceline-{service}",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
        use_attribute_docstrings=True,
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
    )


class ServiceSettings(BaseSettings):
    """What every service can be told."""

    model_config = settings_config("service")

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all interfaces."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the gRPC server; 0 takes a free one, which the log and `ready_file` tell."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint `/metrics` on `host`; 0 takes a free one, none starts no endpoint."""
    tls_cert_file: Path | None = None
    """PEM certificate chain of the server; with `tls_key_file` it turns TLS on."""
    tls_key_file: Path | None = None
    """PEM private key of `tls_cert_file`."""
    tls_client_ca_file: Path | None = None
    """PEM authorities that client certificates must come from: turns mutual TLS on."""
    max_message_bytes: int = Field(default=16 * 2**20, ge=2**16)
    """Largest gRPC message that is accepted or sent, in bytes."""
    drain_timeout_s: float = Field(default=20.0, ge=0)
    """After SIGTERM, how long running sessions may take to end, in seconds."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is logged."""
    log_format: Literal["json", "text"] = "text"
    """json for machines, text for people."""
    ready_file: Path | None = None
    """File to write {"address": ..., "pid": ...}, and where HTTP and metrics are, to when the service is ready."""
    parent_pid: int | None = Field(default=None, ge=1)
    """Process id of the launcher: the service ends when that process is no longer its parent."""

    @field_validator("*", mode="before")
    @classmethod
    def _read_none(cls, value: Any, info: ValidationInfo) -> Any:
        """Takes the word that help and README have for None, where a field can be that."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        return None if value == "none" and NoneType in get_args(annotation) else value

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file belong together; give both or none")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise ValueError("tls_client_ca_file needs tls_cert_file and tls_key_file")
        return self


class ModelServiceSettings(ServiceSettings):
    """What every service that runs a model can be told."""

    device: str = "cpu"
    """Where the model runs: cpu, cuda or cuda:N."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of weights and key/value rows."""
    num_threads: int = Field(default=1, ge=1)
    """Threads of one pass on a CPU."""
    cpu_affinity: Annotated[tuple[int, ...], NoDecode] = ()
    """Cores that the process may use, such as 0,1; empty for all."""

    @field_validator("cpu_affinity", mode="before")
    @classmethod
    def _split_cores(cls, value: Any) -> Any:
        return split_commas(value)

    @field_validator("cpu_affinity")
    @classmethod
    def _check_cores(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(core < 0 for core in value):
            raise ValueError("a core number is never negative")
        return value

    def apply_to_process(self) -> None:
        """Binds the process to its cores and sets the variables that OpenMP reads when a model's library is loaded.

        Call it before torch is imported. Threads that spin while they wait steal the core of the other service.
        """
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        os.environ["OMP_NUM_THREADS"] = str(self.num_threads)
        if self.cpu_affinity and hasattr(os, "sched_setaffinity"):
            try:
                os.sched_setaffinity(0, self.cpu_affinity)
            except OSError as error:
                raise ConfigurationError(
                    f"cpu_affinity {list(self.cpu_affinity)} cannot be set: {error}; this machine has "
                    f"{os.cpu_count()} cores",
                    field="cpu_affinity",
                ) from error


def split_commas(value: Any) -> Any:
    """Makes a list of "a,b" and of ["a,b", "c"], as environment and flags give them; for `mode="before"`."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
        return [item.strip() for part in value for item in part.strip("[]").split(",") if item.strip()]
    return value


def load_settings(settings_class: type[SettingsT], arguments: Sequence[str] | None = None) -> SettingsT:
    """Reads flags, then the environment, then defaults. `--help` prints every field and exits.

    Args:
        settings_class: the service's class.
        arguments: command line without the program's name; None takes the process's own.

    Raises:
        ConfigurationError: a value is wrong, or a flag or a variable with the service's prefix is no setting; names
            the flag and what is allowed.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not {"-h", "--help"} & set(given):
        check_environment(_prefix(settings_class), settings_class.model_fields, os.environ)
    try:
        return CliApp.run(settings_class, cli_args=given)
    except ValidationError as error:
        problems = [_problem(settings_class, item) for item in error.errors()]
        field = str(error.errors()[0]["loc"][0]) if error.errors()[0]["loc"] else ""
        raise ConfigurationError("; ".join(problems), field=field) from None
    except SettingsError as error:
        raise ConfigurationError(str(error).removeprefix("error parsing CLI: ") + "; see --help") from None


def _prefix(settings_class: type[ServiceSettings]) -> str:
    return settings_class.model_config.get("env_prefix", "")


def _problem(settings_class: type[ServiceSettings], error: ErrorDetails) -> str:
    """What is wrong with a value, in the words of the command line."""
    location = error["loc"]
    message = error["msg"].removeprefix("Value error, ")
    for name in sorted(settings_class.model_fields, key=len, reverse=True):
        if "_" in name:
            message = re.sub(rf"\b{name}\b", _flag(name), message)
    if not location:
        return message
    name = str(location[0])
    message = "is required" if message == "Field required" else message
    out_of_range = error["type"] in {"greater_than_equal", "less_than_equal"}
    if out_of_range and (allowed := _range_of(settings_class.model_fields[name])):
        message = f"is {error['input']}: {allowed}"
    return f"{_flag(name)} ({_prefix(settings_class)}{name.upper()}): {message}"


def _range_of(field: FieldInfo) -> str:
    """What a number may be, such as "1 to 512"; empty where one end is open."""
    ends = [[getattr(limit, end) for limit in field.metadata if hasattr(limit, end)] for end in ("ge", "le")]
    return "" if [] in ends else f"{ends[0][0]} to {ends[1][0]}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def describe(settings: ServiceSettings) -> dict[str, str]:
    """Every field and its value in force, for the log at start; secrets are masked by their type."""
    return {name: str(getattr(settings, name)) for name in type(settings).model_fields}


def settings_table(settings_class: type[ServiceSettings]) -> str:
    """A markdown table of flags, environment variables, defaults and meanings: the one in each service's README."""
    prefix = _prefix(settings_class)
    lines = ["| flag | environment | default | meaning |", "|---|---|---|---|"]
    for name, field in settings_class.model_fields.items():
        default = "required" if field.is_required() else f"`{_readable(field.default)}`"
        meaning = " ".join((field.description or "").split())
        lines.append(f"| `{_flag(name)}` | `{prefix}{name.upper()}` | {default} | {meaning} |")
    return "\n".join(lines)


def _readable(value: object) -> str:
    if isinstance(value, SecretStr):
        secret = value.get_secret_value()
        # An address that names nobody and carries no parameters holds no credentials.
        value = secret if "://" in secret and not set(secret) & set("@?") else str(value)
    if value is None or value == () or value == "":
        return "none"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
