"""The rollback rule of drafters that keep key/value rows. Pure Python.

| interval | tokens | owner |
|---|---|---|
| [0, rows) | fed earlier and still the context's own | kept |
| [rows, len(context)) | never fed, or fed as something else | fed by the next pass; at least one |
| [len(context), ...) | drafts | fed one by one, dropped when the target disagrees |

Row t holds the keys and values of token t. After drafting n tokens the rows end one short of the last draft, because it
was never fed: with full acceptance the next draft feeds two tokens, the last draft and the target's extra token.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.token_log import common_prefix_len


def rows_to_keep(fed: Sequence[int], context: Sequence[int]) -> int:
    """Rows that stay valid for a new context; the tokens of [result, len(context)) are to be fed.

    Args:
        fed: tokens whose rows are held, one per row.
        context: tokens to draft after, at least one.

    Returns:
        min(len(fed), common prefix, len(context) - 1): the last token is always fed again, since the logits after it
        are needed.
    """
    return min(common_prefix_len(fed, context), len(context) - 1)
