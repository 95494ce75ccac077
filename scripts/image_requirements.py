"""Prints what a service needs from other people, one requirement a line, for the dependency layer of its image.

    python scripts/image_requirements.py verifier
    python scripts/image_requirements.py drafter onnx

The packages of this repository are left out: they change with every commit, and an image installs them in a layer of
their own. Uses the standard library only, since it runs before anything is installed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LIBRARY = re.compile(r"paceline(?:\[(?P<extras>[\w,-]+)\])?")


def requirements(service: str, extras: Iterable[str] = ()) -> list[str]:
    """Third-party requirements of a service, without duplicates.

    Args:
        service: folder in `services/`.
        extras: further extras of the library, such as "onnx".

    Raises:
        KeyError: the library has no such extra.
    """
    library = _project(ROOT / "pyproject.toml")
    found = list(library["dependencies"])
    wanted = list(extras)
    for requirement in _project(ROOT / "services" / service / "pyproject.toml")["dependencies"]:
        own = _LIBRARY.fullmatch(requirement)
        if own is None:
            found.append(requirement)
        elif own["extras"]:
            wanted += own["extras"].split(",")
    for extra in wanted:
        found += library["optional-dependencies"][extra]
    return list(dict.fromkeys(found))


def _project(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        project: dict[str, Any] = tomllib.load(file)["project"]
    return project


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1], sys.argv[2:])))
