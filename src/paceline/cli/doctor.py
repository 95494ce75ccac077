"""`paceline doctor`: checks what this machine has, and says what to do about what it lacks."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version

import psutil
from rich.table import Table
from rich.text import Text

from paceline.cli.console import out, to_json
from paceline.cli.cores import available_cores, is_cpu, plan_cores
from paceline.cli.devices import why_unusable
from paceline.cli.ports import why_not_free
from paceline.errors import PacelineError
from paceline.model_source import BUILT_IN, CacheSettings, resolve
from paceline.session.embedded import EmbeddedRedis, find_server
from paceline.session.redis_store import RedisStore

_NEEDED_MEMORY_BYTES = 3 * 2**30
_NEEDED_DISK_BYTES = 2 * 2**30
_PORTS = {"--port": "port", "--http-port": "HTTP port"}
"""Options of `paceline up` and how their check is called."""


class State(Enum):
    """How a check came out."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked thing.

    Attributes:
        subject: what was checked.
        state: how it came out.
        detail: what was found.
        advice: what to do; empty when nothing is to be done.
    """

    subject: str
    state: State
    detail: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What `--json` prints."""

    healthy: bool
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """What is to be checked; meanings as in `paceline up`."""

    model: str
    verifier_device: str
    drafter_device: str
    port: int
    http_port: int
    redis_url: str


async def run_doctor(options: DoctorOptions, *, json_output: bool) -> int:
    """Prints what was found.

    Returns:
        0, or 1 when a check has failed.
    """
    findings = [
        check_python(),
        *check_packages(),
        *check_devices(options.verifier_device, options.drafter_device),
        check_cores(options.verifier_device, options.drafter_device),
        check_memory(),
        *check_model(options.model),
        check_port("--port", options.port),
        check_port("--http-port", options.http_port),
        await check_redis(options.redis_url),
    ]
    report = Report(all(finding.state is not State.FAILED for finding in findings), tuple(findings))
    if json_output:
        out().print(to_json(report), markup=False)
    else:
        _print(report)
    return 0 if report.healthy else 1


def _print(report: Report) -> None:
    marks = {State.OK: ("✓", "green"), State.WARNING: ("!", "yellow"), State.FAILED: ("✗", "red")}
    table = Table.grid(padding=(0, 2))
    for finding in report.findings:
        table.add_row(Text(*marks[finding.state]), finding.subject, Text(finding.detail))
        if finding.advice:
            table.add_row("", "", Text(f"→ {finding.advice}", marks[finding.state][1]))
    console = out()
    console.print(table)
    console.print(closing(report))


def closing(report: Report) -> str:
    """The last line: what to do next."""
    if not report.healthy:
        return "Something is missing, see above."
    not_ok = {finding.subject for finding in report.findings if finding.state is not State.OK}
    taken = [f"{flag} 0" for flag, subject in _PORTS.items() if subject in not_ok]
    if taken:
        return f"A port cannot be taken: stop what has it, or try `paceline up {' '.join(taken)}`."
    return "Everything is there: try `paceline up`."


def check_python() -> Finding:
    """The interpreter and the system."""
    found = f"CPython {platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("python", State.OK, found)


def check_packages() -> Iterator[Finding]:
    """The library, the services and what they need."""
    for package in ("paceline", "paceline-gateway", "paceline-drafter", "paceline-verifier", "grpcio", "redis"):
        yield _package(package, State.FAILED, "run `make setup`, or `pip install` the four packages of this repository")
    for package in ("fastapi", "uvicorn"):
        yield _package(package, State.FAILED, "the gateway's HTTP API needs it: run `pip install -e services/gateway`")
    for package in ("torch", "transformers"):
        yield _package(package, State.FAILED, "verifiers and drafters need it: run `pip install 'paceline[engine]'`")
    yield _package(
        "onnxruntime-genai",
        State.WARNING,
        "quantised drafters on a CPU need it: run `pip install 'paceline[onnx]'`; or draft with --method ngram",
    )


def _package(name: str, state: State, advice: str) -> Finding:
    try:
        return Finding(name, State.OK, version(name))
    except PackageNotFoundError:
        return Finding(name, state, "not installed", advice)


