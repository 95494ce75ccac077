from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.cores import CorePlan, is_cpu, plan_cores


def test_two_cores_one_each() -> None:
    assert plan_cores([0, 1], verifiers=1, drafters=1) == CorePlan(verifiers=((1,),), drafters=((0,),))


def test_one_core_pins_nobody() -> None:
    assert plan_cores([0], verifiers=1, drafters=1) == CorePlan(verifiers=((),), drafters=((),))


def test_more_replicas_than_cores_pins_nobody() -> None:
    assert plan_cores([0, 1], verifiers=2, drafters=1) == CorePlan(verifiers=((), ()), drafters=((),))


def test_the_verifier_gets_the_larger_part() -> None:
    assert plan_cores(list(range(8)), verifiers=1, drafters=1) == CorePlan(
        verifiers=((2, 3, 4, 5, 6, 7),), drafters=((0, 1),)
    )


def test_one_kind_alone_gets_all_cores() -> None:
    assert plan_cores([2, 3, 4], verifiers=1, drafters=0) == CorePlan(verifiers=((2, 3, 4),), drafters=())
    assert plan_cores([2, 3, 4], verifiers=0, drafters=1) == CorePlan(verifiers=(), drafters=((2, 3, 4),))


@given(st.integers(1, 64), st.integers(0, 4), st.integers(0, 4))
def test_no_core_is_given_twice_and_all_or_none_are_pinned(num_cores: int, verifiers: int, drafters: int) -> None:
    plan = plan_cores(range(num_cores), verifiers=verifiers, drafters=drafters)
    assert (len(plan.verifiers), len(plan.drafters)) == (verifiers, drafters)
    shares = [*plan.verifiers, *plan.drafters]
    given_out = [core for share in shares for core in share]
    assert len(given_out) == len(set(given_out))
    assert all(shares) or not any(shares)
    if given_out:
        assert sorted(given_out) == list(range(num_cores))


@pytest.mark.parametrize(("device", "expected"), [("cpu", True), ("cpu:0", True), ("cuda", False), ("cuda:1", False)])
def test_is_cpu(device: str, expected: bool) -> None:
    assert is_cpu(device) is expected
