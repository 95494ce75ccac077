"""The command lines of a fleet, read by the services' own settings classes."""

from __future__ import annotations

from pathlib import Path

import pytest
from paceline_drafter.settings import DrafterSettings
from paceline_gateway.settings import GatewaySettings
from paceline_verifier.settings import VerifierSettings

from paceline.cli import fleet_commands
from paceline.cli.child import ChildSpec
from paceline.cli.fleet_commands import FleetCommands
from paceline.cli.fleet_options import FleetOptions
from paceline.cli.prepare import Prepared
from paceline.errors import InvalidArgument
from paceline.method_names import HEAD_METHODS, METHOD_NAMES
from paceline.runtime.settings import load_settings

_PREPARED = Prepared("/models/target", "/models/copy")


def arguments(spec: ChildSpec) -> list[str]:
    """A command line without the interpreter and `-m package`."""
    return list(spec.command[3:])


def commands(options: FleetOptions, monkeypatch: pytest.MonkeyPatch, num_cores: int = 2) -> FleetCommands:
    monkeypatch.setattr(fleet_commands, "available_cores", lambda: tuple(range(num_cores)))
    return FleetCommands(options, _PREPARED, Path("/run"))


def test_the_default_fleet_on_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = commands(FleetOptions(model="/models/owner/Some-Model.gguf"), monkeypatch)
    (verifier,) = plan.verifiers()
    (drafter,) = plan.drafters()
    verifier_settings = load_settings(VerifierSettings, arguments(verifier))
    assert verifier_settings.model == "/models/target"
    assert verifier_settings.model_name == "Some-Model"
    assert (verifier_settings.num_threads, verifier_settings.cpu_affinity) == (1, (1,))
    assert verifier_settings.ready_file == verifier.ready_file
    drafter_settings = load_settings(DrafterSettings, arguments(drafter))
    assert drafter_settings.method == ("draft_model",)
    assert drafter_settings.model == "/models/copy"
    assert drafter_settings.model_name == "Some-Model"
    assert (drafter_settings.num_threads, drafter_settings.cpu_affinity) == (1, (0,))
    assert verifier.environment == drafter.environment == {"OMP_WAIT_POLICY": "passive"}
    assert verifier.log_file != drafter.log_file


def test_prompts_are_read_anew_where_two_ways_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    (verifier,) = commands(FleetOptions(cold_prompts=True), monkeypatch).verifiers()
    for name, value in verifier.environment.items():
        monkeypatch.setenv(name, value)
    assert not load_settings(VerifierSettings, arguments(verifier)).prefix_caching


def test_the_gateway_gets_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = commands(FleetOptions(num_speculative_tokens=6, port=0, http_port=8080), monkeypatch)
    spec = plan.gateway(["h:1", "h:2"], ["h:3"], "redis://h:4")
    assert "redis" not in " ".join(spec.command)  # the URL may hold a password
    for name, value in spec.environment.items():
        monkeypatch.setenv(name, value)
    settings = load_settings(GatewaySettings, arguments(spec))
    assert settings.verifiers == ("h:1", "h:2")
    assert settings.drafters == ("h:3",)
    assert settings.redis_url.get_secret_value() == "redis://h:4"
    assert settings.num_speculative_tokens == 6
    assert settings.port == 0
    assert settings.http_port == 8080


def test_every_service_serves_metrics_on_a_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = commands(FleetOptions(), monkeypatch)
    gateway = load_settings(GatewaySettings, arguments(plan.gateway(["h:1"], ["h:2"], "redis://h:4")))
    verifier = load_settings(VerifierSettings, arguments(plan.verifiers()[0]))
    drafter = load_settings(DrafterSettings, arguments(plan.drafters()[0]))
    assert [settings.metrics_port for settings in (gateway, verifier, drafter)] == [0, 0, 0]


def test_a_gateway_without_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = commands(FleetOptions(drafters=0), monkeypatch)
    assert plan.drafters() == []
    settings = load_settings(GatewaySettings, arguments(plan.gateway(["h:1"], [], "redis://h:4")))
    assert settings.drafters == ()


def test_several_replicas_get_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = commands(FleetOptions(verifiers=2, drafters=2), monkeypatch, num_cores=8)
    verifiers = [load_settings(VerifierSettings, arguments(spec)) for spec in plan.verifiers()]
    drafters = [load_settings(DrafterSettings, arguments(spec)) for spec in plan.drafters()]
    assert [settings.cpu_affinity for settings in drafters] == [(0,), (1,)]
    assert [settings.cpu_affinity for settings in verifiers] == [(2, 3, 4), (5, 6, 7)]
    assert [settings.num_threads for settings in verifiers] == [3, 3]
    assert len({spec.name for spec in [*plan.verifiers(), *plan.drafters()]}) == 4


def test_on_two_gpus_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    options = FleetOptions(
        drafter_model="owner/small", verifier_device="cuda:0", drafter_device="cuda:1", dtype="bfloat16"
    )
    plan = commands(options, monkeypatch)
    verifier = load_settings(VerifierSettings, arguments(plan.verifiers()[0]))
    drafter = load_settings(DrafterSettings, arguments(plan.drafters()[0]))
    assert (verifier.device, verifier.dtype, verifier.cpu_affinity) == ("cuda:0", "bfloat16", ())
    assert (drafter.device, drafter.dtype, drafter.cpu_affinity) == ("cuda:1", "bfloat16", ())


def test_ngram_needs_no_model_and_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = commands(FleetOptions(method="ngram"), monkeypatch)
    drafter = load_settings(DrafterSettings, arguments(plan.drafters()[0]))
    assert (drafter.method, drafter.model, drafter.cpu_affinity) == (("ngram",), "", ())
    assert drafter.model_name == "smollm2-135m-instruct"
    verifier = load_settings(VerifierSettings, arguments(plan.verifiers()[0]))
    assert verifier.cpu_affinity == (0, 1)


def test_a_fallback_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = commands(FleetOptions(method="ngram,draft_model"), monkeypatch)
    drafter = load_settings(DrafterSettings, arguments(plan.drafters()[0]))
    assert drafter.method == ("ngram", "draft_model")


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_every_method_can_be_asked_for(method: str, tmp_path: Path) -> None:
    trained = method in {*HEAD_METHODS, "layerskip"}
    FleetOptions(method=method, head=str(tmp_path) if trained else "").check()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (FleetOptions(verifiers=0), "verifiers"),
        (FleetOptions(drafters=-1), "drafters"),
        (FleetOptions(method="eagel"), "method"),
        (FleetOptions(method=""), "method"),
        (FleetOptions(drafter_device="cuda"), "drafter_device"),
        (FleetOptions(port=8000), "http_port"),
    ],
)
def test_what_can_never_work_is_refused(options: FleetOptions, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        options.check()
    assert caught.value.field == field


def test_both_ports_may_be_free_ones() -> None:
    FleetOptions(port=0, http_port=0).check()


def test_the_devices_of_two_gpus_are_accepted() -> None:
    FleetOptions(drafter_model="owner/small", verifier_device="cuda:0", drafter_device="cuda:1").check()
    FleetOptions(drafter_device="cuda", method="ngram").check()
