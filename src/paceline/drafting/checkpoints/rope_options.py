"""Rotary settings out of a configuration, in the one form that `transformers` has for them now."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.checkpoint_files.head_config import HeadConfig, is_positive

DEFAULT_THETA = 10000.0
"""What the formats mean where nothing is said."""

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Kinds whose angles depend on nothing but the position, and what each needs."""

_OPTIONAL = (
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
)


def read_rope(config: HeadConfig) -> Mapping[str, object]:
    """Rotary settings: `rope_type`, `rope_theta` and what the type needs.

    They stand in `rope_parameters`, or, in older files, as `rope_theta` beside a `rope_scaling`.

    Raises:
        ConfigurationError: they contradict each other, are incomplete, or of a kind that is not supported.
    """
    theta, scaling, parameters = (
        config.number("rope_theta"),
        config.inner("rope_scaling"),
        config.inner("rope_parameters"),
    )
    found: dict[str, object] = {}
    for block in (scaling, parameters):
        if block is None:
            continue
        kind = block.text("rope_type") or block.text("type")
        values = {name: value for name, value in block.values.items() if value is not None and name != "type"}
        if kind:
            values["rope_type"] = kind
        for name, value in values.items():
            if found.setdefault(name, value) != value:
                raise config.wrong(
                    name, f"differs between rope_scaling ({found[name]!r}) and rope_parameters ({value!r})"
                )
    if theta is not None and found.setdefault("rope_theta", theta) != theta:
        raise config.wrong("rope_theta", f"is {theta:g} and in the block of rotary settings {found['rope_theta']!r}")
    found.setdefault("rope_theta", DEFAULT_THETA)
    found.setdefault("rope_type", "default")
    _check(config, found)
    return found


def _check(config: HeadConfig, found: Mapping[str, object]) -> None:
    kind = str(found["rope_type"])
    if kind not in _NEEDED:
        raise config.wrong("rope_type", f"is {kind!r}: a head can have {', '.join(_NEEDED)}")
    numbers = ("rope_theta", *_NEEDED[kind], *(name for name in _OPTIONAL if name in found))
    bad = [name for name in numbers if not is_positive(found.get(name))]
    if bad:
        raise config.wrong(
            bad[0], f"must be a number above 0 for rotary settings of type {kind}; it is {found.get(bad[0])!r}"
        )
    partial = found.get("partial_rotary_factor", config.values.get("partial_rotary_factor"))
    if partial not in {None, 1}:
        raise config.wrong("partial_rotary_factor", f"is {partial!r}: heads that rotate only a part are not supported")
