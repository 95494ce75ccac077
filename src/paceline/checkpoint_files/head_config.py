"""A checkpoint's config.json: options are asked for by name, and what stands where nobody reads it is refused."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import ConfigurationError, ModelError

_NO_BLOCKS: frozenset[str] = frozenset()
_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Options of a checkpoint, or of one block of them.

    Attributes:
        path: the file.
        values: what it says.
        block: name of the block within the file; empty for the whole.
    """

    path: Path
    values: Mapping[str, Any] = field(repr=False)
    block: str = ""

    @classmethod
    def read(cls, path: Path) -> HeadConfig:
        """Reads a file.

        Raises:
            ModelError: it is not there or not an object of JSON.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ModelError(
                f"{path.parent} has no {path.name}: give the folder that the head was saved in", field="draft_model"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path} is not JSON ({error}): copy it again", field="draft_model") from error
        except OSError as error:
            raise ModelError(f"{path} cannot be read ({error}): copy it again", field="draft_model") from error
        if not isinstance(values, dict):
            raise ModelError(f"{path} is not an object of JSON: copy it again", field="draft_model")
        return cls(path, values)

    def has(self, name: str) -> bool:
        """Whether an option is given; null is as good as absent."""
        return self.values.get(name) is not None

    def integer(self, name: str) -> int | None:
        """A whole number above 0, of 31 bits; None if it is absent."""
        value = self.values.get(name)
        if value is not None and not (type(value) is int and 1 <= value <= _MOST):
            raise self.wrong(name, f"is {value!r}: a whole number above 0 is needed, below 2**31")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        """Whole numbers from 0 on; None if they are absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise self.wrong(name, f"is {value!r}: a list of whole numbers is needed")
        return tuple(value)

    def number(self, name: str) -> float | None:
        """A finite number above 0; None if it is absent."""
        value = self.values.get(name)
        if value is not None and not is_positive(value):
            raise self.wrong(name, f"is {value!r}: a finite number above 0 is needed")
        return None if value is None else float(value)

    def items(self, name: str) -> list[Any]:
        """A list of anything; empty if it is absent."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, list):
            raise self.wrong(name, f"is {value!r}: a list is needed")
        return value or []

    def flag(self, name: str) -> bool | None:
        """A truth value; None if it is absent."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, f"is {value!r}: true or false is needed")
        return value

    def text(self, name: str) -> str | None:
        """A string; None if it is absent."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, f"is {value!r}: a string is needed")
        return value

    def inner(self, name: str) -> HeadConfig | None:
        """A block of options; None if it is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "must be a block of options")
        return HeadConfig(self.path, value, f"{self.block}.{name}" if self.block else name)

    def wrong(self, name: str, what: str) -> ConfigurationError:
        """The error for an option that cannot be."""
        place = f"{name} in {self.block}" if self.block else name
        return ConfigurationError(f"{self.path}: {place} {what}", field=name)

    def refuse_nested(self, options: Collection[str], *, read_in: Collection[str] = _NO_BLOCKS) -> None:
        """Refuses options in blocks that nobody reads: a head would load without them and draft badly.

        Args:
            options: names that have a meaning at the top of this block.
            read_in: blocks that are read, so that options may stand there.

        Raises:
            ConfigurationError: names the option and where it stands.
        """
        for name, value in self.values.items():
            if name in read_in:
                continue
            for place, option in _nested(name, value):
                if option in options:
                    raise ConfigurationError(
                        f"{self.path}: the option {option} is nested in {place}, where it would be overlooked and the "
                        f"head draft badly: move it to the top of {self.block or 'the file'}",
                        field=option,
                    )


def is_positive(value: object) -> bool:
    """Whether a value out of JSON is a finite number above 0 that fits into a float."""
    return type(value) in {int, float} and 0 < value < math.inf and value <= sys.float_info.max  # type: ignore[operator]


def _nested(place: str, value: Any) -> Iterator[tuple[str, str]]:
    """Names of all options within a value, each with the block that it stands in."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield place, name
            yield from _nested(f"{place}.{name}", inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _nested(f"{place}[{index}]", inner)
