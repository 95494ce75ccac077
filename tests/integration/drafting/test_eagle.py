"""EAGLE heads in the target's own process: real hidden states, real verdicts, a head that has learnt its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

from paceline.drafting.checkpoints.eagle import EagleCheckpoint
from paceline.drafting.eagle import EagleMethod, make_taps
from paceline.drafting.method import DraftJob
from paceline.drafting.self_drafting import SelfDrafting
from paceline.engine.loader import load_model
from paceline.engine.local import LocalRequest, LocalResult, generate
from paceline.engine.native.native_runner import NativeRunner
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.shared_parts import SharedParts
from paceline.engine.target import TargetEngine, TargetOptions
from paceline.messages import AcceptanceRule, SamplingParams
from tests.fakes.tiny_models import Architecture, write_model
from tests.unit.drafting.eagle.heads import HIDDEN, VOCAB, NaiveHead, Recorded, config, method_of, random_head
from tests.unit.drafting.rounds import GREEDY, HOT, SAMPLED

CONTEXT = 1024
ARCHITECTURE = Architecture(
    LlamaConfig,
    {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": VOCAB - 1,
        "pad_token_id": None,
    },
)
NUM_TEXTS, TEXT_LEN, NUM_STEPS = 16, 160, 400


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"), ARCHITECTURE)


@pytest.fixture(scope="module")
def trained(target: Path) -> EagleCheckpoint:
    """A head that has learnt from texts of its target, in a second or two: the published losses, on the definition."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(VOCAB, (NUM_TEXTS, 4), generator=generator)
    with torch.no_grad():
        while texts.shape[1] < TEXT_LEN:
            probs = model(texts, use_cache=False).logits[:, -1].softmax(-1)
            texts = torch.cat([texts, torch.multinomial(probs, 1, generator=generator)], dim=1)
        features = model.model(texts).last_hidden_state
    checkpoint = random_head("eagle", max_model_len=CONTEXT)
    table, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    naive = NaiveHead(checkpoint, parts_of(table, head))
    weights = [weight.requires_grad_() for weight in checkpoint.weights.values()]
    optimizer = torch.optim.Adam(weights, lr=5e-3)
    for step in range(NUM_STEPS):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - step / NUM_STEPS)
        text, wanted = texts[step % NUM_TEXTS], features[step % NUM_TEXTS]
        states = naive.states(wanted[:-1], text[1:])
        loss = functional.smooth_l1_loss(states, wanted[1:])
        loss = loss + 0.1 * functional.cross_entropy(states @ head.T, (wanted[1:] @ head.T).softmax(-1))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for weight in weights:
        weight.requires_grad_(False)
    return checkpoint


def parts_of(table: torch.Tensor, head: torch.Tensor) -> SharedParts:
    return SharedParts(
        embed=lambda ids: table[ids],
        head=lambda rows: rows @ head.T,
        norm=lambda rows: rows,
        hidden_size=head.shape[1],
        num_layers=3,
        vocab_size=head.shape[0],
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@dataclass
class Drafting:
    """A target that drafts by itself with a head."""

    engine: TargetEngine
    method: EagleMethod


def drafting_with(target: Path, checkpoint: EagleCheckpoint, **settings: Any) -> Drafting:
    torch.set_num_threads(1)
    options = RunnerOptions(kv_bytes=4 << 20, taps=make_taps(checkpoint))
    runner = NativeRunner(load_model(target), options)
    method = EagleMethod(checkpoint, runner.shared_parts(), **({"kv_bytes": 1 << 20} | settings))
    engine = TargetEngine(runner, self_drafter=SelfDrafting(method), options=TargetOptions(max_draft_tokens=16))
    return Drafting(engine, method)


def request(
    prompt: Sequence[int], sampling: SamplingParams, max_tokens: int, *, depth: int = 4, rule: str = "match"
) -> LocalRequest:
    sampling = replace(sampling, ignore_eos=True)
    return LocalRequest(tuple(prompt), sampling, max_tokens, self_draft_depth=depth, rule=AcceptanceRule(rule))


def prompt_of(seed: int, length: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def accepted_per_round(results: Sequence[LocalResult], start: int = 0, stop: int | None = None) -> float:
    return mean(tokens - 1 for result in results for tokens in result.rounds[1:][start:stop])


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "trained"])
def test_ids_are_those_of_plain_decoding(target: Path, trained: EagleCheckpoint, kind: str, topk: int) -> None:
    random = random_head("eagle3" if kind == "eagle3" else "eagle", max_model_len=CONTEXT)
    checkpoint = trained if kind == "trained" else random
    drafting = drafting_with(target, checkpoint, eagle_topk=topk, num_draft_tokens=10)
    wanted = [
        request(prompt_of(index, 3 + 17 * index), sampling, 40)
        for index, sampling in enumerate([GREEDY, SAMPLED, HOT, replace(HOT, repetition_penalty=1.3)])
    ]
    plain = generate(drafting.engine, [replace(each, self_draft_depth=0) for each in wanted])
    results = generate(drafting.engine, wanted)
    assert [result.tokens for result in results] == [result.tokens for result in plain]
    assert kind != "trained" or all(result.num_accepted > 0 for result in results[1:])
    drafting.method.check_integrity()
    assert drafting.method.kv_usage().used_tokens == 0


