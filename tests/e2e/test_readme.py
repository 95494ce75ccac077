"""What the README shows is run as it stands, against a fleet like the one that it tells to start.

So are the examples of docs/http_api.md, and the curl lines of docs/kubernetes.md, whose other commands
tests/chart/test_docs.py runs.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli.fleet_options import DEFAULT_HTTP_PORT, DEFAULT_MODEL, DEFAULT_PORT
from tests.e2e.launcher import Launcher, Up
from tests.fakes.tiny_models import SERVED, write_model

ROOT = Path(__file__).parents[2]
README, HTTP_API, KUBERNETES = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/http_api.md", "docs/kubernetes.md")
)
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CURL = re.compile(r"^curl .*$", re.MULTILINE)

EXAMPLES = [[sys.executable, "-c", str(snippet)] for snippet in _PYTHON.findall(README + HTTP_API)]
_UNBROKEN = (README + HTTP_API + KUBERNETES).replace("\\\n", " ")
EXAMPLES += [shlex.split(line, comments=True) for line in _CURL.findall(_UNBROKEN)]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A quick model under the name of the default one."""
    folder = tmp_path_factory.mktemp("readme")
    launcher = Launcher(folder)
    yield launcher.up(write_model(folder / DEFAULT_MODEL, SERVED["llama"]), "--method=ngram")
    launcher.close()


def here(text: str, up: Up) -> str:
    """The text with this fleet's ports in place of the usual ones."""
    for usual, taken in ((DEFAULT_PORT, up.gateway), (DEFAULT_HTTP_PORT, up.http)):
        text = re.sub(rf"(localhost|127\.0\.0\.1):{usual}\b", taken.removeprefix("http://"), text)
    return text


@pytest.mark.parametrize("command", EXAMPLES, ids=lambda command: Path(command[0]).name)
def test_an_example_runs(up: Up, command: list[str]) -> None:
    done = subprocess.run([here(word, up) for word in command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
    assert '"error"' not in done.stdout


def test_the_examples_are_found() -> None:
    assert any("AsyncClient" in word for command in EXAMPLES for word in command)
    assert any("import OpenAI" in word for command in EXAMPLES for word in command)
    assert any(command[0] == "curl" for command in EXAMPLES)
