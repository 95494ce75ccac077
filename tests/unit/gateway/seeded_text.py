"""Texts that a target would write, and guesses of a drafter at them, from numbers alone: the same each time."""

from __future__ import annotations

from paceline.speculation.tree import DraftTree

NUM_LETTERS = 14
_MASK = (1 << 63) - 1
_OTHER_LUCK = 1 << 30


def _mixed(value: int) -> int:
    value = (value ^ (value >> 33)) * 0x7F51AFD7ED558CCD & _MASK
    value = (value ^ (value >> 33)) * 0x44CEB9FE1A85EC53 & _MASK
    return value ^ (value >> 33)


def token_at(text: int, position: int) -> int:
    """The only right token there."""
    return _mixed((text << 32) + position) % NUM_LETTERS


def guesses(text: int, position: int, acceptance: float) -> tuple[int, int]:
    """The likeliest token there, right with that probability, and the next likely: right in half of the other cases."""
    token = token_at(text, position)
    place = (text << 32) + position
    if _mixed(place + (1 << 31)) < acceptance * _MASK:
        return token, (token + 2) % NUM_LETTERS
    wrong = (token + 1) % NUM_LETTERS
    return wrong, token if _mixed(place + _OTHER_LUCK) < _MASK / 2 else (token + 2) % NUM_LETTERS


def block(text: int, start: int, depth: int, acceptance: float, branches: bool) -> DraftTree:
    """A chain of the likeliest tokens; if it branches, with the next likely ones beside them."""
    pairs = [guesses(text, start + place, acceptance) for place in range(depth)]
    if not branches:
        return DraftTree.chain([first for first, _ in pairs])
    parents = [max(2 * place - 1, 0) for place in range(depth) for _ in range(2)]
    return DraftTree(tuple(token for pair in pairs for token in pair), tuple(parents))


def judged(text: int, start: int, tree: DraftTree) -> tuple[int, ...]:
    """The nodes of a block that are right."""
    children, path = tree.children(), [0]
    while (node := children[path[-1]].get(token_at(text, start + len(path) - 1))) is not None:
        path.append(node)
    return tuple(path[1:])
