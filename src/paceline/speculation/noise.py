"""Keyed Gumbel noise: a pure function of (seed, absolute position, token id).

Sampling from a softmax is taking the argmax of logits plus independent standard Gumbel noise. Here the noise of a token
is not drawn but computed, so plain decoding, every block shape, every batch, every replica and the drafter see the same
random stream, and a session that moves goes on with it.

How a noise value is made::

    key(seed, position, stream) = mix(mix(seed ^ salt(stream)) + (position + 1) * GAMMA)     64 bits, wrapping
    hash(key, id)               = mix(key + (id + 1) * GAMMA)
    uniform                     = (top 52 bits of hash + 1/2) / 2**52                  float64, exact, never 0 nor 1
    gumbel                      = -log(-log1p(-uniform))

`mix` is the 64-bit finaliser of SplitMix64 (Steele, Lea, Flood 2014; constants by Stafford), so the stream of one key
is SplitMix64 seeded with that key: a generator that passes BigCrush. Keys are themselves mixed twice, so neighbouring
seeds and positions start at unrelated points of its 2**64 cycle. All of that is integer arithmetic with wrap-around
(torch int64), the same bits on every device; only the two logarithms, in float64, may differ by an ulp between
libraries. The large noise values, the ones that win, come from small uniforms, where the float grid is finest; the
half keeps the uniform off 0 and the 52 bits keep it off 1.

This module does not know what a model, a tree or a request is.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache

import torch

_MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB

UNIFORM_BITS = 52
_UNIFORM_SCALE = 2.0**-UNIFORM_BITS

_COARSE_BITS = 31
"""Top bits of a hash that the last step of `mix` leaves alone."""
_LOG_COARSE_STEPS = _COARSE_BITS * 0.6931471805599453
_HALF_STEP = 2.0 ** (_COARSE_BITS - UNIFORM_BITS - 1)
"""The half of the uniform, in coarse steps."""

_NEAR = 1 / 8
"""Bounds below this part of the best one are not looked at; about nine are above it."""
_BOUND_SLACK = 1e-3
_CPU_CHUNK_ELEMENTS = 1 << 16
"""Fits the temporaries of a chunk into the L2 cache: one row of a usual vocabulary."""
_GPU_CHUNK_ELEMENTS = 1 << 24


class NoiseStream(IntEnum):
    """Independent streams under one seed: rule `match` shares SAMPLE with the drafter; `ratio` must never share."""

    SAMPLE = 0
    RATIO_DRAFT = 1
    RATIO_ACCEPT = 2
    RATIO_RESIDUAL = 3


_SALTS = {
    NoiseStream.SAMPLE: 0,
    NoiseStream.RATIO_DRAFT: 0xD1B54A32D192ED03,
    NoiseStream.RATIO_ACCEPT: 0x8CB92BA72F3D8DD7,
    NoiseStream.RATIO_RESIDUAL: 0xABC98388FB8FAC03,
}


def _signed(value: int) -> int:
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _mix_int(value: int) -> int:
    value &= _MASK64
    value = ((value ^ (value >> 30)) * _MULTIPLIER_1) & _MASK64
    value = ((value ^ (value >> 27)) * _MULTIPLIER_2) & _MASK64
    return value ^ (value >> 31)


def _stir_(values: torch.Tensor, shift: int) -> torch.Tensor:
    """Xors with `values >> shift` in place; torch shifts arithmetically, so the sign bits are masked away."""
    return values.bitwise_xor_((values >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def _mix_all_but_last_(values: torch.Tensor) -> torch.Tensor:
    """`mix` on int64 in place, without its last step, which changes the lower 33 bits only."""
    _stir_(values, 30).mul_(_signed(_MULTIPLIER_1))
    return _stir_(values, 27).mul_(_signed(_MULTIPLIER_2))


def _mix_(values: torch.Tensor) -> torch.Tensor:
    """`mix` on int64 in place."""
    return _stir_(_mix_all_but_last_(values), 31)


@lru_cache(maxsize=16)
def _id_offsets(vocab_size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device).mul_(_signed(_GAMMA))


def noise_key(seed: int, position: int, stream: NoiseStream = NoiseStream.SAMPLE) -> int:
    """Key of one row's noise, as a signed 64-bit integer.

    Args:
        seed: any integer; its lowest 64 bits in two's complement count.
        position: absolute index of the token being chosen, 0 or more.
        stream: which of the seed's independent streams.
    """
    return _signed(_mix_int(_mix_int(seed ^ _SALTS[stream]) + (position + 1) * _GAMMA))


def noise_keys(
    seeds: Sequence[int],
    positions: Sequence[int],
    *,
    stream: NoiseStream = NoiseStream.SAMPLE,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Keys of several rows; a batch may mix sessions. Returns int64 # [rows]."""
    keys = [noise_key(seed, position, stream) for seed, position in zip(seeds, positions, strict=True)]
    return torch.tensor(keys, dtype=torch.int64, device=device)


