"""Fields that clients of OpenAI and vLLM know and this server does not support yet.

Each has values that ask for nothing, which are accepted; any other value is refused by name, since a request whose
option is ignored gets an answer to another question. null always asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline.errors import InvalidArgument

NoOps = Mapping[str, tuple[Any, ...]]
"""For each field, the values besides null that ask for nothing."""

_SHARED: Final[NoOps] = {
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "echo": (False,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "metadata": ({},),
    "priority": (0,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

COMPLETION_NO_OPS: Final[NoOps] = {**_SHARED, "prompt_embeds": (), "suffix": ("",)}

CHAT_NO_OPS: Final[NoOps] = {
    **_SHARED,
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "safety_identifier": (),
    "store": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}

STREAM_NO_OPS: Final[NoOps] = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}

MESSAGE_NO_OPS: Final[NoOps] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "reasoning": (),
    "reasoning_content": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
"""What the official client writes into a message of its own answer, which users send back as it is."""


def without_no_ops(fields: Mapping[str, Any], no_ops: NoOps, where: str = "") -> dict[str, Any]:
    """The fields less those that ask for nothing.

    Args:
        fields: a JSON object.
        no_ops: unsupported fields.
        where: path of the object, as a prefix of its fields' names.

    Raises:
        InvalidArgument: an unsupported field asks for something; names it.
    """
    for name in fields.keys() & no_ops.keys():
        value = fields[name]
        # True == 1 in Python and not in JSON.
        if value is not None and not any(type(value) is type(no_op) and value == no_op for no_op in no_ops[name]):
            raise InvalidArgument(f"{where}{name} is not supported yet; leave it out", field=f"{where}{name}")
    return {name: value for name, value in fields.items() if name not in no_ops}


def no_op_schema(no_ops: NoOps) -> dict[str, Any]:
    """JSON schema of the unsupported fields: only what asks for nothing."""
    return {
        name: {"enum": [None, *values], "description": "Not supported yet: only values that ask for nothing."}
        for name, values in sorted(no_ops.items())
    }
