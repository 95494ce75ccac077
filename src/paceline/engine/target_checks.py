"""What the target engine refuses before it touches a session: models it cannot serve, commands that never can be.

The engine's other refusals depend on what is open at the moment: session slots, pages, and what it knows of a session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engine.runner import RunnerInfo
from paceline.engine.runner_options import Quantization
from paceline.errors import CapacityExceeded, ConfigurationError, InvalidArgument
from paceline.messages import AcceptanceRule, Open, Verify


def check_target(info: RunnerInfo, max_batch_tokens: int, max_draft_tokens: int) -> None:
    """Checks a model and the limits it is to be served with.

    Args:
        info: facts about the model.
        max_batch_tokens: tokens fed in one pass.
        max_draft_tokens: draft tokens of one block.

    Raises:
        ConfigurationError: the weights are quantised, or a block would not fit in a pass.
    """
    if info.quantization != Quantization.NONE.value:
        raise ConfigurationError(
            f"a target with weights quantised to {info.quantization} would write other tokens than its own: "
            "quantise draft models only",
            field="quantization",
        )
    if max_batch_tokens <= max_draft_tokens:
        raise ConfigurationError(
            f"max_batch_tokens ({max_batch_tokens}) must exceed max_draft_tokens ({max_draft_tokens}), so that a block "
            "fits in a pass",
            field="max_batch_tokens",
        )


@dataclass(frozen=True, slots=True)
class CommandChecks:
    """The limits that commands are held against.

    Attributes:
        vocab_size: token ids are in [0, vocab_size).
        max_model_len: most tokens of a session.
        capacity_tokens: rows that the pool holds for all sessions.
    """

    vocab_size: int
    max_model_len: int
    capacity_tokens: int

    def check_open(self, command: Open) -> None:
        """Checks a prompt.

        Raises:
            InvalidArgument: it is empty or too long, or has an id that is no token.
        """
        if not command.tokens:
            raise InvalidArgument("the prompt is empty: give at least one token", field="prompt")
        if len(command.tokens) >= self.max_model_len:
            raise InvalidArgument(
                f"the prompt has {len(command.tokens)} tokens; the context of {self.max_model_len} leaves room for at "
                f"most {self.max_model_len - 1}",
                field="prompt",
            )
        self._check_ids(command.tokens, "prompt")

    def check_verify(self, command: Verify, rule: AcceptanceRule) -> None:
        """Checks a block and the tokens that come with it.

        Under `match` any block will do: what is no token is cut, and what drafts were drawn from is ignored. Under
        `ratio` a block is a chain of tokens, each with the distribution it was drawn from or none of them.

        Raises:
            InvalidArgument: it cannot be judged.
            CapacityExceeded: the session has outgrown the whole pool.
        """
        if not max(1, len(command.catch_up)) <= command.base_len < self.max_model_len:
            raise InvalidArgument(
                f"base_len {command.base_len} must be at least the length of catch_up ({len(command.catch_up)}) and "
                f"below the context of {self.max_model_len} tokens",
                field="base_len",
            )
        if command.base_len > self.capacity_tokens:
            raise CapacityExceeded(
                f"the session has {command.base_len} tokens and all pages of the KV pool hold {self.capacity_tokens}"
            )
        self._check_ids(command.catch_up, "catch_up")
        if rule is AcceptanceRule.RATIO:
            self._check_ratio_block(command)

    def _check_ratio_block(self, command: Verify) -> None:
        if not command.block.is_chain:
            raise InvalidArgument(
                "the rule ratio judges chains, and this block branches: send one path of it", field="block"
            )
        self._check_ids(command.block.tokens, "block")
        if command.draft_probs and len(command.draft_probs) != command.block.num_draft_tokens:
            raise InvalidArgument(
                f"{len(command.draft_probs)} draft_probs came with {command.block.num_draft_tokens} drafts: send one "
                "for each draft, or none if they were chosen without chance",
                field="draft_probs",
            )

    def _check_ids(self, tokens: Sequence[int], field: str) -> None:
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.vocab_size):
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise InvalidArgument(f"token id {wrong} is outside [0, {self.vocab_size})", field=field)
