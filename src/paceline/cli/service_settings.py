"""Reads what the services of a fleet will be told, before anything is started.

`paceline up` passes its environment on to the services. What they would refuse after the models have been fetched and
converted is refused here, and what the gateway asks of its clients is known for the lines that are printed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.cli.child import ChildSpec
from paceline.cli.fleet_commands import FleetCommands, check_installed
from paceline.cli.fleet_options import FleetOptions
from paceline.cli.ports import HOST
from paceline.cli.prepare import Prepared
from paceline.runtime.settings import load_settings

_NOT_YET = f"{HOST}:1"
"""For an address that is known only when its process runs."""


@dataclass(frozen=True, slots=True)
class Access:
    """What a gateway asks of its clients.

    Attributes:
        host: address it listens on.
        tls: it speaks TLS.
        client_certificate: it wants to see a certificate.
        api_keys_file: the keys that it takes; None: it asks for none.
    """

    host: str = HOST
    tls: bool = False
    client_certificate: bool = False
    api_keys_file: Path | None = None


def check_services(options: FleetOptions) -> Access:
    """Finds out whether all services of a fleet are installed and take their flags and the environment.

    Raises:
        ConfigurationError: one is not installed, or a flag or variable of a service is wrong.
    """
    check_installed(options)
    # Only now, because a library without services is a library too.
    from paceline_gateway.settings import GatewaySettings
    from paceline_verifier.settings import VerifierSettings

    plan = FleetCommands(options, Prepared(options.target, options.drafter_model, options.head_reference), Path())
    for verifier in plan.verifiers()[:1]:
        load_settings(VerifierSettings, _arguments(verifier))
    for drafter in plan.drafters()[:1]:
        from paceline_drafter.settings import DrafterSettings

        load_settings(DrafterSettings, _arguments(drafter))
    gateway = load_settings(GatewaySettings, _arguments(plan.gateway([_NOT_YET], [], "")))
    return Access(
        host=gateway.host,
        tls=gateway.tls_cert_file is not None,
        client_certificate=gateway.tls_client_ca_file is not None,
        api_keys_file=gateway.api_keys_file,
    )


def _arguments(spec: ChildSpec) -> tuple[str, ...]:
    """A command line without the interpreter and `-m package`."""
    return spec.command[3:]
