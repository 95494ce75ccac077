"""Catches hidden states inside a model of `transformers`, whatever its architecture calls its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from paceline.errors import ModelError

_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


class HiddenStates:
    """Hooks that note the hidden states of each forward pass.

    Args:
        model: gets the hooks.
        layers: the residual stream entering these layers is noted; empty for the output of the final norm. The number
            of layers stands for what leaves the last one.

    Raises:
        ModelError: the model's layers cannot be found.
    """

    def __init__(self, model: PreTrainedModel, layers: tuple[int, ...]) -> None:
        self._layers = layers
        self._noted: dict[int, torch.Tensor] = {}
        if not layers:
            model.base_model.register_forward_hook(self._note_final)
            return
        modules = decoder_modules(model)
        for layer in set(layers):
            if layer < len(modules):
                modules[layer].register_forward_pre_hook(self._noting_input(layer), with_kwargs=True)
            else:
                modules[-1].register_forward_hook(self._noting_output(layer))

    def take(self) -> list[torch.Tensor]:
        """What the last pass noted, in the order of the layers # [num_tokens, hidden_size] each."""
        noted, self._noted = self._noted, {}
        return [noted[layer][0] for layer in self._layers or (0,)]

    def _note_final(self, _module: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
        self._noted[0] = output.last_hidden_state

    def _noting_input(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def note(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._noted[layer] = arguments[0] if arguments else named["hidden_states"]

        return note

    def _noting_output(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def note(_module: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
            self._noted[layer] = output[0] if isinstance(output, tuple) else output

        return note


def decoder_modules(model: PreTrainedModel) -> nn.ModuleList:
    """The list of a model's decoder layers.

    Raises:
        ModelError: there is no such list.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.children():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ModelError(
        f"{type(model).__name__} has no list of {num_layers} layers whose inputs could be kept: draft with a method "
        "that needs no features of inner layers",
        field="model",
    )


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm before a model's head.

    Raises:
        ModelError: it is not found under a usual name.
    """
    for name in _NORM_NAMES:
        norm = getattr(model.base_model, name, None)
        if isinstance(norm, nn.Module):
            return norm
    raise ModelError(
        f"{type(model).__name__} has no final norm under one of the names {', '.join(_NORM_NAMES)}: draft with a "
        "method that needs no part of the target",
        field="model",
    )
