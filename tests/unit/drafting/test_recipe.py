"""The method that docs/add_a_method.md shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from paceline.drafting.fallback import FallbackMethod
from paceline.drafting.method import DraftMethod
from paceline.drafting.ngram import NgramMethod
from tests.fakes.toy_runner import ToyRunner, hash_law
from tests.unit.drafting.rounds import GREEDY, HOT, Target, draft, speculate

RECIPE = Path(__file__).parents[3] / "docs" / "add_a_method.md"


def shown_method() -> DraftMethod:
    code = re.search(r"^```python\n(.*?)^```", RECIPE.read_text(), re.MULTILINE | re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    method: DraftMethod = names["RepeatMethod"]()
    return method


def test_the_output_is_plain_decoding_s() -> None:
    target = Target(ToyRunner(hash_law(4, seed=2), 4))
    for sampling in (GREEDY, HOT):
        outcome = speculate(target, shown_method(), (1, 2), 30, 3, sampling)
        assert outcome.tokens == target.plain((1, 2), 30, sampling)
        assert sum(outcome.accepted) > 0


def test_it_fits_into_a_chain() -> None:
    method = FallbackMethod([NgramMethod(2, 3), shown_method()])
    method.open("s")
    job = draft(method, "s", (1, 2, 3), 2)
    assert (job.method, job.tokens) == ("repeat", [3, 3])
