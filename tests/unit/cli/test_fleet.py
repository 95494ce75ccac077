"""What a fleet checks before it starts anything."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli.fleet import Fleet
from paceline.cli.fleet_options import FleetOptions
from paceline.errors import ConfigurationError, InvalidArgument
from tests.fakes.fleet_observer import Told


@pytest.mark.parametrize(("field", "flag"), [("port", "--port"), ("http_port", "--http-port")])
async def test_a_taken_port_is_found_before_anything_is_prepared(field: str, flag: str) -> None:
    told = Told()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        fleet = Fleet(replace(FleetOptions(port=0, http_port=0), **{field: port}), told)
        with pytest.raises(InvalidArgument, match=f"{flag} {port} of 127.0.0.1 cannot be used") as caught:
            await fleet.start()
        await fleet.stop()
    assert caught.value.field == field
    assert told.changes.empty()


async def test_a_log_folder_has_one_fleet_at_a_time(tmp_path: Path) -> None:
    options = FleetOptions(port=0, http_port=0, log_dir=tmp_path / "logs")
    first, told = Fleet(options), Told()
    first._take_log_dir()
    log = options.log_dir / "gateway.log"
    log.write_text("what the first fleet says")
    second = Fleet(options, told)
    with pytest.raises(ConfigurationError, match="--log-dir") as caught:
        await second.start()
    await second.stop()
    assert caught.value.field == "log_dir"
    assert told.changes.empty()
    assert log.read_text() == "what the first fleet says"
    third = Fleet(options)
    with pytest.raises(ConfigurationError, match="--log-dir"):  # the refused one's end does not free it
        third._take_log_dir()
    await first.stop()
    third._take_log_dir()
    await third.stop()
