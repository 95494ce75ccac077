"""Which hidden states a verifier keeps, where it drafts by itself and serves drafters too."""

from __future__ import annotations

from pathlib import Path

import pytest
from paceline_verifier.serving import joint_taps, served_taps

from paceline.drafting.eagle.taps import FeatureFusion
from paceline.engine.features import FeatureTaps
from paceline.errors import ConfigurationError
from tests.fakes.tiny_models import write_model
from tests.unit.drafting.checkpoints import samples
from tests.unit.drafting.test_self_draft_build import TARGET

FINAL = FeatureTaps()


def test_final_norm_or_none() -> None:
    assert served_taps("none", Path("nowhere")) is None
    taps = served_taps("final_norm", Path("nowhere"))
    assert taps is not None
    assert taps.kind == "final_norm"


def test_a_head_s_folder_says_what_it_builds_on(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", TARGET)
    head = samples.eagle31()
    first, again = (served_taps(str(head.write(tmp_path / name)), target) for name in ("a", "b"))
    head.tensors["fc.weight"] = head.tensors["fc.weight"] * 2
    other = served_taps(str(head.write(tmp_path / "c")), target)
    assert first is not None
    assert again is not None
    assert other is not None
    assert first.kind == again.kind != other.kind
    assert first.kind.startswith("layers 2,6,9/")
    assert isinstance(first.project, FeatureFusion)
    with pytest.raises(ConfigurationError, match="set it to none, to final_norm, or to the folder"):
        served_taps("eagle", target)


def test_what_is_served_and_what_drafts_here_are_the_same() -> None:
    inner = FeatureTaps(layers=(1, 2))
    assert joint_taps(None, None) is None
    assert joint_taps(FINAL, None) is joint_taps(None, FINAL) is FINAL
    assert joint_taps(FeatureTaps(width=8, only_last=True), FINAL) is not None
    with pytest.raises(ConfigurationError, match="drafts from 'final_norm' and is to serve 'layers 1,2'"):
        joint_taps(FINAL, inner)
