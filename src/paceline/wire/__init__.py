"""Protobuf to dataclasses and back; the only place below the doors that knows `paceline.v1`.

Every function comes as a pair: `x_to_pb` and `x_from_pb`. What arrives from a peer is untrusted: the `_from_pb` of a
command raises `InvalidArgument` that names the field and the limit. Limits that depend on the model (vocabulary,
context, block size) are the engine's to judge; whether sampling parameters make sense is `paceline.text.validation`'s.

    parts.py      the values inside messages
    commands.py   gateway -> replica
    events.py     replica -> gateway
"""

from paceline.wire.commands import (
    MAX_SESSION_NAME_CHARS,
    CommandRef,
    command_ref,
    drafter_command_from_pb,
    drafter_command_to_pb,
    verifier_command_from_pb,
    verifier_command_to_pb,
)
from paceline.wire.events import (
    drafter_event_from_pb,
    drafter_event_to_pb,
    verifier_event_from_pb,
    verifier_event_to_pb,
)
from paceline.wire.parts import (
    MAX_BLOCK_NODES,
    MAX_DRAFT_PROBS,
    failure_from_pb,
    failure_to_pb,
    features_from_pb,
    features_to_pb,
    model_info_from_pb,
    model_info_to_pb,
    rule_from_pb,
    rule_to_pb,
    sampling_from_pb,
    sampling_to_pb,
    timing_from_pb,
    timing_to_pb,
    token_logprobs_from_pb,
    token_logprobs_to_pb,
    tree_from_pb,
    tree_to_pb,
    vocabulary_chunk_from_pb,
    vocabulary_chunk_to_pb,
)

__all__ = [
    "MAX_BLOCK_NODES",
    "MAX_DRAFT_PROBS",
    "MAX_SESSION_NAME_CHARS",
    "CommandRef",
    "command_ref",
    "drafter_command_from_pb",
    "drafter_command_to_pb",
    "drafter_event_from_pb",
    "drafter_event_to_pb",
    "failure_from_pb",
    "failure_to_pb",
    "features_from_pb",
    "features_to_pb",
    "model_info_from_pb",
    "model_info_to_pb",
    "rule_from_pb",
    "rule_to_pb",
    "sampling_from_pb",
    "sampling_to_pb",
    "timing_from_pb",
    "timing_to_pb",
    "token_logprobs_from_pb",
    "token_logprobs_to_pb",
    "tree_from_pb",
    "tree_to_pb",
    "verifier_command_from_pb",
    "verifier_command_to_pb",
    "verifier_event_from_pb",
    "verifier_event_to_pb",
    "vocabulary_chunk_from_pb",
    "vocabulary_chunk_to_pb",
]
