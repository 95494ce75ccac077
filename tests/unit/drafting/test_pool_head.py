"""A head in a drafter: made of files, without the target; what cannot work is refused with its setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.drafting.build import MethodSettings, build_method
from paceline.drafting.eagle import EagleMethod
from paceline.drafting.fallback import FallbackMethod
from paceline.errors import ConfigurationError
from paceline.text.tokenizer import Tokenizer
from tests.fakes.tiny_models import write_model
from tests.unit.drafting.checkpoints import samples
from tests.unit.drafting.test_self_draft_build import SAMPLES, TARGET


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"), TARGET)


@pytest.mark.parametrize("method", SAMPLES)
def test_a_head_says_what_it_builds_on_and_holds(method: str, target: Path, tmp_path: Path) -> None:
    head = SAMPLES[method]().write(tmp_path / method)
    settings = MethodSettings((method,), str(target), draft_head=str(head), kv_bytes=1 << 20)
    info = build_method(settings).info
    assert info.name == method
    assert info.taps is not None
    assert (info.taps.width, info.taps.only_last) == (samples.HIDDEN, method == "medusa")
    assert info.tokenizer_hash == Tokenizer.load(target).fingerprint
    # The target's embedding and output layer are here for the head alone.
    assert info.weights_bytes > 2 * 4 * samples.VOCAB * samples.HIDDEN


def test_a_head_ends_a_chain(target: Path, tmp_path: Path) -> None:
    head = samples.eagle().write(tmp_path / "head")
    settings = MethodSettings(("ngram", "eagle"), str(target), draft_head=str(head), kv_bytes=1 << 20)
    chain = build_method(settings)
    assert isinstance(chain, FallbackMethod)
    assert chain.info.methods == ("ngram", "eagle")
    assert chain.info.taps is not None
    assert isinstance(build_method(MethodSettings(("eagle",), str(target), str(head), kv_bytes=1 << 20)), EagleMethod)


@pytest.mark.parametrize(
    ("settings", "field", "says"),
    [
        (MethodSettings(("eagle",), draft_head="head"), "draft_model", "set draft_model to the target's folder"),
        (MethodSettings(("eagle3",), "target"), "draft_head", "draft_head to the head's"),
        (MethodSettings(("draft_model", "eagle"), "target", "head"), "methods", "start a drafter for each"),
        (MethodSettings(("typical",), "target", "head"), "methods", "name one or more of draft_model, ngram, medusa"),
    ],
)
def test_what_cannot_work_is_refused(settings: MethodSettings, field: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        build_method(settings)
    assert caught.value.field == field
