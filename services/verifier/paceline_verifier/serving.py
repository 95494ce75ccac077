"""Which hidden states a verifier keeps: for its own drafting, and to serve to drafters."""

from __future__ import annotations

from pathlib import Path

from paceline.engine.feature_bytes import feature_dtype, feature_format
from paceline.engine.features import FeatureTaps
from paceline.engine.runner import ModelRunner
from paceline.engine.served_features import ServedFeatures
from paceline.errors import ConfigurationError
from paceline.head_source import is_head_reference, resolve_head
from paceline.messages import FeatureDtype


def served_taps(served: str, target_folder: Path) -> FeatureTaps | None:
    """The features that drafters want; None for none.

    Args:
        served: the setting `served_features`.
        target_folder: of the target.

    Raises:
        ConfigurationError, NotFound, Unavailable: there is no such head, or it cannot be fetched.
        ConfigurationError, ModelError: it cannot be loaded, or was made for another target.
    """
    if served == "none":
        return None
    if served == "final_norm":
        return FeatureTaps()
    from paceline.drafting.checkpoints.eagle import load_eagle
    from paceline.drafting.checkpoints.target_facts import read_target_facts
    from paceline.drafting.eagle import make_taps

    if not is_head_reference(served):
        raise ConfigurationError(
            f"served_features is {served!r}: set it to none, to final_norm, or to the folder or hub id of the eagle3 "
            "head that drafters have",
            field="served_features",
        )
    folder = resolve_head(served, field="served_features")
    return make_taps(load_eagle(folder, read_target_facts(target_folder)))


def joint_taps(own: FeatureTaps | None, served: FeatureTaps | None) -> FeatureTaps | None:
    """What the target has to keep.

    Args:
        own: for what the verifier drafts with.
        served: for drafters.

    Raises:
        ConfigurationError: they are not the same.
    """
    if own is None or served is None:
        return own or served
    if own.kind != served.kind:
        raise ConfigurationError(
            f"this verifier drafts from {own.kind!r} and is to serve {served.kind!r}, but keeps one of them: set "
            "self_draft_method or served_features to none",
            field="served_features",
        )
    return own


def serve(runner: ModelRunner, taps: FeatureTaps | None, dtype: str) -> ServedFeatures:
    """What goes to drafters of a target that is loaded.

    Args:
        runner: the target.
        taps: what it keeps.
        dtype: the setting `feature_dtype`.
    """
    rows = runner.features(runner.new_sequence()).read(0, 0)
    name = feature_dtype(rows.dtype) if dtype == "auto" else FeatureDtype(dtype)
    return ServedFeatures(runner, feature_format(taps or FeatureTaps(), rows.shape[1], name))
