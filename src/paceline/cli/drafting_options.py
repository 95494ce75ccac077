"""How a fleet drafts: which methods go together, where they run, and which options belong to them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from paceline.drafting.tree_shape import MAX_NODES
from paceline.errors import InvalidArgument
from paceline.head_source import EXAMPLES_DIR, is_head_reference
from paceline.method_names import CUT_METHODS, HEAD_METHODS, METHOD_NAMES, SELF_DRAFT_METHODS
from paceline.model_source import BUILT_IN

if TYPE_CHECKING:
    from paceline.cli.fleet_options import FleetOptions


class Placement(Enum):
    """Where drafts are made. The tokens are the same."""

    AUTO = "auto"
    """In the verifier for medusa, eagle, eagle3 and layerskip; in drafters for all else."""
    VERIFIER = "verifier"
    """The verifiers draft by themselves: the next block comes with the verdict, and there is no drafter."""
    POOL = "pool"
    """In drafters of their own."""


_TRAINED = (*HEAD_METHODS, *CUT_METHODS)
_TREES = HEAD_METHODS
_EAGLE = ("eagle", "eagle3")


def placement_of(methods: Sequence[str], asked: Placement) -> Placement:
    """Where methods are placed: VERIFIER or POOL.

    Args:
        methods: in order of preference.
        asked: the option.
    """
    if asked is not Placement.AUTO:
        return asked
    alone = len(methods) == 1 and methods[0] in _TRAINED
    return Placement.VERIFIER if alone else Placement.POOL


def check_drafting(options: FleetOptions, checkpoint: str) -> None:
    """Refuses what cannot draft.

    Args:
        options: of the fleet.
        checkpoint: of the method, named or found; empty for none.

    Raises:
        InvalidArgument: names the option and what is allowed.
    """
    methods = options.methods
    unknown = [name for name in methods if name not in METHOD_NAMES]
    if unknown or not methods:
        raise InvalidArgument(
            f"--method {options.method!r}: one of {', '.join(METHOD_NAMES)}, or a comma-separated chain of them such "
            "as ngram,draft_model",
            field="method",
        )
    if placement_of(methods, options.placement) is Placement.VERIFIER:
        _check_inside(options)
    else:
        _check_pool(options)
    _check_belongings(options)
    if set(methods) & set(HEAD_METHODS):
        _check_head(options, checkpoint)
    elif "layerskip" in methods and not checkpoint and options.exit_layer is None and options.model in BUILT_IN:
        raise InvalidArgument(
            f"--method layerskip needs a target that was trained for early exits: name it or its adapter with --head "
            f"(`paceline train layerskip` makes one; there is no example in {_examples()}), or say after how many "
            f"layers {options.model} itself drafts with --exit-layer, which is lossless and slow",
            field="head",
        )


def _check_inside(options: FleetOptions) -> None:
    allowed = f"one of {', '.join(SELF_DRAFT_METHODS)}"
    if len(options.methods) > 1:
        raise InvalidArgument(
            f"--placement verifier: a verifier drafts with one method, not with {options.method!r}; name {allowed}, or "
            "leave the chain to drafters with --placement pool",
            field="placement",
        )
    if options.methods[0] not in SELF_DRAFT_METHODS:
        raise InvalidArgument(
            f"--placement verifier: a verifier does not draft with {options.method}, only with {allowed}; say "
            "--placement pool",
            field="placement",
        )


def _check_pool(options: FleetOptions) -> None:
    with_model = [name for name in options.methods if name != "ngram"]
    if len(with_model) > 1:
        raise InvalidArgument(
            f"--method {options.method!r}: a drafter runs one model or head, which may have ngram before it: say "
            f"ngram,{with_model[0]}",
            field="method",
        )


def _check_belongings(options: FleetOptions) -> None:
    """Refuses options that the methods would not see."""
    given = (
        ("head", options.head, _TRAINED, None),
        ("eagle_topk", options.eagle_topk, _EAGLE, None),
        ("num_draft_tokens", options.num_draft_tokens, _TREES, MAX_NODES),
        ("exit_layer", options.exit_layer, CUT_METHODS, None),
    )
    for field, value, methods, most in given:
        flag = "--" + field.replace("_", "-")
        if value not in (None, "") and not set(methods) & set(options.methods):
            raise InvalidArgument(
                f"{flag} is for the methods {', '.join(methods)}, not for {options.method!r}: leave it out, or choose "
                "another --method",
                field=field,
            )
        if isinstance(value, int) and not 1 <= value <= (most or value):
            allowed = "at least 1" if most is None else f"1 to {most}"
            raise InvalidArgument(f"{flag} is {value}: {allowed}", field=field)


def _check_head(options: FleetOptions, checkpoint: str) -> None:
    if not checkpoint:
        method = next(name for name in options.methods if name in HEAD_METHODS)
        raise InvalidArgument(
            f"--method {options.method!r} needs a head that was trained for {options.model}: name its folder or hub id "
            f"with --head. There is no example for it in {_examples()}; `paceline train {method}` makes one",
            field="head",
        )
    if not is_head_reference(checkpoint):
        raise InvalidArgument(
            f"--head {options.head}: there is no such folder, and it is no hub id; name the folder that `paceline "
            "train` wrote, or owner/name",
            field="head",
        )


def _examples() -> str:
    """Where examples are looked for."""
    return str(EXAMPLES_DIR) if EXAMPLES_DIR.is_dir() else "models/, which only a checkout of the repository has"
