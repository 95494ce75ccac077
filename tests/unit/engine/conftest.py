"""Engine tests run tiny models: one thread each, so that they do not fight over the cores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`model_folder(name, seed=0)`: folder of a model of SERVED, written once, for tests that only read it."""
    # Here, because it imports transformers, which many tests do without.
    from tests.fakes.tiny_models import SERVED, write_model

    @functools.cache
    def folder(name: str, seed: int = 0) -> Path:
        return write_model(tmp_path_factory.mktemp(name), SERVED[name], seed=seed)

    return folder
