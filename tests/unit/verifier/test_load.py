"""What a verifier refuses before it loads anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from paceline_verifier.load import load_replica
from paceline_verifier.settings import VerifierSettings

from paceline.errors import ModelError
from paceline.model_source import DRAFT_VOCABULARY_FILE


def test_a_draft_model_with_a_trimmed_vocabulary_is_no_target(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("tokenizer.json", "model.safetensors", DRAFT_VOCABULARY_FILE):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match="trimmed vocabulary") as caught:
        load_replica(VerifierSettings(model=str(tmp_path)))
    assert caught.value.field == "model"
