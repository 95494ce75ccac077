"""Reads the tensors of a checkpoint folder: safetensors, or pickles of torch with nothing but tensors in them."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline.errors import ModelError

FIELD = "draft_model"
"""Name of the setting at fault when a checkpoint cannot be used."""

SIZE_LIMIT_BYTES = 16 << 30
"""Heads are small: a file above this is none, and is not read into memory."""

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_MAPS = {"d2t", "t2d", "token_map"}


def read_tensors(folder: Path, stems: Sequence[str] = ("model", "pytorch_model")) -> dict[str, torch.Tensor]:
    """All tensors of a folder, on the CPU, number formats as stored.

    Args:
        folder: holds `<stem>.safetensors`, its shards with `<stem>.safetensors.index.json`, `<stem>.bin` or
            `<stem>.pt`; safetensors are preferred. Pickles are read with `weights_only=True`, so that no code in them
            runs.
        stems: names to look for, in this order.

    Raises:
        ModelError: there is no such file, or it is too large, damaged, quantised, not finite, or not a flat table of
            tensors.
    """
    path = find_weights(folder, stems)
    if path is None:
        looked = ", ".join(f"{stem}.safetensors" for stem in stems)
        raise ModelError(
            f"{folder} has no weights: looked for {looked}, an index of shards, and the same as .bin or .pt; give the "
            "folder that the head was saved in",
            field=FIELD,
        )
    if path.name.endswith(".index.json"):
        tensors = _read_shards(path)
    else:
        tensors = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    _check_values(path, tensors)
    return tensors


def find_weights(folder: Path, stems: Iterable[str]) -> Path | None:
    """The file that `read_tensors` reads; None if there is none."""
    names = [
        f"{stem}{suffix}"
        for suffixes in ((".safetensors", ".safetensors.index.json"), (".bin", ".pt"))
        for stem in stems
        for suffix in suffixes
    ]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    _check_size(path, path.stat().st_size)
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} cannot be read ({error}): it is cut off or damaged, copy it again", field=FIELD
        ) from error


def _read_shards(index: Path) -> dict[str, torch.Tensor]:
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{index} is no index of shards: it has no weight_map of names to files", field=FIELD
        ) from error
    odd = [file for file in files if Path(file).name != file or not (index.parent / file).is_file()]
    if odd:
        raise ModelError(f"{index} names files that are not beside it: {', '.join(odd)}; copy all shards", field=FIELD)
    _check_size(index, sum((index.parent / file).stat().st_size for file in files))
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= _read_safetensors(index.parent / file)
    if unlike := sorted(tensors.keys() ^ places.keys()):
        raise ModelError(
            f"{index} and its shards do not hold the same tensors ({', '.join(unlike[:8])}): they are of two "
            "checkpoints, copy them again",
            field=FIELD,
        )
    return tensors


def _read_pickle(path: Path) -> dict[str, torch.Tensor]:
    size = path.stat().st_size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            # What it unpacks to, which a compressed archive hides.
            size = max(size, sum(entry.file_size for entry in archive.infolist()))
    _check_size(path, size)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"{path} is not a table of tensors ({reason[0]}): it is damaged, or holds Python objects, which are not "
            "loaded because they can run code; save it as safetensors",
            field=FIELD,
        ) from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in found.items()
    ):
        raise ModelError(
            f"{path} is not a flat table of names and tensors: save the head's state_dict alone", field=FIELD
        )
    _check_stored(path, found)
    return {name: tensor.detach() for name, tensor in found.items()}


def _check_stored(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The numbers are in the file: a few bytes of a pickle can claim any shape."""
    for name, tensor in tensors.items():
        plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
        if not plain or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ModelError(
                f"{path}: {name} is no plain tensor whose numbers are all in the file: save it as safetensors",
                field=FIELD,
            )
    _check_size(path, sum(tensor.nbytes for tensor in tensors.values()))


def _check_size(path: Path, size: int) -> None:
    if size > SIZE_LIMIT_BYTES:
        raise ModelError(
            f"{path} holds {size / 2**30:.1f} GiB and a drafting head at most {SIZE_LIMIT_BYTES >> 30}: give the head "
            "alone, without its target",
            field=FIELD,
        )


def _check_values(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    weights = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in _MAPS}
    if odd := sorted(name for name, tensor in weights.items() if tensor.dtype not in _FLOATS):
        kind = str(tensors[odd[0]].dtype).removeprefix("torch.")
        raise ModelError(
            f"{path}: {_few(odd)} are {kind}, not floating-point weights of 16 or 32 bits: give the head as it was "
            "before it was quantised",
            field=FIELD,
        )
    if odd := sorted(name for name, tensor in weights.items() if not bool(torch.isfinite(tensor).all())):
        raise ModelError(f"{path}: {_few(odd)} hold numbers that are not finite: its training has failed", field=FIELD)


def _few(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
