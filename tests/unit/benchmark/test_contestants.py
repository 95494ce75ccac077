from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.benchmark.contestants import CHAIN, METHODS, Absentee, Field, Heat
from paceline.cli.fleet_options import FleetOptions
from paceline.errors import InvalidArgument

OPTIONS = FleetOptions(num_speculative_tokens=5, port=0, http_port=0)


def target(folder: Path, num_layers: int = 30) -> str:
    """A folder that is a target as far as anybody looks here."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": num_layers, "model_type": "llama"}))
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").touch()
    return str(folder)


def heads(folder: Path) -> dict[str, str]:
    names = ("draft_model", "medusa", "eagle", "eagle3", "layerskip")
    found = {name: folder / name for name in names}
    for path in found.values():
        path.mkdir()
    (found["layerskip"] / "config.json").write_text('{"exit_layer": 7}')
    return {name: str(path) for name, path in found.items()}


def test_every_fleet_can_be_started_and_every_method_has_its_rows(tmp_path: Path) -> None:
    options = FleetOptions(
        model=target(tmp_path / "target"), num_speculative_tokens=5, eagle_topk=4, num_draft_tokens=12
    )
    heats = list(Field(options, METHODS, heads(tmp_path)).heats())
    rows = []
    for heat in heats:
        assert isinstance(heat, Heat)
        heat.options.check()
        for contestant in heat.contestants:
            inside = bool(heat.options.self_draft_method)
            assert contestant.placement == ("verifier" if inside else "pool")
            assert contestant.way.num_speculative_tokens == 5
            rows.append((contestant.name, contestant.placement))
    assert rows == [
        ("draft_model, int8 copy", "pool"),
        ("ngram", "pool"),
        ("ngram, then int8 copy", "pool"),
        ("draft_model, trained", "pool"),
        ("medusa", "verifier"),
        ("medusa", "pool"),
        ("eagle", "verifier"),
        ("eagle", "pool"),
        ("eagle3", "verifier"),
        ("eagle3", "pool"),
        ("layerskip", "verifier"),
        ("layerskip, untrained", "verifier"),
    ]
    assert [heat.options.eagle_topk for heat in heats if isinstance(heat, Heat) and heat.options.head][2:6] == [4] * 4
    assert isinstance(heats[-1], Heat)
    assert (heats[-1].options.target, heats[-1].options.exit_layer) == (options.model, 7)


def test_one_fleet_with_a_chain_serves_those_who_ask_for_a_part_of_it() -> None:
    (heat,) = Field(OPTIONS, ("ngram", CHAIN)).heats()
    assert isinstance(heat, Heat)
    assert heat.options.methods == ("ngram", "draft_model")
    assert [contestant.way.method for contestant in heat.contestants] == ["ngram", ""]
    (heat,) = Field(OPTIONS, ("ngram",)).heats()
    assert isinstance(heat, Heat)
    assert (heat.options.methods, heat.options.drafters_compute) == (("ngram",), False)


def test_what_has_no_checkpoint_says_so(tmp_path: Path) -> None:
    options = FleetOptions(model=target(tmp_path / "target"))
    absent = list(Field(options, ("draft_model", "eagle3")).heats())[1:]
    assert [(each.name, each.placement) for each in absent if isinstance(each, Absentee)] == [
        ("draft_model", "pool"),
        ("eagle3", "verifier"),
        ("eagle3", "pool"),
    ]
    assert all("--head" in each.reason for each in absent if isinstance(each, Absentee))


def test_untrained_layerskip_leaves_after_a_quarter_of_the_layers(tmp_path: Path) -> None:
    options = FleetOptions(model=target(tmp_path / "target", num_layers=12))
    *_, heat = Field(options, ("layerskip",)).heats()
    assert isinstance(heat, Heat)
    assert heat.options.exit_layer == 3


@pytest.mark.parametrize(
    ("field", "name"), [(Field(OPTIONS, ("eagle4",)), "eagle4"), (Field(OPTIONS, heads={"ngram": "x"}), "ngram")]
)
def test_what_is_unknown_is_refused(field: Field, name: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        field.check()
