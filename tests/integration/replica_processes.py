"""Verifiers and drafters as processes of their own, to be killed, in front of a fleet's replicas in this process.

All write the same table of tokens (`paceline.engine.simulated`): a stream must look the same wherever it goes on.

async with KillableFleet.start(tmp_path, LAW, ...) as fleet:
    fleet.drafter_process.kill()
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline_drafter.load import load_replica as load_drafter
from paceline_drafter.servicer import DrafterService, drafter_door
from paceline_drafter.settings import DrafterSettings
from paceline_verifier.load import load_replica as load_verifier
from paceline_verifier.servicer import VerifierService, verifier_door
from paceline_verifier.settings import VerifierSettings

from tests.fakes.toy_runner import Law
from tests.integration.fleet import MODEL, TIMEOUT_S, Fleet, FleetOptions, until
from tests.integration.node import Life, free_port

SIMULATED: dict[str, Any] = {"runner": "simulated", "simulated_token_ms": 0.0, "kv_cache_bytes": 1 << 20}
VERIFIER: dict[str, Any] = {**SIMULATED, "simulated_pass_ms": 15.0}
DRAFTER: dict[str, Any] = {**SIMULATED, "simulated_pass_ms": 1.0, "simulated_acceptance": 0.7}


class ReplicaProcess:
    """One replica. Has of a `Node` what a fleet needs; begins to start when it is made.

    Args:
        service: verifier or drafter.
        model: folder of its tokenizer.
        settings: of the service.
        folder: for the file that says that it is ready.
    """

    def __init__(self, service: str, model: Path, settings: dict[str, Any], folder: Path) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self._ready_file = folder / f"{service}.json"
        told = {
            "model": model,
            "model_name": MODEL,
            "port": port,
            "ready_file": self._ready_file,
            "log_level": "error",
            **settings,
        }
        flags = [part for name, value in told.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, "-m", f"paceline_{service}", *flags]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    booted = False
    num_sessions = 0
    """Nobody can look into it: what it holds is gone with it."""

    async def boot(self) -> None:
        """Returns when it serves."""
        await until(lambda: self._ready_file.exists() or self._process.poll() is not None, TIMEOUT_S * 3)
        assert self._process.poll() is None, "the replica has ended at once"

    def kill(self) -> None:
        """kill -9; returns when it is gone."""
        self._process.kill()
        self._process.wait()

    async def close(self) -> None:
        await asyncio.to_thread(self.kill)


class KillableFleet(Fleet):
    """A fleet whose first verifier and first drafter, which ties fall to, are processes."""

    def __init__(self, folder: Path, law: Law, options: FleetOptions) -> None:
        super().__init__(folder, law, options)
        self.verifier_process = ReplicaProcess("verifier", self.folder, VERIFIER, folder)
        self.drafter_process = ReplicaProcess("drafter", self.folder, DRAFTER, folder)
        self.verifiers.insert(0, self.verifier_process)  # type: ignore[arg-type]
        self.drafters.insert(0, self.drafter_process)  # type: ignore[arg-type]
        self.gateway = self._new_gateway()

    def _verifier_life(self, boot_id: str) -> Life[Any]:
        replica = load_verifier(VerifierSettings(model=str(self.folder), model_name=MODEL, **VERIFIER))
        return Life(replica.actor, VerifierService(verifier_door(), lambda: replica), None)

    def _drafter_life(self, boot_id: str) -> Life[Any]:
        replica = load_drafter(DrafterSettings(model=str(self.folder), model_name=MODEL, **DRAFTER))
        return Life(replica.actor, DrafterService(drafter_door(), lambda: replica), None)
