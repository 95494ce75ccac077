from __future__ import annotations

from paceline.drafting.local import LocalDrafter
from paceline.drafting.ngram import NgramMethod
from paceline.engine.local import LocalRequest, generate
from paceline.engine.target import TargetEngine
from paceline.messages import SamplingParams
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from tests.fakes.scripted_drafter import ScriptedDrafter, perfect
from tests.fakes.toy_runner import ToyRunner, cycle_law

SAMPLING = SamplingParams(temperature=0.0, seed=4)


def test_a_method_as_a_function_of_the_tokens() -> None:
    drafter = LocalDrafter(NgramMethod(2, 3), SAMPLING)
    assert drafter((1, 2, 3, 1, 2), 2) == DraftTree.chain((3, 1))
    assert drafter.last is not None
    assert drafter.last.method == "ngram"
    assert drafter((1, 2), 2) == EMPTY_BLOCK


def test_it_drives_local_rounds() -> None:
    cycle = [3, 5, 7]
    method = ScriptedDrafter(perfect(lambda context, _: cycle[len(context) % 3]))
    drafter = LocalDrafter(method, SAMPLING)
    engine = TargetEngine(ToyRunner(cycle_law(cycle)))
    result = generate(engine, [LocalRequest((1, 1, 1), SAMPLING, 12, 3, drafter)])[0]
    assert result.tokens == cycle * 4
    assert (result.num_rounds, result.num_accepted, result.num_drafted) == (3, 9, 9)
    drafter.close()
    assert method.fed == {}