def test_acceptance_does_not_decay_over_200_rounds(target: Path, trained: EagleCheckpoint) -> None:
    (result,) = generate(drafting_with(target, trained).engine, [request(prompt_of(0, 5), HOT, 700)])
    assert len(result.rounds) > 200
    early, late = (accepted_per_round([result], *half) for half in ((0, 100), (100, 200)))
    assert early > 0.7  # chance alone would give 1/24
    assert late > 0.85 * early


def test_a_tree_is_accepted_deeper_than_a_chain(target: Path, trained: EagleCheckpoint) -> None:
    wanted = [request(prompt_of(seed, 5), replace(HOT, seed=seed), 100) for seed in range(3)]
    chain, tree = (
        accepted_per_round(generate(drafting_with(target, trained, eagle_topk=topk).engine, wanted)) for topk in (1, 3)
    )
    assert tree > 1.15 * chain


def test_a_found_prefix_lowers_no_acceptance(target: Path, trained: EagleCheckpoint) -> None:
    drafting = drafting_with(target, trained)
    prompt = prompt_of(7, 100)
    cold, warm = (generate(drafting.engine, [request(prompt, HOT, 80)])[0] for _ in range(2))
    assert drafting.engine.scheduling.prefix_hit_tokens >= 96
    assert (warm.tokens, warm.rounds) == (cold.tokens, cold.rounds)
    assert cold.num_accepted > 20
    assert drafting.method.num_short_starts == 0
    # The head's own rows of the prompt are shared too.
    assert drafting.method.stats.prefix_hit_tokens >= 96


def test_under_ratio_a_head_drafts_chains_without_chance(target: Path, trained: EagleCheckpoint) -> None:
    drafting = drafting_with(target, trained, eagle_topk=3)
    (result,) = generate(drafting.engine, [request(prompt_of(1, 5), HOT, 60, rule="ratio")])
    assert result.num_accepted > 5


# --- the trap ---------------------------------------------------------------------------------------------------------


def telltale() -> tuple[EagleCheckpoint, SharedParts]:
    """A head that is right about every token, and whose states are features but for one number.

    The text is a cycle 1, 2, ..., 23, 1; a feature is a vector with a one for its token. In the head's own states one
    number more is 1, and attention, which looks everywhere alike, takes its mean. The more rows are made from such
    states, the more is added to the logit of token 0, which is always wrong; beyond a quarter of the rows it wins.
    """
    width = 32
    own, seen, mean_of_seen = 24, 25, 26
    made = config(
        "eagle",
        hidden_size=width,
        target_hidden_size=width,
        num_heads=1,
        head_dim=width,
        intermediate_size=4,
        fc_bias=True,
        max_model_len=4096,
    )
    fc, bias = torch.zeros(width, 2 * width), torch.zeros(width)
    fc[:VOCAB, :VOCAB] = torch.eye(VOCAB)  # the token's own vector, out of its embedding
    bias[own] = 1.0
    fc[seen, width + own] = 1.0
    v, o = torch.zeros(width, width), torch.zeros(width, width)
    v[0, seen] = 1.0
    o[mean_of_seen, 0] = 1.0
    nothing = torch.zeros(4, width)
    weights = {
        "fc.weight": fc,
        "fc.bias": bias,
        "layer.self_attn.q_proj.weight": torch.zeros(width, width),
        "layer.self_attn.k_proj.weight": torch.zeros(width, width),
        "layer.self_attn.v_proj.weight": v,
        "layer.self_attn.o_proj.weight": o,
        "layer.mlp.gate_proj.weight": nothing,
        "layer.mlp.up_proj.weight": nothing,
        "layer.mlp.down_proj.weight": nothing.T.contiguous(),
        "layer.post_attention_layernorm.weight": torch.ones(width),
    }
    head = torch.zeros(VOCAB, width)
    for token in range(1, VOCAB):
        head[token % (VOCAB - 1) + 1, token] = 1.0
    head[0, mean_of_seen] = 4.0
    return EagleCheckpoint(made, weights, "telltale"), parts_of(torch.eye(VOCAB, width), head)


_START = 40


def accepted_of_a_cycle(method: EagleMethod, num_rounds: int) -> list[int]:
    """Accepted drafts of each round, four being drafted, where the target writes the cycle."""
    method.open("s")
    text = [index % (VOCAB - 1) + 1 for index in range(_START + 5 * num_rounds)]
    features = functional.one_hot(torch.tensor(text), 32).float()
    length, accepted = _START, []
    for _ in range(num_rounds):
        job = DraftJob("s", tuple(text[:length]), 4, GREEDY, features=Recorded(features[: length - 1]))
        while not job.done:
            method.advance([job])
        right = [draft == token for draft, token in zip(job.tokens, text[length:], strict=False)]
        accepted.append([*right, False].index(False))
        length += accepted[-1] + 1
    return accepted


def test_rows_of_own_states_would_lower_acceptance_and_are_dropped() -> None:
    checkpoint, parts = telltale()
    refreshed = accepted_of_a_cycle(method_of(checkpoint, parts, kv_bytes=1 << 19), 200)
    kept = accepted_of_a_cycle(method_of(checkpoint, parts, refresh=False), 60)
    assert refreshed == [4] * 200
    assert kept[0] == 4
    assert mean(kept[-30:]) < 2.0