def _coarse_uniforms(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Lower bounds of all uniforms, nearly equal to them, in steps of 2**-31. # [rows, vocab_size] float32."""
    hashes = _mix_all_but_last_(keys.unsqueeze(1) + _id_offsets(vocab_size, keys.device))
    steps = hashes.bitwise_right_shift_(64 - _COARSE_BITS).bitwise_and_((1 << _COARSE_BITS) - 1)
    return steps.float().add_(_HALF_STEP)


def _top_bits_(hashes: torch.Tensor) -> torch.Tensor:
    return hashes.bitwise_right_shift_(64 - UNIFORM_BITS).bitwise_and_((1 << UNIFORM_BITS) - 1)


def uniform(
    keys: torch.Tensor,  # [rows] int64
    token_ids: torch.Tensor,  # [rows, k] or [k] int64
) -> torch.Tensor:
    """Uniform noise in (0, 1), float64, exact on every device. Returns # [rows, k]."""
    offsets = (token_ids + 1) * _signed(_GAMMA)
    return _top_bits_(_mix_(keys.unsqueeze(1) + offsets)).double().add_(0.5).mul_(_UNIFORM_SCALE)


def gumbel(
    keys: torch.Tensor,  # [rows] int64
    token_ids: torch.Tensor,  # [rows, k] or [k] int64
) -> torch.Tensor:
    """Standard Gumbel noise of the given tokens in each row, float64. Returns # [rows, k]."""
    return uniform(keys, token_ids).neg_().log1p_().neg_().log_().neg_()


def _argmax_lowest_id(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Id of the best score of each row, the lowest id among equals. Both # [rows, k]; returns # [rows]."""
    best = scores.amax(-1, keepdim=True)
    return token_ids.masked_fill(scores < best, torch.iinfo(torch.int64).max).amin(-1)


def keyed_argmax_of(
    logits: torch.Tensor,  # [rows, k] float32
    token_ids: torch.Tensor,  # [rows, k] int64
    keys: torch.Tensor,  # [rows] int64
) -> torch.Tensor:
    """Samples each row among the listed candidates only; -inf excludes one.

    Equals `keyed_argmax` on a full row in which every token that is not listed is -inf. Each row needs a finite logit.

    Returns:
        Chosen ids, int64 # [rows].
    """
    return _argmax_lowest_id(logits.double() + gumbel(keys, token_ids), token_ids)


def keyed_argmax(
    logits: torch.Tensor,  # [rows, vocab_size] float32
    keys: torch.Tensor,  # [rows] int64
    weights: torch.Tensor | None = None,  # [rows, vocab_size] float32
) -> torch.Tensor:
    """Samples each row from softmax(logits): the id with the largest logit + Gumbel noise, the lowest among equals.

    Logarithms are taken only where the noise can win. As -log1p(-u) >= u, the score of a token is at most
    logit - log(u); so exp(logit) / u, in float32, ranks upper bounds, and those near the best one are scored exactly.
    When a token that was left out could still have won, which is rare, the row is done in full.

    Args:
        logits: processed rows; -inf excludes a token, each row has a finite maximum and no NaN. Not changed.
        keys: one key per row, from `noise_keys`.
        weights: exp(logits - largest logit of the row), for callers that have them. Not changed.

    Returns:
        Chosen ids, int64 # [rows].
    """
    num_rows, vocab_size = logits.shape
    elements = _CPU_CHUNK_ELEMENTS if logits.device.type == "cpu" else _GPU_CHUNK_ELEMENTS
    chunk = max(1, elements // vocab_size)
    parts = []
    for start in range(0, num_rows, chunk):
        rows = slice(start, start + chunk)
        parts.append(_keyed_argmax_chunk(logits[rows], keys[rows], None if weights is None else weights[rows]))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=logits.device)


def _keyed_argmax_chunk(logits: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    vocab_size = logits.shape[1]
    best_logits = logits.amax(-1, keepdim=True)
    if weights is None:
        weights = (logits - best_logits).exp_()
    ranks = _coarse_uniforms(keys, vocab_size).reciprocal_().mul_(weights)
    near = ranks.amax(-1, keepdim=True) * _NEAR
    rows, token_ids = (ranks >= near).nonzero(as_tuple=True)
    scores = logits[rows, token_ids].double() + gumbel(keys[rows], token_ids.unsqueeze(1))[:, 0]
    best_scores = torch.full_like(keys, -torch.inf, dtype=torch.float64).scatter_reduce_(0, rows, scores, "amax")
    token_ids = token_ids.masked_fill(scores < best_scores[rows], vocab_size)
    chosen = torch.full_like(keys, vocab_size).scatter_reduce_(0, rows, token_ids, "amin")
    # Upper bound of every score that was left out; the slack covers float32 rounding.
    left_out = (near.double().log_() + best_logits.double())[:, 0] + (_LOG_COARSE_STEPS + _BOUND_SLACK)
    for row in (left_out >= best_scores).nonzero()[:, 0].tolist():
        chosen[row] = keyed_argmax_brute_force(logits[row : row + 1], keys[row : row + 1])[0]
    return chosen


def keyed_argmax_brute_force(
    logits: torch.Tensor,  # [rows, vocab_size] float32
    keys: torch.Tensor,  # [rows] int64
) -> torch.Tensor:
    """`keyed_argmax` by its definition, with noise on every token. Returns int64 # [rows]."""
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    return _argmax_lowest_id(logits.double() + gumbel(keys, token_ids), token_ids.expand_as(logits))
