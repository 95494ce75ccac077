"""`paceline quantize`: a quantised copy of a model for drafting on a CPU, made once and kept in the cache.

The export is done by the builder of onnxruntime-genai in a process of its own: weights become int8 (or int4) in blocks
of 32, the last layer included; the embedding stays float32. Computing goes on in float32 with int8 activations, so the
copy agrees with the original almost always (int8), or costs less and agrees less (int4). It is a drafter, never a
verifier.

Imports no torch; the builder's process does.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from filelock import FileLock

from paceline.adapted_model import ADAPTER_FOLDER, is_adapter
from paceline.errors import ConfigurationError, ModelError
from paceline.model_source import TOKENIZER_FILES, CacheSettings, Progress, is_trimmed, resolve

PROVENANCE_FILE = "paceline_quantized.json"
"""Says what a quantised folder was made from, and that it is complete."""

_FORMAT = 1
"""Part of the cache's folder names; raised when the same options give something else."""

_REQUIRED_PACKAGES = ("onnxruntime-genai", "onnx", "onnx-ir", "torch", "transformers")
_LOG_TAIL_LINES = 12


class Bits(Enum):
    """Width of the quantised weights."""

    INT8 = "int8"
    INT4 = "int4"


_ALGORITHM = {Bits.INT8: "rtn", Bits.INT4: "k_quant_mixed"}


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a quantised folder was made from.

    Attributes:
        source: the model as it was named.
        source_dir: its local folder at that time.
        bits: `int8` or `int4`.
        options: options of the builder.
        versions: versions of the packages that did it, as `name==version`.
        seconds: how long it took.
        weights_bytes: size of the quantised weights.
    """

    source: str
    source_dir: str
    bits: str
    options: tuple[str, ...]
    versions: tuple[str, ...]
    seconds: float
    weights_bytes: int


def builder_options(bits: Bits) -> tuple[str, ...]:
    """Options of the builder for a width, as `name=value`."""
    return (
        f"algo_config={_ALGORITHM[bits]}",
        "block_size=32",
        # int8 activations: the fast kernels
        "accuracy_level=4",
        # logits after the last token only: a prompt costs a third less and no memory for the others' logits
        "prune_lm_head=true",
    )


def quantized_dir(model_dir: Path, bits: Bits = Bits.INT8) -> Path:
    """The cache's folder for the quantised copy of a model folder, whether it exists or not.

    The name depends on the folder's path, its weights' sizes and times, the width and the options.
    """
    digest = hashlib.sha256(f"{model_dir.resolve()}\0{builder_options(bits)}".encode())
    for file in sorted([model_dir / "config.json", *model_dir.glob("*.safetensors")]):
        facts = file.stat()
        digest.update(f"{file.name}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
    name = f"{model_dir.resolve().name}-{bits.value}-{digest.hexdigest()[:12]}-q{_FORMAT}"
    return CacheSettings().folder / "models" / name


def read_provenance(folder: Path) -> Provenance | None:
    """What a quantised folder was made from; None when the folder is not a complete one of ours."""
    try:
        raw = json.loads((folder / PROVENANCE_FILE).read_text())
        return Provenance(**{**raw, "options": tuple(raw["options"]), "versions": tuple(raw["versions"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def quantize(
    model: str, out_dir: Path | None = None, bits: Bits = Bits.INT8, progress: Progress = lambda _line: None
) -> Path:
    """Makes the quantised copy of a model, or finds the one made before.

    Args:
        model: any reference that `paceline.model_source.resolve` takes.
        out_dir: where to put it; None for `quantized_dir` in the cache.
        bits: width of the weights.
        progress: told what is being done when it takes long.

    Returns:
        The folder, which holds the model for `paceline.drafting.onnx_runner` and the tokenizer's files.

    Raises:
        ConfigurationError: the `onnx` or `engine` extra is missing, or `out_dir` holds something else.
        ModelError: the model has a trimmed vocabulary or is an adapter, or the builder cannot export it; its last words
            are in the message.
    """
    source = resolve(model, progress=progress)
    if is_trimmed(source):
        raise ModelError(
            f"{source} has a trimmed vocabulary, which the ONNX runner does not know: run it as it is with runner "
            "torch, with quantization int8 where that is faster",
            field="model",
        )
    if is_adapter(source / ADAPTER_FOLDER):
        raise ModelError(
            f"{model} is an adapter on a base, which the ONNX builder cannot add up: draft with runner torch (and "
            "quantization int8, if that is faster), or merge the two first",
            field="model",
        )
    folder = quantized_dir(source, bits) if out_dir is None else out_dir.expanduser().resolve()
    if _is_made(folder, source, bits):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if _is_made(folder, source, bits):
            return folder
        _check_packages()
        _build(model, source, folder, bits, progress)
    return folder


def _is_made(folder: Path, source: Path, bits: Bits) -> bool:
    """Whether the folder holds this copy already.

    Raises:
        ConfigurationError: it holds something else.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return False
    provenance = read_provenance(folder)
    wanted = (str(source.resolve()), bits.value, builder_options(bits))
    if provenance is not None and (provenance.source_dir, provenance.bits, provenance.options) == wanted:
        return True
    raise ConfigurationError(
        f"{folder} exists and is not the {bits.value} copy of {source}; remove it or name another folder",
        field="out_dir",
    )


def _check_packages() -> None:
    missing = []
    for package in _REQUIRED_PACKAGES:
        try:
            version(package)
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        raise ConfigurationError(
            f"quantising needs {', '.join(missing)}: run `pip install 'paceline[engine,onnx]'`, or quantise on a "
            "machine that has them and copy the folder"
        )


def _build(model: str, source: Path, folder: Path, bits: Bits, progress: Progress) -> None:
    """Fills a folder beside the final one and renames it, so that whoever sees the folder can use it."""
    progress(f"quantising {model} to {bits.value} (once; ten to thirty seconds per 100 million weights)")
    began = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _run_builder(source, scratch, bits)
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, scratch / name)
        provenance = Provenance(
            source=model,
            source_dir=str(source.resolve()),
            bits=bits.value,
            options=builder_options(bits),
            versions=tuple(f"{package}=={version(package)}" for package in _REQUIRED_PACKAGES),
            seconds=round(time.monotonic() - began, 1),
            weights_bytes=sum(file.stat().st_size for file in scratch.glob("*.onnx*")),
        )
        (scratch / PROVENANCE_FILE).write_text(json.dumps(asdict(provenance), indent=2) + "\n")
        scratch.chmod(0o755)
        if folder.exists():
            folder.rmdir()  # empty, see _is_made
        os.rename(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress(f"quantised in {provenance.seconds} s: {provenance.weights_bytes / 1e6:.0f} MB in {folder}")


def _run_builder(source: Path, target: Path, bits: Bits) -> None:
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "--input", str(source.resolve())]
    command += ["--output", str(target)]
    command += ["--precision", bits.value, "--execution_provider", "cpu", "--extra_options", *builder_options(bits)]
    with tempfile.TemporaryDirectory(prefix="paceline-quantize-") as work:
        # Its progress bars are megabytes long: a file takes them, and its end is shown when something goes wrong.
        log = Path(work) / "builder.log"
        command += ["--cache_dir", work]
        with log.open("wb") as output:
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, cwd=work, check=False)  # noqa: S603
        if done.returncode or not (target / "genai_config.json").is_file():
            raise ModelError(
                f"{source} cannot be quantised: the builder of onnxruntime-genai ended with {done.returncode}:\n"
                f"{_tail(log)}",
                field="model",
            )


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()
    return "\n".join([line for line in lines if line.strip()][-_LOG_TAIL_LINES:])
