"""Run by the gateway's init container, in the verifier's image: fetches and converts a model into the shared cache."""

import sys

from paceline.model_source import resolve

print(resolve(sys.argv[1], weights=False, progress=lambda line: print(line, flush=True)), flush=True)  # noqa: T201
