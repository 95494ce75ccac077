"""From the name of a drafting head to the folder of its checkpoint.

A head is named by a folder, or by its id on the Hugging Face hub (`owner/name`). Examples for the built-in target lie
in `models/` of the repository, one folder for each method, `TARGET-METHOD`; they are in no package, so an installation
without a checkout knows them by their path only. Imports no torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from paceline.errors import NotFound, Unavailable
from paceline.model_source import BUILT_IN, Progress

EXAMPLES_DIR = Path(__file__).resolve().parents[2] / "models"
"""The examples of a checkout; elsewhere there is no such folder."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CONFIGS = ("config.json", "adapter_config.json")
"""Written last: a folder without one is no checkpoint yet."""
_HEAD_FILES = ("*.json", "*.safetensors", "*.bin", "*.pt")


def example_of(method: str, target: str) -> str:
    """The example that the repository has for a target.

    Args:
        method: such as `eagle3`.
        target: the built-in name.

    Returns:
        Its folder; empty where there is none.
    """
    folder = EXAMPLES_DIR / f"{target}-{method}"
    there = any((folder / name).is_file() for name in _CONFIGS)
    return str(folder) if target in BUILT_IN and there else ""


def is_head_reference(reference: str) -> bool:
    """Whether there is such a folder, or the hub may have such an id."""
    return (reference != "" and Path(reference).expanduser().is_dir()) or _HUB_ID.fullmatch(reference) is not None


def resolve_head(reference: str, *, field: str = "head", progress: Progress = lambda _line: None) -> Path:
    """The local folder of a head, fetched on first use.

    Args:
        reference: a folder or a hub id.
        field: the setting that holds it, for errors.
        progress: told what is being done when it takes long.

    Raises:
        NotFound: there is no such folder, and the hub has no such id or does not show it.
        Unavailable: it cannot be fetched now, for instance offline.
    """
    folder = Path(reference).expanduser()
    if folder.is_dir():
        return folder
    if not is_head_reference(reference):
        raise NotFound(
            f"there is no folder {reference!r}, and it is no id of the hub: give the folder of a checkpoint, such as "
            "one that `paceline train` wrote",
            field=field,
        )
    progress(f"looking for {reference} in the hub's cache and on the hub")
    try:
        return Path(snapshot_download(reference, allow_patterns=list(_HEAD_FILES)))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise _fetch_error(reference, field, error) from error


def _fetch_error(reference: str, field: str, error: Exception) -> NotFound | Unavailable:
    if isinstance(error, HFValidationError):
        return NotFound(f"{reference!r} is neither a folder nor an id of the hub: {error}", field=field)
    if (
        isinstance(error, HfHubHTTPError)
        and error.response is not None
        and error.response.status_code in {401, 403, 404}
    ):
        return NotFound(
            f"there is no folder {reference!r}, and the hub has no such checkpoint, or it is gated: accept its terms "
            "and set HF_TOKEN",
            field=field,
        )
    return Unavailable(
        f"there is no folder {reference!r}, and it cannot be fetched from the hub: give the folder of a checkpoint",
        field=field,
    )
