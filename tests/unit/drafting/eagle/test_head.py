"""The head over paged rows equals its definition, for every kind and option."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.drafting.checkpoints.eagle import EagleKind
from paceline.drafting.eagle import make_taps
from paceline.errors import ConfigurationError
from tests.unit.drafting.eagle.heads import (
    HIDDEN,
    VOCAB,
    NaiveHead,
    config,
    features_of,
    finish,
    job_of,
    method_of,
    naive_chain,
    naive_tree,
    paths_of,
    random_head,
    shared_parts,
)
from tests.unit.drafting.rounds import GREEDY, HOT, SAMPLED

OPTIONS: list[tuple[EagleKind, dict[str, Any]]] = [
    ("eagle", {}),
    ("eagle", {"fc_bias": True}),
    ("eagle", {"input_layernorm": True, "attention_bias": True, "mlp_bias": True}),
    ("eagle", {"own_embedding": True}),
    ("eagle3", {}),
    ("eagle3", {"norm_before_residual": True}),
    ("eagle3", {"norm_output": True, "norm_before_fc": True}),
    ("eagle3", {"fc_norm": True, "own_embedding": True, "fc_bias": True}),
    ("eagle3", {"draft_vocab_size": VOCAB, "attention_bias": True}),
]
CONTEXT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4)


@pytest.mark.parametrize(("kind", "options"), OPTIONS)
def test_chain_equals_the_definition(kind: EagleKind, options: dict[str, Any]) -> None:
    checkpoint = random_head(kind, **options)
    naive = NaiveHead(checkpoint, shared_parts())
    for sampling in (GREEDY, SAMPLED, HOT):
        method = method_of(checkpoint)
        method.open("s")
        job = job_of(checkpoint, CONTEXT, 4, sampling)
        finish(method, job)
        assert job.tokens == naive_chain(naive, features_of(checkpoint, CONTEXT), CONTEXT, 4, sampling)
        assert job.parents == []
        assert job.method == kind == method.info.name


@pytest.mark.parametrize(("kind", "options"), OPTIONS)
def test_tree_equals_the_definition(kind: EagleKind, options: dict[str, Any]) -> None:
    checkpoint = random_head(kind, seed=2, **options)
    method = method_of(checkpoint, eagle_topk=3, num_draft_tokens=9)
    method.open("s")
    job = job_of(checkpoint, CONTEXT, 4)
    finish(method, job)
    expected = naive_tree(NaiveHead(checkpoint, shared_parts()), features_of(checkpoint, CONTEXT), CONTEXT, 3, 9, 4)
    assert paths_of(job) == [node.path for node in expected]
    assert job.confidences == pytest.approx([node.confidence for node in expected], abs=1e-4)


def test_packed_weights_say_the_same() -> None:
    checkpoint = random_head("eagle3")
    chains = []
    for pack in (False, True):
        method = method_of(checkpoint, pack=pack)
        method.open("s")
        job = job_of(checkpoint, CONTEXT, 5)
        finish(method, job)
        chains.append(job)
    assert chains[0].tokens == chains[1].tokens
    assert chains[0].confidences == pytest.approx(chains[1].confidences, abs=1e-5)


def test_taps_name_the_layers_and_fuse_them() -> None:
    assert make_taps(random_head("eagle")).layers == ()
    assert make_taps(random_head("eagle")).project is None
    taps = make_taps(random_head("eagle3", aux_layers=(0, 2)))
    assert (taps.layers, taps.width) == ((0, 2), HIDDEN)
    assert taps.project is not None
    rows = torch.randn(5, 2 * HIDDEN)
    fused = taps.project(rows)
    assert fused.shape == (5, HIDDEN)
    assert taps.project(rows.bfloat16()).dtype == torch.bfloat16
    assert torch.allclose(taps.project(rows), fused, atol=0.1)  # the weights have been rounded on the way


@pytest.mark.parametrize("option", ["norm_before_fc", "fc_norm"])
def test_norms_before_the_fusion(option: str) -> None:
    checkpoint = random_head("eagle3", **{option: True})
    project = make_taps(checkpoint).project
    assert project is not None
    rows = torch.randn(4, 3 * HIDDEN)
    scale = torch.tensor([7.0, 1.0, 1.0]).repeat_interleave(HIDDEN)
    # A norm for each stream takes a stream's own scale away, one over all streams does not.
    assert torch.allclose(project(rows), project(5.0 * rows), atol=1e-4)
    assert torch.allclose(project(rows), project(scale * rows), atol=1e-4) == (option == "fc_norm")


def test_a_head_for_another_target_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="trained for this target"):
        method_of(random_head("eagle", target_hidden_size=2 * HIDDEN))
    with pytest.raises(ConfigurationError, match="must bring its own"):
        method_of(random_head("eagle3", hidden_size=2 * HIDDEN))
    with pytest.raises(ConfigurationError, match="eagle_topk is 0"):
        method_of(random_head("eagle"), eagle_topk=0)
    with pytest.raises(ConfigurationError, match="for chains"):
        method_of(random_head("eagle"), eagle_topk=2, refresh=False)
    with pytest.raises(ConfigurationError, match="KV budget"):
        method_of(random_head("eagle"), kv_bytes=4096)


def test_a_head_of_another_width_brings_its_own_embedding() -> None:
    checkpoint = random_head("eagle3", hidden_size=24, own_embedding=True)
    method = method_of(checkpoint)
    method.open("s")
    job = job_of(checkpoint, CONTEXT, 3)
    finish(method, job)
    naive = NaiveHead(checkpoint, shared_parts())
    assert job.tokens == naive_chain(naive, features_of(checkpoint, CONTEXT), CONTEXT, 3, GREEDY)


def test_ids_of_no_token_are_never_proposed() -> None:
    """A target's padding columns, and columns of a draft vocabulary that name them."""
    limit = 12
    for kind in ("eagle", "eagle3"):
        checkpoint = random_head(kind)
        method = method_of(checkpoint, vocab_limit=limit, eagle_topk=4, num_draft_tokens=30)
        assert method.info.vocab_size == limit
        method.open("s")
        job = job_of(checkpoint, CONTEXT, 4)
        finish(method, job)
        assert len(job.tokens) == 30
        assert max(job.tokens) < limit
    assert config("eagle3").draft_vocab_size < VOCAB
