"""What a fleet is told about drafting, method by method, read by the services' own settings classes."""

from __future__ import annotations

from pathlib import Path

import pytest
from paceline_drafter.settings import DrafterSettings
from paceline_verifier.settings import VerifierSettings

from paceline import head_source
from paceline.cli import fleet_commands
from paceline.cli.drafting_options import Placement
from paceline.cli.fleet_commands import FleetCommands
from paceline.cli.fleet_options import DEFAULT_MODEL, FleetOptions
from paceline.cli.prepare import Prepared
from paceline.cli.up import no_drafters
from paceline.errors import InvalidArgument
from paceline.runtime.settings import load_settings

TARGET, COPY, HEAD = "/models/target", "/models/copy", "owner/head"


def told(options: FleetOptions) -> tuple[VerifierSettings, list[DrafterSettings]]:
    """Settings of the verifier and of all drafters."""
    options.check()
    plan = FleetCommands(options, Prepared(TARGET, COPY, "/heads/one" if options.head_reference else ""), Path("/run"))
    (verifier,) = plan.verifiers()
    drafters = [load_settings(DrafterSettings, spec.command[3:]) for spec in plan.drafters()]
    return load_settings(VerifierSettings, verifier.command[3:]), drafters


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of examples, empty."""
    monkeypatch.setattr(head_source, "EXAMPLES_DIR", tmp_path)
    return tmp_path


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3"])
def test_a_head_drafts_in_the_verifier_unless_said_otherwise(method: str) -> None:
    verifier, drafters = told(FleetOptions(method=method, head=HEAD, drafters=3))
    assert drafters == []
    assert (verifier.self_draft_method, verifier.self_draft_model) == (method, "/heads/one")
    assert verifier.served_features == "none"
    shape = (verifier.eagle_topk, verifier.num_draft_tokens, verifier.max_draft_tokens, verifier.medusa_tree)
    assert shape == (1, 16, 16, "derived:16")  # the services' own


@pytest.mark.parametrize(
    ("method", "served"), [("medusa", "final_norm"), ("eagle", "final_norm"), ("eagle3", "/heads/one")]
)
@pytest.mark.parametrize("first", ["", "ngram,"])
def test_a_head_in_drafters_gets_its_features_from_the_verifier(method: str, served: str, first: str) -> None:
    options = FleetOptions(method=first + method, head=HEAD, placement=Placement.POOL, dtype="bfloat16", drafters=2)
    verifier, drafters = told(options)
    assert (verifier.self_draft_method, verifier.served_features) == ("none", served)
    assert len(drafters) == 2
    assert drafters[0].method == options.methods
    assert (drafters[0].model, drafters[0].draft_head, drafters[0].dtype) == (TARGET, "/heads/one", "bfloat16")


def test_a_head_in_drafters_has_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_commands, "available_cores", lambda: (0, 1))
    verifier, (drafter,) = told(FleetOptions(method="ngram,eagle", head=HEAD))
    assert (drafter.cpu_affinity, verifier.cpu_affinity) == ((0,), (1,))
    verifier, _ = told(FleetOptions(method="eagle", head=HEAD))
    assert verifier.cpu_affinity == (0, 1)


def test_a_tree_is_proposed_and_judged_as_large_as_asked_for() -> None:
    tree = FleetOptions(method="eagle3", head=HEAD, eagle_topk=4, num_draft_tokens=32, num_speculative_tokens=5)
    verifier, _ = told(tree)
    assert (verifier.eagle_topk, verifier.num_draft_tokens, verifier.max_draft_tokens) == (4, 32, 32)
    pool = FleetOptions(
        method="eagle3",
        head=HEAD,
        eagle_topk=4,
        num_draft_tokens=32,
        placement=Placement.POOL,
        num_speculative_tokens=5,
    )
    verifier, (drafter,) = told(pool)
    assert (drafter.eagle_topk, drafter.max_draft_tokens, verifier.max_draft_tokens) == (4, 32, 32)
    verifier, _ = told(FleetOptions(method="medusa", head=HEAD, num_draft_tokens=24))
    assert (verifier.medusa_tree, verifier.max_draft_tokens) == ("derived:24", 24)
    verifier, _ = told(FleetOptions(method="eagle", head=HEAD, num_draft_tokens=3, num_speculative_tokens=6))
    assert (verifier.num_draft_tokens, verifier.max_draft_tokens) == (3, 6)


def test_ngram_and_draft_models_stay_in_drafters() -> None:
    for method in ("ngram", "draft_model", "ngram,draft_model"):
        verifier, drafters = told(FleetOptions(method=method))
        assert verifier.self_draft_method == "none"
        assert [drafter.method for drafter in drafters] == [tuple(method.split(","))]


def test_ngram_in_the_verifier_needs_nothing() -> None:
    verifier, drafters = told(FleetOptions(method="ngram", placement=Placement.VERIFIER))
    assert (verifier.self_draft_method, verifier.self_draft_model, drafters) == ("ngram", "", [])


def test_layerskip_makes_its_checkpoint_the_target() -> None:
    options = FleetOptions(method="layerskip", head="trained/skip", exit_layer=7)
    assert (options.target, options.head_reference) == ("trained/skip", "")
    verifier, drafters = told(options)
    assert (verifier.self_draft_method, verifier.self_draft_model, verifier.exit_layer) == ("layerskip", "", 7)
    assert (verifier.model, verifier.model_name, drafters) == (TARGET, "skip", [])


def test_layerskip_adds_its_adapter_to_the_model_that_is_named() -> None:
    adapted = FleetOptions(model="my/base", method="layerskip", head="trained/skip")
    assert (adapted.target, adapted.base) == ("trained/skip", "my/base")
    assert FleetOptions(method="layerskip", head="trained/skip").base == ""  # the adapter names one
    assert FleetOptions(model="trained/skip", method="layerskip", head="trained/skip").base == ""
    assert FleetOptions(model="my/base", method="layerskip", exit_layer=7).base == ""
    assert FleetOptions(model="my/base", method="eagle", head=HEAD).base == ""


def test_layerskip_with_an_exit_layer_alone_takes_the_target_as_it_is(examples: Path) -> None:
    (examples / f"{DEFAULT_MODEL}-layerskip").mkdir()
    (examples / f"{DEFAULT_MODEL}-layerskip" / "adapter_config.json").touch()
    assert FleetOptions(method="layerskip", exit_layer=7).target == DEFAULT_MODEL
    assert FleetOptions(method="layerskip").target == str(examples / f"{DEFAULT_MODEL}-layerskip")


def test_layerskip_in_drafters() -> None:
    options = FleetOptions(method="ngram,layerskip", head="trained/skip", exit_layer=7)
    verifier, (drafter,) = told(options)
    assert (verifier.self_draft_method, verifier.exit_layer) == ("none", None)
    assert (drafter.model, drafter.draft_head, drafter.exit_layer) == (TARGET, "", 7)


def test_no_draft_tokens_mean_no_drafting_anywhere() -> None:
    verifier, drafters = told(FleetOptions(method="eagle", head=HEAD, num_speculative_tokens=0))
    assert (verifier.self_draft_method, verifier.served_features, drafters) == ("none", "none", [])
    verifier, drafters = told(FleetOptions(method="ngram,eagle", head=HEAD, drafters=0))
    assert (verifier.self_draft_method, verifier.served_features, drafters) == ("none", "none", [])


def test_the_example_for_the_built_in_target_is_taken(examples: Path) -> None:
    options = FleetOptions(method="eagle3")
    folder = examples / f"{DEFAULT_MODEL}-eagle3"
    folder.mkdir()
    assert options.head_reference == ""  # no checkpoint yet
    (folder / "config.json").touch()
    assert options.head_reference == str(folder)
    options.check()
    assert FleetOptions(method="eagle3", head=HEAD).head_reference == HEAD
    assert FleetOptions(method="eagle3", model="owner/other").head_reference == ""


def test_without_an_example_the_error_says_what_to_do(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("eagle3", "ngram,medusa", "layerskip"):
        with pytest.raises(InvalidArgument, match=r"--head.*`paceline train (eagle3|medusa|layerskip)`") as caught:
            FleetOptions(method=method).check()
        assert caught.value.field == "head"
    monkeypatch.setattr("paceline.cli.drafting_options.EXAMPLES_DIR", examples / "none")
    with pytest.raises(InvalidArgument, match="only a checkout of the repository"):
        FleetOptions(method="eagle3").check()


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        (FleetOptions(method="ngram,eagel"), "method", "layerskip"),
        (FleetOptions(method="ngram,eagle", head=HEAD, placement=Placement.VERIFIER), "placement", "one method"),
        (FleetOptions(placement=Placement.VERIFIER), "placement", "--placement pool"),
        (FleetOptions(method="medusa,eagle", head=HEAD), "method", "ngram,medusa"),
        (FleetOptions(method="draft_model,eagle", head=HEAD), "method", "ngram,draft_model"),
        (FleetOptions(method="ngram,layerskip,draft_model", exit_layer=2), "method", "one model or head"),
        (FleetOptions(method="eagle", head="no such folder"), "head", "paceline train"),
        (FleetOptions(head=HEAD), "head", "leave it out"),
        (FleetOptions(method="medusa", head=HEAD, eagle_topk=2), "eagle_topk", "eagle, eagle3"),
        (FleetOptions(method="ngram", num_draft_tokens=9), "num_draft_tokens", "medusa, eagle, eagle3"),
        (FleetOptions(method="medusa", head=HEAD, num_draft_tokens=1000), "num_draft_tokens", "is 1000: 1 to 512"),
        (FleetOptions(method="eagle", head=HEAD, num_draft_tokens=0), "num_draft_tokens", "is 0: 1 to 512"),
        (FleetOptions(method="eagle", head=HEAD, exit_layer=3), "exit_layer", "layerskip"),
        (FleetOptions(method="layerskip", exit_layer=0), "exit_layer", "at least 1"),
        (FleetOptions(method="eagle", head=HEAD, eagle_topk=0), "eagle_topk", "at least 1"),
    ],
)
def test_what_cannot_draft_is_refused(options: FleetOptions, field: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        options.check()
    assert caught.value.field == field


def test_where_no_drafter_is_the_console_says_who_drafts() -> None:
    assert no_drafters(FleetOptions(method="eagle3", head=HEAD)) == "none: each verifier drafts with eagle3 by itself"
    assert no_drafters(FleetOptions(drafters=0)) == "none: plain decoding"
