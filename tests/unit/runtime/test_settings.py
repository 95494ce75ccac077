"""Settings: flags before environment before defaults, refusals by field, masked secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from paceline.errors import ConfigurationError
from paceline.runtime.settings import (
    ModelServiceSettings,
    ServiceSettings,
    describe,
    load_settings,
    settings_config,
    settings_table,
)


class Example(ModelServiceSettings):
    model_config = settings_config("example")

    model: str = "none"
    """What to load, in
    two lines."""
    fast: bool = True
    """Whether to hurry."""
    api_key: SecretStr = SecretStr("")
    """Who we are."""
    store: SecretStr = SecretStr("memory://")
    """Where to write."""
    archive: SecretStr = SecretStr("redis://me:hunter2@host")
    """Where to keep."""


def test_defaults() -> None:
    settings = load_settings(Example, [])
    assert (settings.host, settings.port, settings.cpu_affinity, settings.fast) == ("127.0.0.1", 0, (), True)


def test_flag_wins_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_EXAMPLE_PORT", "7001")
    monkeypatch.setenv("PACELINE_EXAMPLE_LOG_LEVEL", "debug")
    monkeypatch.setenv("PACELINE_OTHER_HOST", "elsewhere")
    settings = load_settings(Example, ["--port", "7002"])
    assert (settings.port, settings.log_level, settings.host) == (7002, "debug", "127.0.0.1")


@pytest.mark.parametrize("value", ["0,1", "[0,1]", " 0, 1 "])
def test_cores_as_flag_and_environment(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(Example, ["--cpu-affinity", value]).cpu_affinity == (0, 1)
    monkeypatch.setenv("PACELINE_EXAMPLE_CPU_AFFINITY", value)
    assert load_settings(Example, []).cpu_affinity == (0, 1)


@pytest.mark.parametrize(("arguments", "fast"), [([], True), (["--fast"], True), (["--no-fast"], False)])
def test_boolean_flag(arguments: list[str], fast: bool) -> None:
    assert load_settings(Example, arguments).fast is fast


@pytest.mark.parametrize("field", ["metrics_port", "ready_file"])
def test_none_where_a_field_can_be_that(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = "--" + field.replace("_", "-")
    assert getattr(load_settings(Example, [given, "1"]), field) is not None
    assert getattr(load_settings(Example, [given, "none"]), field) is None
    monkeypatch.setenv(f"PACELINE_EXAMPLE_{field.upper()}", "none")
    assert getattr(load_settings(Example, []), field) is None
    assert load_settings(Example, ["--model", "none"]).model == "none"
    with pytest.raises(ConfigurationError, match="--port"):
        load_settings(Example, ["--port", "none"])


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--port", "70000"], "port"),
        (["--port", "x"], "port"),
        (["--num-threads", "0"], "num_threads"),
        (["--cpu-affinity", "-1"], "cpu_affinity"),
        (["--cpu-affinity", "a"], "cpu_affinity"),
        (["--dtype", "int3"], "dtype"),
        (["--drain-timeout-s", "-1"], "drain_timeout_s"),
        (["--tls-cert-file", "a.pem"], ""),
        (["--tls-client-ca-file", "a.pem"], ""),
    ],
)
def test_wrong_value_is_refused_by_field(arguments: list[str], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(Example, arguments)
    assert caught.value.field == field
    assert "--" + field.replace("_", "-") in caught.value.message
    assert "Value error" not in caught.value.message


def test_what_belongs_together_is_told_by_its_flags() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(Example, ["--tls-key-file", "a.pem"])
    assert caught.value.message == "--tls-cert-file and --tls-key-file belong together; give both or none"


def test_a_number_out_of_its_range_is_told_the_range() -> None:
    for given, flag, told in (
        (["--port", "70000"], "--port (PACELINE_EXAMPLE_PORT)", "is 70000: 0 to 65535"),
        (["--metrics-port", "-1"], "--metrics-port (PACELINE_EXAMPLE_METRICS_PORT)", "is -1: 0 to 65535"),
        (
            ["--num-threads", "0"],
            "--num-threads (PACELINE_EXAMPLE_NUM_THREADS)",
            "Input should be greater than or equal to 1",
        ),
    ):
        with pytest.raises(ConfigurationError) as caught:
            load_settings(Example, given)
        assert caught.value.message == f"{flag}: {told}"


def test_wrong_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_EXAMPLE_PORT", "many")
    with pytest.raises(ConfigurationError, match=r"^--port \(PACELINE_EXAMPLE_PORT\): "):
        load_settings(Example, [])


def test_unknown_flag_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(Example, ["--bogus", "1"])
    assert caught.value.message == "unrecognized arguments: --bogus 1; see --help"
    assert capsys.readouterr().err == ""


def test_help_names_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(Example, ["--help"])
    text = capsys.readouterr().out
    for name in Example.model_fields:
        assert f"--{name.replace('_', '-')}" in text


def test_description_has_every_field_and_no_secret() -> None:
    settings = load_settings(Example, ["--api-key", "hunter2"])
    described = describe(settings)
    assert set(described) == set(Example.model_fields)
    assert "hunter2" not in str(described)
    assert settings.api_key.get_secret_value() == "hunter2"


def test_table_has_flag_variable_default_and_meaning() -> None:
    table = settings_table(Example)
    assert "| `--model` | `PACELINE_EXAMPLE_MODEL` | `none` | What to load, in two lines. |" in table
    assert "| `--fast` | `PACELINE_EXAMPLE_FAST` | `True` | Whether to hurry. |" in table


def test_table_shows_a_secret_default_only_where_it_holds_no_credentials() -> None:
    table = settings_table(Example)
    assert "| `--api-key` | `PACELINE_EXAMPLE_API_KEY` | `none` | Who we are. |" in table
    assert "| `--store` | `PACELINE_EXAMPLE_STORE` | `memory://` | Where to write. |" in table
    assert "| `--archive` | `PACELINE_EXAMPLE_ARCHIVE` | `**********` | Where to keep. |" in table
    assert "hunter2" not in table


@pytest.mark.parametrize("settings_class", [ServiceSettings, ModelServiceSettings])
def test_every_field_says_what_it_is(settings_class: type[ServiceSettings]) -> None:
    undescribed = [name for name, field in settings_class.model_fields.items() if not field.description]
    assert undescribed == []


def test_settings_are_frozen() -> None:
    settings = load_settings(Example, ["--ready-file", "x.json"])
    assert settings.ready_file == Path("x.json")
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 3


def test_cores_that_do_not_exist_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        monkeypatch.setenv(variable, "")
    with pytest.raises(ConfigurationError) as caught:
        load_settings(Example, ["--cpu-affinity", "4095"]).apply_to_process()
    assert caught.value.field == "cpu_affinity"
