"""`paceline quantize`: makes the quantised copy and prints its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline import quantize as library
from paceline.cli.console import err, out, to_json
from paceline.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Quantized:
    """What was made, or found from an earlier run."""

    model: str
    bits: str
    folder: Path
    weights_bytes: int


def run_quantize(model: str, bits: str, out_dir: Path | None, *, json_output: bool) -> None:
    """Makes the copy; progress goes to standard error, the folder to standard output."""
    width = parse_bits(bits)
    folder = library.quantize(model, out_dir, width, progress=_show_progress)
    provenance = library.read_provenance(folder)
    made = Quantized(model, width.value, folder, provenance.weights_bytes if provenance else 0)
    if json_output:
        out().print(to_json(made), markup=False)
    else:
        out().print(str(folder), markup=False)


def parse_bits(bits: str) -> library.Bits:
    """The width that an option names.

    Raises:
        InvalidArgument: it is none of them.
    """
    try:
        return library.Bits(bits)
    except ValueError:
        raise InvalidArgument(f"bits {bits!r}: int8 or int4", field="bits") from None


def _show_progress(line: str) -> None:
    err().print(line, markup=False, style="dim")
