"""Which layout a checkpoint is in, told from its configuration and the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import Enum
from pathlib import Path

from paceline.adapted_model import ADAPTER_CONFIG
from paceline.checkpoint_files.head_config import HeadConfig
from paceline.checkpoint_files.weight_files import FIELD, find_weights, read_tensors
from paceline.errors import ConfigurationError, ModelError

MEDUSA_STEMS = ("medusa_lm_head", "model", "pytorch_model")
"""Names of a Medusa checkpoint's file, the usual one first."""


class Layout(Enum):
    """A layout that is supported; its value is what users see."""

    EAGLE = "safeailab-eagle"
    EAGLE3 = "safeailab-eagle3"
    SPECULATORS_EAGLE = "speculators-eagle"
    SPECULATORS_EAGLE3 = "speculators-eagle3"
    MEDUSA_V1 = "medusa-v1"
    """A head of its own for each Medusa head."""
    MEDUSA_V2 = "medusa-v2"
    """Residual blocks alone, with the target's head: what TGI reads."""
    MEDUSA_VLLM = "medusa-vllm"
    LAYERSKIP_ADAPTER = "layerskip-adapter"
    CAUSAL_LM = "causal-lm"
    """A whole language model: a draft model, or, with an exit layer, a target that drafts for itself."""

    @property
    def method(self) -> str:
        """The drafting method that uses it."""
        return _METHODS[self]


_METHODS = {
    Layout.EAGLE: "eagle",
    Layout.SPECULATORS_EAGLE: "eagle",
    Layout.EAGLE3: "eagle3",
    Layout.SPECULATORS_EAGLE3: "eagle3",
    Layout.MEDUSA_V1: "medusa",
    Layout.MEDUSA_V2: "medusa",
    Layout.MEDUSA_VLLM: "medusa",
    Layout.LAYERSKIP_ADAPTER: "layerskip",
    Layout.CAUSAL_LM: "draft_model",
}

_RESIDUAL = re.compile(r"\d\d?\.\d\d?\.linear\.(weight|bias)")
_OWN_HEAD = re.compile(r"\d\d?\.\d\d?\.weight")
_VLLM_BLOCK = re.compile(r"blocks\.\d\d?\.layers\.\d\d?\.(weight|bias)")


def detect_layout(folder: Path) -> Layout:
    """The layout of a folder.

    Raises:
        ModelError: it is none that is supported; says what was looked for.
        ConfigurationError: its configuration names a kind that is not supported.
    """
    if not folder.is_dir():
        raise ModelError(f"there is no folder {folder}: give the folder of a drafting head or model", field=FIELD)
    if (folder / ADAPTER_CONFIG).is_file():
        return Layout.LAYERSKIP_ADAPTER
    config = HeadConfig.read(folder / "config.json")
    if is_causal_lm(folder, config):
        return Layout.CAUSAL_LM
    names = read_tensors(folder, MEDUSA_STEMS).keys()
    layout = eagle_layout(config, names) or medusa_layout(names)
    if layout is None:
        raise ModelError(
            f"{folder} is no checkpoint that is supported: its tensors ({', '.join(sorted(names)[:6])}, ...) are "
            "neither an EAGLE head (fc, layers.0 or midlayer), nor Medusa heads (0.0.linear or blocks.0.layers.0), nor "
            "a language model with a tokenizer; docs/checkpoints.md lists the layouts",
            field=FIELD,
        )
    return layout


def is_causal_lm(folder: Path, config: HeadConfig) -> bool:
    """Whether a folder holds a whole language model; heads come without a tokenizer or say what they are."""
    if config.has("speculators_model_type") or find_weights(folder, ("medusa_lm_head",)):
        return False
    architectures = config.values.get("architectures") or [""]
    whole = str(architectures[0]).endswith("ForCausalLM")
    return whole and (folder / "tokenizer.json").is_file() and any(folder.glob("*.safetensors"))


def eagle_layout(config: HeadConfig, names: Collection[str]) -> Layout | None:
    """The layout of an EAGLE head with tensors of these names; None if it is none."""
    kind = config.text("speculators_model_type")
    if kind is not None:
        found = {"eagle": Layout.SPECULATORS_EAGLE, "eagle3": Layout.SPECULATORS_EAGLE3}.get(kind)
        if found is None:
            raise ConfigurationError(
                f"{config.path}: speculators_model_type is {kind!r}: eagle and eagle3 are supported",
                field="speculators_model_type",
            )
        return found
    plain = {name.removeprefix("model.") for name in names}
    if "layers.0.hidden_norm.weight" in plain or any(name.startswith("midlayer.") for name in plain):
        return Layout.EAGLE3
    return Layout.EAGLE if plain & {"fc.weight", "fc.bias"} else None


def medusa_layout(names: Collection[str]) -> Layout | None:
    """The layout of Medusa heads with tensors of these names; None if they are none."""
    plain = {without_medusa_prefix(name) for name in names}
    if any(_VLLM_BLOCK.fullmatch(name) for name in plain):
        return Layout.MEDUSA_VLLM
    if not any(_RESIDUAL.fullmatch(name) for name in plain):
        return None
    return Layout.MEDUSA_V1 if any(_OWN_HEAD.fullmatch(name) for name in plain) else Layout.MEDUSA_V2


def without_medusa_prefix(name: str) -> str:
    """A tensor's name without the prefix that some tools put before it."""
    return name.removeprefix("medusa_heads.")
