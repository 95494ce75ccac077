"""The command line of each process of a fleet.

Knows the services only by their flags; `tests/unit/cli/test_fleet_commands.py` feeds these command lines to the
services' own settings classes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.cli.child import ChildSpec
from paceline.cli.cores import available_cores, is_cpu, plan_cores
from paceline.cli.drafting_flags import drafter_drafting, verifier_drafting
from paceline.cli.fleet_options import FleetOptions
from paceline.cli.prepare import Prepared
from paceline.cli.serve import ServiceName, service_command
from paceline.model_source import default_name

_PASSIVE_THREADS = {"OMP_WAIT_POLICY": "passive"}
"""OpenMP threads that spin while they wait steal the time of the other service on the same cores."""
_COLD_PROMPTS = {"PACELINE_VERIFIER_PREFIX_CACHING": "false"}


def check_installed(options: FleetOptions) -> None:
    """Finds out before anything is started whether all services of a fleet are installed.

    Raises:
        ConfigurationError: one is not.
    """
    needed = [ServiceName.VERIFIER, ServiceName.GATEWAY, *([ServiceName.DRAFTER] if options.num_drafters else [])]
    for service in needed:
        service_command(service, ())


class FleetCommands:
    """Command lines for one start of a fleet.

    Args:
        options: what the fleet consists of.
        prepared: local folders of the models.
        run_dir: for the ready files of this start.
    """

    def __init__(self, options: FleetOptions, prepared: Prepared, run_dir: Path) -> None:
        self._options = options
        self._prepared = prepared
        self._run_dir = run_dir
        self._model_name = default_name(options.target)
        self._cores = plan_cores(
            available_cores(),
            verifiers=options.verifiers if is_cpu(options.verifier_device) else 0,
            drafters=options.num_drafters if is_cpu(options.drafter_device) and options.drafters_compute else 0,
        )

    def verifiers(self) -> list[ChildSpec]:
        """One for each verifier."""
        options = self._options
        flags = {
            "model": self._prepared.target_dir,
            "model-name": self._model_name,
            "device": options.verifier_device,
            "dtype": options.dtype,
            **verifier_drafting(options, self._prepared),
        }
        environment = _PASSIVE_THREADS | (_COLD_PROMPTS if options.cold_prompts else {})
        return [
            self._spec(
                ServiceName.VERIFIER, index, flags | _cores_flags(_share(self._cores.verifiers, index)), environment
            )
            for index in range(options.verifiers)
        ]

    def drafters(self) -> list[ChildSpec]:
        """One for each drafter."""
        options = self._options
        flags = {
            "method": ",".join(options.methods),
            "model-name": self._model_name,
            "device": "cpu" if options.copy_bits else options.drafter_device,
        }
        if options.drafters_compute:
            flags["dtype"] = options.dtype
            flags |= drafter_drafting(options, self._prepared)
        return [
            self._spec(ServiceName.DRAFTER, index, flags | _cores_flags(_share(self._cores.drafters, index)))
            for index in range(options.num_drafters)
        ]

    def gateway(self, verifiers: Sequence[str], drafters: Sequence[str], redis_url: str) -> ChildSpec:
        """The gateway, once the others' addresses are known."""
        flags = {
            "model": self._prepared.target_dir,
            "model-name": self._model_name,
            "verifiers": ",".join(verifiers),
            "drafters": ",".join(drafters),
            "num-speculative-tokens": str(self._options.num_speculative_tokens),
            "port": str(self._options.port),
            "http-port": str(self._options.http_port),
        }
        # In the environment, since the URL may hold a password and everybody can read command lines.
        return self._spec(ServiceName.GATEWAY, None, flags, {"PACELINE_GATEWAY_REDIS_URL": redis_url})

    def _spec(
        self,
        service: ServiceName,
        index: int | None,
        flags: Mapping[str, str],
        environment: Mapping[str, str] = _PASSIVE_THREADS,
    ) -> ChildSpec:
        name = service.value if index is None else f"{service.value} {index}"
        file_name = name.replace(" ", "-")
        ready_file = self._run_dir / f"{file_name}.ready.json"
        common = {
            "ready-file": str(ready_file),
            "metrics-port": "0",
            "parent-pid": str(os.getpid()),
            "drain-timeout-s": str(self._options.drain_timeout_s),
        }
        arguments = [f"--{flag}={value}" for flag, value in {**flags, **common}.items()]
        return ChildSpec(
            name=name,
            command=service_command(service, arguments),
            ready_file=ready_file,
            log_file=self._options.log_dir / f"{file_name}.log",
            environment=environment,
        )


def _share(shares: Sequence[tuple[int, ...]], index: int) -> tuple[int, ...]:
    """Cores of one replica; none where the replicas of this kind are not on the CPU."""
    return shares[index] if index < len(shares) else ()


def _cores_flags(cores: tuple[int, ...]) -> dict[str, str]:
    """One thread for each core, or a single one that goes wherever there is room."""
    if not cores:
        return {"num-threads": "1"}
    return {"num-threads": str(len(cores)), "cpu-affinity": ",".join(map(str, cores))}
