"""The life of a service's process: boot, ready, serve, drain, stop.

1. listen, with health NOT_SERVING, and serve the metrics if `metrics_port` is set;
2. `service.start`: load what it needs and prove that it works; then the process settles (`runtime/settle.py`);
3. health SERVING, and the ready file;
4. until SIGTERM or SIGINT, or until a task fails that the service cannot do without;
5. health NOT_SERVING, `service.drain` within `drain_timeout_s` (a second signal cuts it short), stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

import grpc.aio
from prometheus_client import CollectorRegistry

from paceline.errors import ConfigurationError, PacelineError
from paceline.exit_codes import exit_code
from paceline.runtime.grpc_server import GrpcServer
from paceline.runtime.logs import configure_logging
from paceline.runtime.parent import end_with_parent
from paceline.runtime.settings import ServiceSettings, SettingsT, describe, load_settings
from paceline.runtime.settle import settle_process
from paceline.runtime.supervisor import OnError, Supervisor
from paceline.runtime.telemetry import metrics_endpoint

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 1.0
"""For rpcs that are still open after draining to send their last message."""


class Service(Protocol):
    """What a service's `__main__` hands to `run_service`."""

    @property
    def grpc_services(self) -> Sequence[str]:
        """Full names of its rpc services."""

    @property
    def registry(self) -> CollectorRegistry:
        """Its metrics."""

    @property
    def addresses(self) -> MutableMapping[str, str]:
        """Further addresses that it listens on once it has started, such as {"http": "127.0.0.1:8000"}.

        `serve` adds that of the metrics.
        """

    def register(self, server: grpc.aio.Server) -> None:
        """Adds its servicers."""

    async def start(self, supervisor: Supervisor, set_healthy: Callable[[bool], None]) -> None:
        """Loads what it needs and starts its tasks; returns when it can serve.

        Args:
            supervisor: owner of the service's tasks.
            set_healthy: for later: turns the health, for example when a pass hangs.
        """

    async def drain(self) -> None:
        """Takes nothing new and returns when what runs has ended; may be cancelled."""

    async def stop(self) -> None:
        """Answers every waiter and frees what it holds; called last, after `drain`."""


def main(
    name: str,
    settings_class: type[SettingsT],
    make_service: Callable[[SettingsT], Service],
    arguments: Sequence[str] | None = None,
) -> NoReturn:
    """What a service's `__main__` does: read the settings, run, exit.

    Args:
        name: of the service, for logs.
        settings_class: what it can be told.
        make_service: wires the service.
        arguments: command line without the program's name; None takes the process's own.
    """
    try:
        settings = load_settings(settings_class, arguments)
    except ConfigurationError as error:
        sys.stderr.write(f"paceline {name}: {error.message}\n")
        sys.exit(2)
    exit_process(run_service(name, settings, lambda: make_service(settings)))


def run_service(name: str, settings: ServiceSettings, make_service: Callable[[], Service]) -> int:
    """Runs a service until it is told to end.

    Returns:
        The exit code: 0 after a clean end, 2 when a setting is at fault, 3 when a peer cannot be reached, else 1.
    """
    configure_logging(name, settings.log_level, settings.log_format)
    if settings.parent_pid is not None:
        end_with_parent(settings.parent_pid)
    logger.info("starting", extra=describe_for_log(settings))
    code = 0
    try:
        with asyncio.Runner(loop_factory=_new_event_loop) as runner:
            runner.run(serve(name, settings, make_service(), settle_process))
    except PacelineError as error:
        logger.error("cannot go on: %s", error.message, extra={"code": error.code, "field": error.field})
        code = exit_code(error)
    except Exception:
        logger.exception("cannot go on")
        code = 1
    logger.info("ended", extra={"exit_code": code})
    return code


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop of uvloop where there is one: a service that slept finds that sooner than asyncio's own (ADR 28)."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def exit_process(code: int) -> NoReturn:
    """Ends the process, at once if a thread still runs: a model that is loading cannot be interrupted."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        os._exit(code)
    sys.exit(code)


def describe_for_log(settings: ServiceSettings) -> dict[str, str]:
    """Every setting in force as log fields; secrets are masked."""
    return {f"setting_{name}": value for name, value in describe(settings).items()}


async def serve(
    name: str, settings: ServiceSettings, service: Service, settle: Callable[[], None] = lambda: None
) -> None:
    """Boots the service, serves, drains and stops, as this module's docstring says.

    Args:
        name: of the service.
        settings: what it was told.
        service: what to serve.
        settle: to be done when it has started; for a process that does nothing else.

    Raises:
        PacelineError: it could not start, or a task ended that it cannot do without.
    """
    stop_requested, cut_short = asyncio.Event(), asyncio.Event()
    remove_handlers = _handle_signals(stop_requested, cut_short)
    server = GrpcServer(settings, service.grpc_services)
    service.register(server.server)
    try:
        async with contextlib.AsyncExitStack() as stack:
            if settings.metrics_port is not None:
                endpoint = metrics_endpoint(service.registry, settings.host, settings.metrics_port)
                service.addresses["metrics"] = await stack.enter_async_context(endpoint)
            supervisor = await stack.enter_async_context(Supervisor(name))
            address = await server.start()
            supervisor.spawn("health", server.run_health, on_error=OnError.FAIL)
            try:
                logger.info("listening", extra={"address": address, **_named(service.addresses)})
                if await _unless(stop_requested, service.start(supervisor, server.set_healthy)):
                    await asyncio.to_thread(settle)
                    server.set_serving(True)
                    _write_ready_file(settings.ready_file, address, service.addresses)
                    logger.info("ready", extra={"address": address, **_named(service.addresses)})
                    await stop_requested.wait()
                    logger.info("draining")
                    server.set_serving(False)
                    await _drain(service, cut_short, settings.drain_timeout_s)
            finally:
                server.set_serving(False)
                await service.stop()
                await server.stop(_STOP_GRACE_S)
    finally:
        remove_handlers()
        if settings.ready_file is not None:
            settings.ready_file.unlink(missing_ok=True)


async def _drain(service: Service, cut_short: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await _unless(cut_short, service.drain())
    except TimeoutError:
        logger.warning("sessions were still running at the end of drain_timeout_s")


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Whether the work ended; False when the event came first and the work was cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            running, watching = group.create_task(work), group.create_task(event.wait())
            await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
            watching.cancel()
            running.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return not running.cancelled()


def _handle_signals(stop_requested: asyncio.Event, cut_short: asyncio.Event) -> Callable[[], None]:
    """The first SIGTERM or SIGINT asks for the end, the second for a quick one. Returns what undoes it."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop_requested.is_set():
            cut_short.set()
        stop_requested.set()

    def from_anywhere(_number: int, _frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(on_signal)

    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = {number: signal.signal(number, from_anywhere) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return restore


def _write_ready_file(path: Path | None, address: str, more: Mapping[str, str]) -> None:
    """Writes the addresses so that no reader ever sees half of them."""
    if path is None:
        return
    partial = path.with_name(path.name + ".partial")
    told = {"address": address, "pid": os.getpid()} | _named(more)
    partial.write_text(json.dumps(told), encoding="utf-8")
    partial.replace(path)


def _named(addresses: Mapping[str, str]) -> dict[str, str]:
    """Addresses by the names that they have in the ready file and in the log."""
    return {f"{name}_address": where for name, where in addresses.items()}
