from __future__ import annotations

import pytest

from paceline.generation import token_origins
from paceline.messages import TokenOrigin
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree

CHAIN = DraftTree.chain([1, 2, 3])
TREE = DraftTree.from_paths([[1, 2], [1, 3], [4]])
A, R, B, P = TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED, TokenOrigin.BONUS, TokenOrigin.PLAIN


@pytest.mark.parametrize(
    ("block", "path", "origins"),
    [
        (EMPTY_BLOCK, (), (P,)),
        (CHAIN, (), (R,)),
        (CHAIN, (1,), (A, R)),
        (CHAIN, (1, 2, 3), (A, A, A, B)),
        (TREE, (1,), (A, R)),
        (TREE, (1, 3), (A, A, B)),
        (TREE, (4,), (A, B)),
    ],
)
def test_where_tokens_come_from(block: DraftTree, path: tuple[int, ...], origins: tuple[TokenOrigin, ...]) -> None:
    assert token_origins(block, path) == origins
