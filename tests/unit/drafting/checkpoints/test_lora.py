"""An adapter is added to the weights that it was trained on, and to no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.checkpoint_files.lora import load_lora, merge_lora
from paceline.errors import ConfigurationError, ModelError
from tests.unit.drafting.checkpoints import samples
from tests.unit.drafting.checkpoints.samples import HIDDEN


def _base(num_layers: int = 2, width: int = HIDDEN) -> nn.Module:
    base = nn.Module()
    base.model = nn.Module()
    layers = [
        nn.ModuleDict({"self_attn": nn.ModuleDict({"q_proj": nn.Linear(width, width)})}) for _ in range(num_layers)
    ]
    base.model.layers = nn.ModuleList(layers)
    return base


def test_the_product_is_added_with_its_scale(tmp_path: Path) -> None:
    sample = samples.layerskip_adapter()
    base = _base()
    before = {name: weight.clone() for name, weight in base.named_parameters()}
    merge_lora(base, load_lora(sample.write(tmp_path)))
    for name, weight in base.named_parameters():
        expected = before[name]
        if name.endswith("weight"):
            stored = f"base_model.model.{name.removesuffix('.weight')}"
            product = sample.tensors[f"{stored}.lora_B.weight"] @ sample.tensors[f"{stored}.lora_A.weight"]
            expected = expected + 4 / 2 * product
        torch.testing.assert_close(weight, expected)


def test_rank_stabilised_scale(tmp_path: Path) -> None:
    sample = samples.layerskip_adapter()
    sample.others["adapter_config.json"]["use_rslora"] = True
    assert load_lora(sample.write(tmp_path)).scale == pytest.approx(4 / 2**0.5)


@pytest.mark.parametrize(
    ("base", "said"),
    [(_base(1), "layers.1.self_attn.q_proj is missing"), (_base(width=4), r"is \[4, 4\], expected \[8, 8\]")],
)
def test_another_base_is_refused_and_left_as_it_was(base: nn.Module, said: str, tmp_path: Path) -> None:
    before = [weight.clone() for weight in base.parameters()]
    with pytest.raises(ModelError, match=said):
        merge_lora(base, load_lora(samples.layerskip_adapter().write(tmp_path)))
    assert all(torch.equal(weight, old) for weight, old in zip(base.parameters(), before, strict=True))


@pytest.mark.parametrize(
    "change",
    [{"use_dora": True}, {"peft_type": "IA3"}, {"bias": "all"}, {"r": None}, {"rank_pattern": {"q_proj": 4}}],
)
def test_what_is_no_plain_lora_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    sample = samples.layerskip_adapter()
    sample.others["adapter_config.json"] |= change
    with pytest.raises(ConfigurationError) as caught:
        load_lora(sample.write(tmp_path))
    assert caught.value.field == next(iter(change))


def test_the_sum_is_that_of_peft(tiny_llama: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_llama),
        LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    adapted.save_pretrained(str(tmp_path))
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_llama), str(tmp_path)
    ).merge_and_unload()
    ours = AutoModelForCausalLM.from_pretrained(tiny_llama)
    adapter = load_lora(tmp_path)
    assert len(adapter.pairs) == 2 * ours.config.num_hidden_layers
    merge_lora(ours, adapter)
    expected = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(weight, expected[name])
