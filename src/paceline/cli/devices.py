"""Whether torch can use a device, asked in a process of its own: a launcher has no use for torch and a CUDA context.

    python -m paceline.cli.devices DEVICE

prints why the device cannot be used, and nothing when it can.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys

from paceline.cli.cores import is_cpu
from paceline.cli.fleet_options import FleetOptions
from paceline.errors import ConfigurationError


async def check_devices(options: FleetOptions) -> None:
    """Finds out before anything is started whether the models' devices are there; a CPU always is.

    Raises:
        ConfigurationError: one is not; names its option.
    """
    wanted = [("verifier_device", options.verifier_device)]
    if options.drafters_compute:
        wanted.append(("drafter_device", options.drafter_device))
    for field, device in wanted:
        if not is_cpu(device) and (reason := await _ask(device)):
            flag = "--" + field.replace("_", "-")
            raise ConfigurationError(f"{flag} {device} cannot be used: {reason}", field=field)


async def _ask(device: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "paceline.cli.devices", device),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        told, _ = await process.communicate()
        if process.returncode:
            return f"asking torch about it ended with exit status {process.returncode}; try `paceline doctor`"
        return told.decode().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def why_unusable(device: str) -> str:
    """Why torch cannot use a device other than a CPU, in one line; empty when it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: run `pip install 'paceline[engine]'`"
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        return "it is no device; cpu, cuda or cuda:N"
    if kind != "cuda":
        return f"models do not run on {kind}; cpu, cuda or cuda:N"
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no CUDA device; install NVIDIA's driver and a torch build with CUDA, "
            "or say cpu"
        )
    try:
        torch.cuda.get_device_properties(torch.device(device))
    except (RuntimeError, AssertionError):
        return f"torch sees {torch.cuda.device_count()} CUDA devices, counted from 0"
    return ""


if __name__ == "__main__":
    sys.stdout.write(why_unusable(sys.argv[1]))
