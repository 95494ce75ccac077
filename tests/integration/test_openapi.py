"""The OpenAPI document against the server that serves it: schemathesis asks what it allows and what it forbids.

No answer may be a server's error, and each must be one that the document describes: status, type, headers and body.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.parameters import ParameterLocation
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fakes.tiny_tokenizer import write_letters
from tests.fakes.toy_runner import ToyRunner, cycle_law
from tests.integration.fleet import EOS, VOCAB
from tests.integration.front_door import front_door
from tests.integration.http_calls import ENDPOINTS

AnyCase = Case[Any]
Operation = APIOperation[Any, Any, Any, Any]

CONTEXT = 24
LAW = cycle_law([3, 5, 7, 11, EOS], VOCAB)
KEY = "0123456789abcdef"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
EXAMPLES = {"POST": 80, "GET": 8}


def small(folder: Path, **options: Any) -> Any:
    """Doors of a model with so little context that no request takes long."""
    return front_door(
        folder,
        LAW,
        runner=lambda law: ToyRunner(law, VOCAB, max_model_len=CONTEXT, num_pages=1024),
        write_model=lambda path: write_letters(path, VOCAB, max_model_len=CONTEXT),
        **{"settings": {"max_choices": 4, **options.pop("settings", {})}, **options},
    )


def has_bad_body(case: AnyCase) -> bool:
    """Whether the body is one that the document forbids. Headers that fit nothing are replaced or left alone."""
    body = case.meta.components.get(ParameterLocation.BODY) if case.meta is not None else None
    return body is not None and body.mode is GenerationMode.NEGATIVE


def ask(operation: Operation, mode: GenerationMode, examples: int, check: Callable[[AnyCase], None]) -> None:
    """Asks for as many cases as there shall be, the same ones in every run."""

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case: AnyCase) -> None:
        check(case)

    run()


class Asker:
    """Asks everything that the document names.

    Args:
        url: of the server.
        share: of the usual number of cases.
        headers: sent with each.
    """

    def __init__(self, url: str, share: float = 1.0, **headers: str) -> None:
        self._url = url
        self._share = share
        self._headers = headers
        self.statuses: dict[str, Counter[int]] = {}
        """How often each status was the answer, by operation and kind of case."""

    def ask_all(self) -> None:
        for result in schemathesis.openapi.from_url(f"{self._url}/openapi.json").get_all_operations():
            assert isinstance(result, Ok), result
            operation = result.ok()
            for mode in GenerationMode:
                examples = max(1, round(self._share * EXAMPLES[operation.method.upper()]))
                statuses = self.statuses[f"{operation.label} {mode.value}"] = Counter()
                ask(operation, mode, examples, partial(self._check, statuses))

    def _check(self, statuses: Counter[int], case: AnyCase) -> None:
        response = case.call(headers=self._headers)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=[*CHECKS, negative_data_rejection] if has_bad_body(case) else CHECKS)


async def test_whatever_is_asked_is_answered_as_described(tmp_path: Path) -> None:
    async with small(tmp_path) as front:
        asker = Asker(front.fleet.http_url)
        await asyncio.to_thread(asker.ask_all)
        for endpoint in ENDPOINTS:
            label = f"POST /v1/{endpoint}"
            assert asker.statuses[f"{label} positive"][200] > 5
            assert asker.statuses[f"{label} negative"][400] > 5
        for door in front.doors:
            assert (await door.generate(front.fleet.request([0], max_tokens=3))).completion_tokens == 3


@pytest.mark.parametrize("authorization", ["", f"Bearer {KEY}", "Bearer another-key-of-somebody"])
async def test_so_it_is_where_keys_are_asked_for(tmp_path: Path, authorization: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"ann: {KEY}\n")
    async with small(tmp_path, settings={"api_keys_file": keys}) as front:
        asker = Asker(front.fleet.http_url, 0.2, authorization=authorization)
        await asyncio.to_thread(asker.ask_all)
        for name, statuses in asker.statuses.items():
            _, path, _ = name.split()
            refused = path.startswith("/v1") and KEY not in authorization
            assert (set(statuses) == {401}) == refused, name
