"""Features that runners keep: those of a fresh forward, whatever happened to the rows meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from paceline.engine.features import FeatureTaps
from paceline.engine.kv.pool import SequenceKV
from paceline.engine.load_runner import LoadedRunner
from paceline.engine.loader import LoadedModel, load_model
from paceline.engine.native.native_runner import NativeRunner
from paceline.engine.runner import SequencePass
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.target import TargetEngine, TargetOptions
from paceline.engine.transformers_runner import TransformersRunner
from paceline.errors import ConfigurationError
from paceline.messages import Verified
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from tests.fakes.tiny_models import SERVED, VOCAB_SIZE, Architecture, write_model
from tests.unit.engine.rounds import Owner, run
from tests.unit.engine.stock import stock_model

KINDS: dict[str, Callable[[LoadedModel, RunnerOptions], LoadedRunner]] = {
    "native": NativeRunner,
    "transformers": TransformersRunner,
}
TEXT = tuple((7 * index + 3) % VOCAB_SIZE for index in range(40))
FINAL = FeatureTaps()
INNER = FeatureTaps(layers=(0, 2, 3))
HIDDEN_SIZE = 32


def halves(rows: torch.Tensor) -> torch.Tensor:  # [num_rows, 2 * width] -> [num_rows, width]
    left, right = rows.chunk(2, dim=-1)
    return left + 2 * right


PROJECTED = FeatureTaps(layers=(2, 1), project=halves, width=HIDDEN_SIZE)


def make(kind: str, folder: Path, taps: FeatureTaps | None, kv_bytes: int = 1 << 20) -> LoadedRunner:
    return KINDS[kind](load_model(folder), RunnerOptions(kv_bytes=kv_bytes, page_tokens=4, taps=taps))


@torch.inference_mode()
def fresh(model: LlamaForCausalLM, taps: FeatureTaps, tokens: Sequence[int]) -> torch.Tensor:
    """Features of a pass without any cache, by the stock model # [len(tokens), width]."""
    caught: list[torch.Tensor] = []
    last = model.base_model.get_submodule("layers")[-1] if 3 in taps.layers else None  # type: ignore[index]
    hook = last.register_forward_hook(lambda _module, _arguments, output: caught.append(output)) if last else None
    states = model(input_ids=torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True).hidden_states
    if hook is not None:
        hook.remove()
    if not taps.layers:
        return cast("torch.Tensor", states[-1][0])
    joined = torch.cat([(states[layer] if layer < 3 else caught[0])[0] for layer in taps.layers], dim=-1)
    return joined if taps.project is None else taps.project(joined)


def assert_features(runner: LoadedRunner, kv: SequenceKV, expected: torch.Tensor) -> None:
    rows = runner.features(kv)
    assert (rows.first_row, rows.num_rows) == (0, kv.num_rows)
    tolerance = 1e-4 * float(expected.abs().max())
    torch.testing.assert_close(rows.read(0, kv.num_rows), expected[: kv.num_rows], rtol=0, atol=tolerance)


def feed(
    runner: LoadedRunner, kv: SequenceKV, chain: Sequence[int], tree: DraftTree = EMPTY_BLOCK, path: Sequence[int] = ()
) -> None:
    """One pass beside another sequence, of which no logits are wanted."""
    neighbour = runner.new_sequence()
    neighbour.reserve(2)
    kv.reserve(len(chain) + tree.num_draft_tokens)
    runner.forward([SequencePass(neighbour, (1, 2)), SequencePass(kv, tuple(chain), tree)])
    kv.commit(len(chain), path)
    neighbour.free()


