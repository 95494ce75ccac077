"""The state of a training run on disk, so that a run that is killed goes on from the last one.

A file is written beside its place and renamed, so it is whole or not there. What is not in it follows from the number
of the step: the place in the data, the learning rate and all chance. `last.pt` is the newest state, `best.pt` the
trained parameters that measured best.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ConfigurationError
from paceline.training.history import History

_FORMAT = 1


@dataclass(frozen=True, slots=True, eq=False)
class RunState:
    """Everything that a run needs to go on.

    Attributes:
        fingerprint: of data, target and options; a run with another one is another run.
        step: steps taken.
        seconds: time spent on them.
        tokens: answer tokens learnt from.
        trained: the trained parameters.
        optimizer: as `torch.optim.Optimizer.state_dict` has it.
        history: measurements so far.
    """

    fingerprint: str
    step: int
    seconds: float
    tokens: int
    trained: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Any]
    history: History


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        folder: made when the first one is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, state: RunState) -> None:
        """Writes the newest state."""
        content = {
            "format": _FORMAT,
            "fingerprint": state.fingerprint,
            "step": state.step,
            "seconds": state.seconds,
            "tokens": state.tokens,
            "trained": dict(state.trained),
            "optimizer": dict(state.optimizer),
            "history": asdict(state.history),
        }
        self._write("last.pt", content)

    def save_best(self, trained: Mapping[str, torch.Tensor]) -> None:
        """Writes the trained parameters that measured best so far."""
        self._write("best.pt", dict(trained))

    def load(self, fingerprint: str) -> RunState | None:
        """The newest state; None if there is none.

        Raises:
            ConfigurationError: it is another run's, or unreadable.
        """
        content = self._read("last.pt")
        if content is None:
            return None
        if content.get("format") != _FORMAT or content["fingerprint"] != fingerprint:
            raise ConfigurationError(
                f"{self._folder.parent} holds a run with other data, another target or other options: name another "
                "folder, or give --restart to forget that run",
                field="out",
            )
        return RunState(
            fingerprint=fingerprint,
            step=content["step"],
            seconds=content["seconds"],
            tokens=content["tokens"],
            trained=content["trained"],
            optimizer=content["optimizer"],
            history=History.from_json(content["history"]),
        )

    def load_best(self) -> Mapping[str, torch.Tensor] | None:
        """The trained parameters that measured best; None if none were kept."""
        return self._read("best.pt")

    def forget(self) -> None:
        """Removes all states."""
        for name in ("last.pt", "best.pt"):
            (self._folder / name).unlink(missing_ok=True)

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # Always the same name, so that what a killed run left is written over.
        scratch = self._folder / f".{name}.part"
        with scratch.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(self._folder / name)

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self._folder / name
        if not path.is_file():
            return None
        try:
            content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds for a file that is not its own
            raise ConfigurationError(
                f"{path} cannot be read: {error}; give --restart to begin anew", field="out"
            ) from error
        return content