def check_devices(verifier_device: str, drafter_device: str) -> Iterator[Finding]:
    """Whether torch sees the devices that are asked for."""
    for subject, device in (("verifier device", verifier_device), ("drafter device", drafter_device)):
        if is_cpu(device):
            yield Finding(subject, State.OK, f"cpu ({_cpu_name()})")
        else:
            yield _cuda(subject, device)


def _cuda(subject: str, device: str) -> Finding:
    if reason := why_unusable(device):
        return Finding(subject, State.FAILED, device, reason)
    import torch

    properties = torch.cuda.get_device_properties(torch.device(device))
    return Finding(subject, State.OK, f"{device}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB")


def _cpu_name() -> str:
    return platform.processor() or platform.machine()


def check_cores(verifier_device: str, drafter_device: str) -> Finding:
    """Whether verifier and drafter can have cores of their own."""
    on_cpu = [is_cpu(verifier_device), is_cpu(drafter_device)]
    cores = available_cores()
    if not any(on_cpu):
        return Finding("cores", State.OK, f"{len(cores)}; the models run elsewhere")
    plan = plan_cores(cores, verifiers=int(on_cpu[0]), drafters=int(on_cpu[1]))
    shares = [*plan.verifiers, *plan.drafters]
    if not all(shares):
        advice = "verifier and drafter share them and wait for each other: expect little gain"
        return Finding("cores", State.WARNING, f"{len(cores)}", advice)
    names = [name for name, wanted in zip(("verifier", "drafter"), on_cpu, strict=True) if wanted]
    split = ", ".join(f"{name} {len(share)}" for name, share in zip(names, shares, strict=True))
    return Finding("cores", State.OK, f"{len(cores)}: {split}")


def check_memory() -> Finding:
    """Whether there is memory for the demo's models."""
    free = psutil.virtual_memory().available
    detail = f"{free / 2**30:.1f} GiB free"
    if free < _NEEDED_MEMORY_BYTES:
        return Finding("memory", State.WARNING, detail, "the demo needs about 3 GiB: close something")
    return Finding("memory", State.OK, detail)


def check_model(reference: str) -> Iterator[Finding]:
    """Whether the model is there, or can be fetched when it is needed."""
    cache = CacheSettings().folder
    if reference in BUILT_IN and not list((cache / "models").glob(f"{reference}-[0-9]*-f*")):
        detail = f"{reference}: not fetched yet"
        yield Finding("model", State.WARNING, detail, f"`paceline quantize {reference}` fetches it (or the first `up`)")
    else:
        try:
            yield Finding("model", State.OK, f"{reference}: {resolve(reference, weights=False)}")
        except PacelineError as error:
            yield Finding("model", State.FAILED, reference, error.message)
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    detail = f"{free / 2**30:.0f} GiB free in {cache}"
    if free < _NEEDED_DISK_BYTES:
        yield Finding("disk", State.WARNING, detail, "the demo's models need about 2 GiB; set XDG_CACHE_HOME elsewhere")
    else:
        yield Finding("disk", State.OK, detail)


def check_port(flag: str, port: int) -> Finding:
    """Whether the gateway can take a port.

    Args:
        flag: the option of `paceline up` that names the port.
        port: 0 for any free one.
    """
    subject = _PORTS[flag]
    if reason := why_not_free(port):
        advice = f"a fleet may be running already; otherwise use {flag} 0 for a free one"
        return Finding(subject, State.WARNING, f"{port} cannot be taken: {reason}", advice)
    return Finding(subject, State.OK, f"{port} is free" if port else "a free one will be taken")


async def check_redis(url: str) -> Finding:
    """Whether the Redis that is named answers, or an embedded one starts."""
    try:
        if url:
            await ping_redis(url)
            return Finding("redis", State.OK, "answers")
        with EmbeddedRedis() as redis:
            await ping_redis(redis.url)
            return Finding("redis", State.OK, f"the embedded one starts and answers ({find_server().name})")
    except PacelineError as error:
        return Finding("redis", State.FAILED, error.message, "name a running one with --redis-url")


async def ping_redis(url: str) -> None:
    """Returns when the Redis answers.

    Raises:
        PacelineError: it does not, or the URL cannot be used.
    """
    store = RedisStore.from_url(url)
    try:
        await store.ping()
    finally:
        await store.close()