def scatter(runner: LoadedRunner, kv: SequenceKV, num_rows: int) -> None:
    """Fills rows into pages that are no neighbours."""
    kv.pages = runner.pool.take_pages(-(-num_rows // 4), None)[::-1]
    feed(runner, kv, TEXT[:num_rows])


@pytest.mark.parametrize("taps", [FINAL, INNER, PROJECTED], ids=["final", "inner", "projected"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_chunks_trees_rollbacks_and_forks_are_those_of_a_fresh_forward(
    kind: str, taps: FeatureTaps, tiny_llama: Path
) -> None:
    runner = make(kind, tiny_llama, taps)
    expected = fresh(stock_model(tiny_llama), taps, TEXT)
    kv = runner.new_sequence()
    feed(runner, kv, TEXT[:13])
    feed(runner, kv, TEXT[13:15], DraftTree.chain((1, 1)))
    assert_features(runner, kv, expected)
    wrong = (TEXT[15] + 1) % VOCAB_SIZE
    feed(runner, kv, TEXT[15:16], DraftTree((wrong, TEXT[16], wrong, TEXT[17]), (0, 0, 2, 2)), (2, 4))
    assert kv.num_rows == 18
    assert_features(runner, kv, expected)
    kv.rollback(6)
    twin = kv.fork()
    feed(runner, kv, [1, 2, 3])
    feed(runner, twin, TEXT[6:])
    assert_features(runner, twin, expected)
    scattered = runner.new_sequence()
    scatter(runner, scattered, 11)
    assert_features(runner, scattered, expected)
    assert torch.equal(runner.features(scattered).read(3, 9), runner.features(scattered).read(0, 11)[3:9])
    assert runner.features(scattered).read(4, 4).shape == (0, expected.shape[1])
    scattered.straighten()
    assert_features(runner, scattered, expected)
    with pytest.raises(IndexError):
        runner.features(scattered).read(3, 12)


@pytest.mark.parametrize("name", SERVED)
def test_every_architecture_s_hidden_states_are_found(name: str, model_folder: Callable[..., Path]) -> None:
    folder = model_folder(name)
    for taps in (FINAL, INNER):
        runner = make("transformers", folder, taps)
        kv = runner.new_sequence()
        feed(runner, kv, TEXT[:12])
        assert_features(runner, kv, fresh(stock_model(folder), taps, TEXT[:12]))


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_charged_to_the_byte_and_cost_nothing_when_not_wanted(kind: str, tiny_llama: Path) -> None:
    # layers x (keys and values) x key/value heads x head size
    kv_numbers = 3 * 2 * 2 * 8
    for taps, width in ((None, 0), (FINAL, HIDDEN_SIZE), (INNER, 3 * HIDDEN_SIZE), (PROJECTED, HIDDEN_SIZE)):
        runner = make(kind, tiny_llama, taps)
        row_bytes = 4 * (kv_numbers + width)
        assert runner.info.kv_bytes_per_token == row_bytes
        assert runner.info.feature_bytes == 4 * width * runner.pool.capacity_tokens
        assert runner.pool.capacity_tokens == (1 << 20) // (4 * row_bytes) * 4
        assert runner.info.kv_bytes == runner.pool.capacity_tokens * row_bytes
        assert sum(group.nbytes for group in runner.pool.groups) == runner.info.kv_bytes
    with pytest.raises(ConfigurationError, match="without taps"):
        make(kind, tiny_llama, None).features(runner.new_sequence())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_same_with_features_even_if_a_plane_looks_like_keys(kind: str, tmp_path: Path) -> None:
    # One key/value head as wide as a row of features.
    shape = Architecture(
        SERVED["llama"].config_class,
        {**SERVED["llama"].arguments, "num_key_value_heads": 1, "num_attention_heads": 1, "head_dim": HIDDEN_SIZE},
    )
    folder = write_model(tmp_path, shape)
    results = []
    for taps in (None, FINAL):
        runner = make(kind, folder, taps)
        kv = runner.new_sequence()
        kv.reserve(len(TEXT))
        results.append(runner.forward([SequencePass(kv, TEXT, num_logits=len(TEXT))])[0])
        kv.commit(len(TEXT))
    assert_features(runner, kv, fresh(stock_model(folder), FINAL, TEXT))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("taps", "message"),
    [
        (FeatureTaps(layers=(1, 4)), "has 3 layers"),
        (FeatureTaps(width=31), "31 numbers per row are wanted, but 32"),
        (FeatureTaps(layers=(0, 1), project=halves, width=64), "but 32 come out of this model's 64"),
    ],
)
def test_taps_of_another_model_are_refused(kind: str, taps: FeatureTaps, message: str, tiny_llama: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(kind, tiny_llama, taps)


# --- under the engine's scheduling ----------------------------------------------------------------------------------

NUM_SESSIONS = 3
COMMON = TEXT[:8]


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tiny_llama: Path) -> tuple[str, Path, LlamaForCausalLM]:
    return request.param, tiny_llama, stock_model(tiny_llama)


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 1000))
def test_features_follow_their_tokens_through_prefix_hits_preemption_and_trees(
    served: tuple[str, Path, LlamaForCausalLM], seed: int
) -> None:
    generator, seconds = random.Random(seed), count()  # a clock by which every session is idle soon

    def draw(length: int) -> list[int]:
        return [generator.randrange(VOCAB_SIZE) for _ in range(length)]

    kind, folder, stock = served
    # A pool of 128 tokens: three sessions that share 8 and have 50 in the end take rows from one another.
    runner = make(kind, folder, INNER, 128 * 4 * (96 + 3 * HIDDEN_SIZE))
    options = TargetOptions(max_sessions=NUM_SESSIONS, max_batch_tokens=48)
    engine = TargetEngine(runner, options=options, clock=lambda: next(seconds))
    owners: list[Owner] = []
    for index in range(NUM_SESSIONS):
        owners.append(Owner(engine, (*COMMON, index, *draw(27 + index)), name=str(index)))
        owners[0].verify()  # what the first one has computed is there for the next
    for ahead in owners:
        ahead.log.extend(draw(12))  # from elsewhere, as after a move
        for owner in owners:
            paths = [draw(generator.randint(1, 3)) for _ in range(generator.randint(0, 2))]
            with torch.inference_mode():
                best = int(stock(input_ids=torch.tensor([owner.tokens])).logits[0, -1].argmax())
            # What the model wants lies behind wrong siblings.
            paths.append([best, *draw(1)])
            assert owner.submit(DraftTree.from_paths(paths), catch_up=12) is None
        for answer in run(engine):
            assert isinstance(answer, Verified)
            owners[int(answer.session)].log.extend(answer.tokens)  # its rows may be someone else's by now
        for owner in owners:
            kv = engine._sessions[owner.name].kv
            if kv.num_rows:
                assert_features(runner, kv, fresh(stock, INNER, owner.tokens))
    assert engine.scheduling.preemptions > 0
    assert engine.scheduling.prefix_hit_tokens > 0
