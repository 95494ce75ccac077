"""What verifiers and drafters of a fleet are told about drafting.

| placement | verifier | drafter |
|---|---|---|
| in the verifier | the method, its checkpoint, the shape of its drafts | there is none |
| in drafters, with a head | which hidden states to serve | target, head, the shape of its drafts |
| in drafters, with the target's first layers | nothing | the target, the exit layer |
| in drafters, with a draft model | nothing | the draft model |
"""

from __future__ import annotations

from paceline.cli.fleet_options import FleetOptions
from paceline.cli.prepare import Prepared

_FINAL_NORM = ("medusa", "eagle")
"""Methods whose features the verifier can serve without the head."""


def verifier_drafting(options: FleetOptions, prepared: Prepared) -> dict[str, str]:
    """Flags of a verifier."""
    flags = _largest_block(options)
    if method := options.self_draft_method:
        flags["self-draft-method"] = method
        if prepared.head_dir:
            flags["self-draft-model"] = prepared.head_dir
        return flags | _exit_layer(options) | _shape(options, method, nodes="num-draft-tokens")
    if prepared.head_dir and options.num_drafters:
        on_final_norm = set(options.methods) & set(_FINAL_NORM)
        flags["served-features"] = "final_norm" if on_final_norm else prepared.head_dir
    return flags


def drafter_drafting(options: FleetOptions, prepared: Prepared) -> dict[str, str]:
    """Flags of a drafter that runs a model."""
    if options.needs_draft_model:
        return {"model": prepared.drafter_dir}
    flags = {"model": prepared.target_dir, **_exit_layer(options), **_largest_block(options)}
    if prepared.head_dir:
        flags["draft-head"] = prepared.head_dir
    for method in options.methods:
        flags |= _shape(options, method, nodes="max-draft-tokens")
    return flags


def _exit_layer(options: FleetOptions) -> dict[str, str]:
    return {} if options.exit_layer is None else {"exit-layer": str(options.exit_layer)}


def _largest_block(options: FleetOptions) -> dict[str, str]:
    """Trees are proposed and judged as large as asked for; chains as long as the block size."""
    if options.num_draft_tokens is None:
        return {}
    return {"max-draft-tokens": str(max(options.num_draft_tokens, options.num_speculative_tokens))}


def _shape(options: FleetOptions, method: str, *, nodes: str) -> dict[str, str]:
    """How drafts of a head grow: `nodes` is the flag for the most nodes of an EAGLE tree."""
    flags = {}
    if method in {"eagle", "eagle3"}:
        if options.eagle_topk is not None:
            flags["eagle-topk"] = str(options.eagle_topk)
        if options.num_draft_tokens is not None:
            flags[nodes] = str(options.num_draft_tokens)
    elif method == "medusa" and options.num_draft_tokens is not None:
        flags["medusa-tree"] = f"derived:{options.num_draft_tokens}"
    return flags
