"""`paceline up`: a fleet on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from paceline.cli.console import err, out, print_error, to_json
from paceline.cli.display import Display
from paceline.cli.fleet import Fleet, FleetAddresses
from paceline.cli.fleet_options import FleetOptions
from paceline.cli.ports import reachable
from paceline.cli.service_settings import Access
from paceline.errors import PacelineError
from paceline.exit_codes import EXIT_INTERRUPTED, exit_code
from paceline.model_source import default_name

_OPEN = Access()


@dataclass(frozen=True, slots=True)
class Started:
    """What `--json` prints when the fleet is ready."""

    model: str
    addresses: FleetAddresses
    pids: dict[str, int]
    log_dir: str


def run_up(options: FleetOptions, *, json_output: bool) -> int:
    """Runs a fleet until Ctrl-C or SIGTERM, or until a part ends that it cannot do without.

    Returns:
        The exit code: 0 after a stop that was asked for, 130 when the start was interrupted, else that of the error.
    """
    options.check()
    if options.drafters and not options.num_speculative_tokens:
        err().print("--num-speculative-tokens 0: nothing drafts, decoding is plain")
        options = replace(options, drafters=0)
    return asyncio.run(_run_up(options, json_output))


async def _run_up(options: FleetOptions, json_output: bool) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    display = Display()
    fleet = Fleet(options, display)

    def on_signal() -> None:
        if stop.is_set():
            fleet.hurry()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        with display:
            if not await _unless(stop, fleet.start()):
                return EXIT_INTERRUPTED
        _print_started(options, fleet, json_output)
        if not await _unless(stop, fleet.watch()) and (running := await fleet.running_generations()):
            err().print(ending(running, options.drain_timeout_s))
        return 0
    except PacelineError as error:
        print_error(error)
        return exit_code(error)
    finally:
        await fleet.stop()
        err().print("everything is stopped")


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Whether the work ended by itself; False when the stop came first and the work was cancelled."""
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def examples(model: str, addresses: FleetAddresses, access: Access = _OPEN) -> tuple[str, ...]:
    """Two lines that a user can paste into a shell.

    Args:
        model: name of the served model.
        addresses: where the fleet is.
        access: what its gateway asks of clients.
    """
    body = {"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": True}
    generate = ["paceline generate", '"Why is the sky blue?"', "--address", addresses.gateway]
    curl = ["curl -N", f"{addresses.http}/v1/chat/completions", "-H 'Content-Type: application/json'"]
    if access.tls:
        generate.append("--tls --tls-ca-file CA.pem")
        curl.append("--cacert CA.pem")
    if access.client_certificate:
        generate.append("--tls-cert-file CLIENT.pem --tls-key-file CLIENT.key")
        curl.append("--cert CLIENT.pem --key CLIENT.key")
    if access.api_keys_file:
        curl.append('-H "Authorization: Bearer $PACELINE_API_KEY"')
    curl.append(f"-d {shlex.quote(json.dumps(body))}")
    return f"Try: {' '.join(generate)}", f"     {' '.join(curl)}"


def hints(access: Access) -> Iterator[str]:
    """What must be known to use the examples: where the gateway is, and what stands for what in them."""
    if reachable(f"{access.host}:0") != f"{access.host}:0":
        yield f"The gateway listens on {access.host}: other machines reach it by this machine's name or address."
    if access.api_keys_file:
        yield f"Export PACELINE_API_KEY first, with a key of {access.api_keys_file}."
    if access.tls:
        yield "CA.pem: the authority of the gateway's certificate, or the certificate itself if it is self-signed."
    if access.client_certificate:
        yield "CLIENT.pem, CLIENT.key: a certificate from an authority that the gateway trusts, and its key."


def ending(running: int, at_most_s: float) -> str:
    """What to tell about a stop that waits for generations."""
    who = "1 generation is" if running == 1 else f"{running} generations are"
    return f"{who} ending (at most {at_most_s:.0f} s); Ctrl-C again stops now"


def no_drafters(options: FleetOptions) -> str:
    """What to tell where drafters would stand."""
    if method := options.self_draft_method:
        return f"none: each verifier drafts with {method} by itself"
    return "none: plain decoding"


def _print_started(options: FleetOptions, fleet: Fleet, json_output: bool) -> None:
    pids = {child.name: child.pid for child in fleet.children}
    if json_output:
        started = Started(options.target, fleet.addresses, pids, str(options.log_dir.resolve()))
        out().print(to_json(started), markup=False)
        return
    table = Table.grid(padding=(0, 2))
    addresses = fleet.addresses
    table.add_row("gRPC", Text(addresses.gateway, "bold"))
    table.add_row("HTTP", Text(f"{addresses.http}/v1", "bold"))
    table.add_row("verifiers", Text(", ".join(addresses.verifiers)))
    table.add_row("drafters", Text(", ".join(addresses.drafters) or no_drafters(options)))
    table.add_row("redis", Text(addresses.redis))
    for name, url in addresses.metrics.items():
        table.add_row("metrics", Text(f"{url}  ({name})"))
    table.add_row("logs", Text(str(options.log_dir)))
    out().print(table)
    for line in (*hints(fleet.access), *examples(default_name(options.target), addresses, fleet.access)):
        out().print(line, markup=False)
    out().print("Ctrl-C stops everything.")
