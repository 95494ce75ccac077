"""A fleet of the real pair, SmolLM2 and its quantised copy, with two gateways that share the replicas and the store.

    gateway that drafts ahead   ─┐      ┌─ verifier, a core of its own
                                 ├──────┤
    gateway that drafts in turn ─┘      └─ drafter, another one

So drafting ahead and drafting in turn can take turns on one fleet; the gateway that is not used costs nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from paceline.cli.child import Child, ChildSpec
from paceline.cli.display import Display
from paceline.cli.fleet import Fleet
from paceline.cli.fleet_commands import FleetCommands
from paceline.cli.fleet_options import DEFAULT_MODEL, FleetOptions
from paceline.cli.ports import reachable
from paceline.cli.prepare import prepare
from paceline.client import AsyncClient

_STOP_GRACE_S = 5.0
_BUSY_LOAD = 0.7


@dataclass(frozen=True, slots=True)
class Door:
    """A gateway of the fleet.

    Attributes:
        client: connected to it.
        metrics: URL of its `/metrics`.
    """

    client: AsyncClient
    metrics: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A running fleet.

    Attributes:
        ahead: the gateway that drafts ahead.
        in_turn: the one that does not.
    """

    ahead: Door
    in_turn: Door


def pair_parser(description: str | None, *, repeats: int, quick: str) -> argparse.ArgumentParser:
    """What every benchmark of the pair can be told; each adds its own.

    Args:
        description: of the benchmark.
        repeats: how often, if not said.
        quick: what is measured with --quick.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the target")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--log-dir", type=Path, default=Path("paceline-logs"))
    parser.add_argument("--quick", action="store_true", help=f"{quick}; writes nothing")
    return parser


def pair_options(arguments: argparse.Namespace) -> FleetOptions:
    """The fleet that arguments of `pair_parser` ask for."""
    return FleetOptions(model=arguments.model, port=0, http_port=0, log_dir=arguments.log_dir, cold_prompts=True)


def warn_if_busy(console: Console) -> None:
    """Says so if the machine has other work."""
    if (load := os.getloadavg()[0]) > _BUSY_LOAD:
        console.print(f"[yellow]warning:[/] the machine is busy (load {load:.1f}): figures of a fleet will be too low")


@asynccontextmanager
async def running_pair(options: FleetOptions) -> AsyncIterator[Pair]:
    """Starts the fleet and a second gateway; both stop at the end of the block.

    Args:
        options: of the fleet.

    Raises:
        PacelineError: something does not start.
    """
    async with AsyncExitStack() as stack:
        fleet = Fleet(options, display := Display())
        stack.push_async_callback(fleet.stop)
        with display:
            await fleet.start()
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-pair-")))
            second = Child(await _second_gateway(options, fleet, run_dir))
            stack.push_async_callback(second.stop, _STOP_GRACE_S)
            await second.start()
            await second.wait_ready(options.ready_timeout_s)
        metrics = fleet.addresses.metrics["gateway"], f"http://{reachable(second.addresses.metrics)}/metrics"
        clients = [
            await stack.enter_async_context(AsyncClient(address))
            for address in (fleet.addresses.gateway, reachable(second.address))
        ]
        doors = [Door(client, url) for client, url in zip(clients, metrics, strict=True)]
        yield Pair(*doors)


async def _second_gateway(options: FleetOptions, fleet: Fleet, run_dir: Path) -> ChildSpec:
    prepared = await prepare(options.target, bits=options.copy_bits, draft_model="", progress=lambda _line: None)
    addresses = fleet.addresses
    own = dataclasses.replace(options, port=0, http_port=0)
    spec = FleetCommands(own, prepared, run_dir).gateway(addresses.verifiers, addresses.drafters, addresses.redis)
    environment: Mapping[str, str] = {**spec.environment, "PACELINE_GATEWAY_DRAFT_AHEAD": "false"}
    log_file = spec.log_file.with_name("gateway-in-turn.log")
    return dataclasses.replace(spec, name="gateway in turn", environment=environment, log_file=log_file)
