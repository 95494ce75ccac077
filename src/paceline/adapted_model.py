"""A model that is a base and an adapter of `peft`: one folder in which everyone finds both.

An adapter names its base in `adapter_config.json`. The folder holds links to the files of the base, a `config.json` of
its own that also names the exit layer, if the adapter does, and in `adapter/` a link to the adapter, which is added to
the weights when they are loaded (`paceline.engine.loader`). Nothing large is written. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import ModelError

ADAPTER_CONFIG = "adapter_config.json"
"""What `peft` calls the configuration of an adapter."""
ADAPTER_FOLDER = "adapter"
"""Where the adapter is in the joined folder."""
EXIT_LAYER = "exit_layer"
"""The option by which a target trained for early exits says after how many layers to draft."""

_CONFIG = "config.json"
_BASE = "base_model_name_or_path"


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter."""
    return (folder / ADAPTER_CONFIG).is_file()


def names_exit_layer(folder: Path) -> bool:
    """Whether the configuration of a model says after how many layers to draft.

    Raises:
        ModelError: the configuration is damaged.
    """
    return _read(folder / _CONFIG).get(EXIT_LAYER) is not None


def holds(folder: Path, adapter: Path) -> bool:
    """Whether a folder is one in which this adapter was joined to its base."""
    link = folder / ADAPTER_FOLDER
    return link.is_dir() and link.resolve() == adapter.resolve()


def base_reference(adapter: Path) -> str:
    """What the adapter calls its base: a reference to a model.

    Raises:
        ModelError: it names none.
    """
    base = _read(adapter / ADAPTER_CONFIG).get(_BASE)
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"{adapter / ADAPTER_CONFIG} names no base: put a folder, a hub id or a built-in name into it as {_BASE}",
            field="model",
        )
    return base


def joined_name(adapter: Path, base: Path) -> str:
    """A name for the joined folder: another one as soon as any file of either is another."""
    digest = hashlib.sha256()
    for folder in (adapter.resolve(), base.resolve()):
        digest.update(f"{folder}\0".encode())
        for path in _files(folder):
            facts = path.stat()
            digest.update(f"{path.name}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
    return f"{adapter.resolve().name}-{digest.hexdigest()[:12]}"


def join(adapter: Path, base: Path, target: Path) -> None:
    """Fills the joined folder.

    Args:
        adapter: its folder.
        base: folder of its base.
        target: an empty folder.

    Raises:
        ModelError: the base is itself joined, or a configuration is damaged.
    """
    if (base / ADAPTER_FOLDER).exists():
        raise ModelError(
            f"the base of {adapter} is an adapter too: merge that into its own base and name the result", field="model"
        )
    config = _read(base / _CONFIG)
    for name in (ADAPTER_CONFIG, _CONFIG):
        if (adapter / name).is_file() and (exit_layer := _read(adapter / name).get(EXIT_LAYER)) is not None:
            config[EXIT_LAYER] = exit_layer
    for path in _files(base):
        if path.name != _CONFIG:
            (target / path.name).symlink_to(path.resolve())
    (target / _CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    (target / ADAPTER_FOLDER).symlink_to(adapter.resolve(), target_is_directory=True)


def _files(folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}): copy it again", field="model") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} is not an object of JSON: copy it again", field="model")
    return values
