"""Files that claim what they do not hold, or say what nobody means: refused with a typed error, at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import ConfigurationError, ModelError, PacelineError
from tests.unit.drafting.checkpoints import samples

HEADS = {name: make for name, make in samples.ALL.items() if name != "draft_vocabulary"}
FAR = 999_999_999


def _in_block(sample: samples.Sample, block: str, **options: Any) -> samples.Sample:
    sample.config.setdefault(block, {}).update(options)
    return sample


def _with(sample: samples.Sample, **options: Any) -> samples.Sample:
    sample.config |= options
    return sample


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: _with(samples.eagle(), layer_types=3), "layer_types"),
        (lambda: _in_block(samples.speculators_eagle3(), "speculators_config", proposal_methods=1), "proposal_methods"),
        (lambda: _with(samples.medusa_v1(), head_accuracies=True), "head_accuracies"),
        (lambda: _with(samples.medusa_v1(), head_accuracies=[[0.5], [float("nan")], [0.1]]), "head_accuracies"),
        (lambda: _with(samples.medusa_v1(), head_accuracies=[[0.5], [], [0.1]]), "head_accuracies"),
        (lambda: _with(samples.medusa_vllm(), vocab_size=10**30), "vocab_size"),
        (lambda: _with(samples.eagle(), rms_norm_eps=float("nan")), "rms_norm_eps"),
        (lambda: _with(samples.eagle(), rms_norm_eps=-1e-6), "rms_norm_eps"),
        (lambda: _with(samples.eagle3(), rope_theta=float("inf")), "rope_theta"),
        (lambda: _with(samples.eagle3(), rope_theta=10**400), "rope_theta"),
        (lambda: _in_block(samples.eagle(), "rope_scaling", rope_type="linear", factor=0), "factor"),
        (lambda: _in_block(samples.eagle(), "rope_scaling", rope_type="yarn", factor=4.0, beta_fast="x"), "beta_fast"),
    ],
)
def test_a_value_of_another_kind_is_named(make: Callable[[], samples.Sample], option: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"config.json: {option} ") as caught:
        make().load_from(tmp_path)
    assert caught.value.field == option


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "option"),
    [(2, 1, 3, "head_dim"), (3, 2, 4, "num_key_value_heads"), (1, 2, 4, "num_key_value_heads")],
)
def test_heads_that_cannot_attend_are_refused(
    num_heads: int, num_kv_heads: int, head_dim: int, option: str, tmp_path: Path
) -> None:
    sample = _with(samples.eagle(), num_attention_heads=num_heads, num_key_value_heads=num_kv_heads, head_dim=head_dim)
    sample.tensors["layers.0.self_attn.q_proj.weight"] = samples.rows(num_heads * head_dim, samples.HIDDEN)
    sample.tensors["layers.0.self_attn.o_proj.weight"] = samples.rows(samples.HIDDEN, num_heads * head_dim)
    for part in "kv":
        name = f"layers.0.self_attn.{part}_proj.weight"
        sample.tensors[name] = samples.rows(num_kv_heads * head_dim, samples.HIDDEN)
    with pytest.raises(ConfigurationError, match=f"{option} is") as caught:
        sample.load_from(tmp_path)
    assert caught.value.field == option


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("written", ["[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000, "", "\x00"])
def test_a_configuration_that_cannot_be_read_is_refused(name: str, written: str, tmp_path: Path) -> None:
    sample = HEADS[name]()
    sample.write(tmp_path)
    (tmp_path / "config.json").write_text(written)
    with pytest.raises(ModelError, match=r"config.json is not JSON .* copy it again"):
        sample.load(tmp_path, samples.TARGET)


def test_a_configuration_that_is_no_file_is_refused(tmp_path: Path) -> None:
    sample = samples.eagle3()
    sample.write(tmp_path)
    path = tmp_path / "config.json"
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(ModelError, match="cannot be read"):
        sample.load(tmp_path, samples.TARGET)
    path.unlink()
    path.mkdir()
    with pytest.raises(ModelError, match="cannot be read"):
        sample.load(tmp_path, samples.TARGET)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(2**40),
        torch.empty(2**20, 2**20, device="meta"),
        torch.eye(4).to_sparse(),
    ],
    ids=["repeated", "without numbers", "sparse"],
)
def test_numbers_must_be_in_the_file(tensor: torch.Tensor, tmp_path: Path) -> None:
    """A pickle of a hundred bytes can claim terabytes."""
    sample = samples.eagle()
    sample.tensors["fc.weight"] = tensor
    with pytest.raises(ModelError, match=r"fc.weight is no plain tensor"):
        sample.load_from(tmp_path)


def test_one_storage_under_many_names_is_counted_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = samples.eagle()
    held = torch.zeros(1000, 100)
    sample.tensors |= {f"spare.{index}": held for index in range(40)}
    monkeypatch.setattr("paceline.checkpoint_files.weight_files.SIZE_LIMIT_BYTES", 2**20)
    with pytest.raises(ModelError, match="a drafting head at most"):
        sample.load_from(tmp_path)


@pytest.mark.parametrize("name", ["medusa_v1", "medusa_v2", "medusa_vllm"])
@pytest.mark.parametrize(
    "stored",
    [
        f"{FAR}.0.linear.weight",
        f"0.{FAR}.linear.weight",
        f"0.{FAR}.weight",
        f"blocks.{FAR}.layers.0.weight",
        f"blocks.0.layers.{FAR}.weight",
        f"lm_heads.{FAR}.weight",
        "9" * 5000 + ".0.linear.weight",
    ],
)
def test_numbers_in_names_are_not_counted_up_to(name: str, stored: str, tmp_path: Path) -> None:
    sample = HEADS[name]()
    sample.tensors[stored] = torch.ones(8, 8)
    with pytest.raises(ModelError, match="unexpected"):
        sample.load_from(tmp_path)


@pytest.mark.parametrize("name", ["medusa_v1", "medusa_v2", "medusa_vllm"])
def test_heads_that_are_only_claimed_are_missing(name: str, tmp_path: Path) -> None:
    sample = HEADS[name]()
    sample.config["num_heads" if name == "medusa_vllm" else "medusa_num_heads"] = FAR
    with pytest.raises(ModelError, match=r"missing .* and [0-9]+ more"):
        sample.load_from(tmp_path)


@pytest.mark.parametrize("name", HEADS)
def test_a_tensor_without_dimensions_has_the_wrong_shape(name: str, tmp_path: Path) -> None:
    for stored in list(HEADS[name]().tensors):
        sample = HEADS[name]()
        sample.tensors[stored] = torch.ones((), dtype=sample.tensors[stored].dtype)
        with pytest.raises(PacelineError, match=r"\[\]|wrong|expected"):
            sample.load_from(tmp_path)
