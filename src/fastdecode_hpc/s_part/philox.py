"""Random numbers of many rows at once: Philox4x64-10, bit by bit what `numpy.random.Philox` gives for each.

A generator for each row and step takes longer to make than the one number that is wanted of it. The algorithm: Salmon
et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

NUM_ROUNDS = 10
# Of the counter's words 0 and 2, and of the key's words; [2, 1], to go with [2, num_rows].
MULTIPLIERS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], np.uint64)
KEY_STEPS = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], np.uint64)

_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_LOW_MULTIPLIERS, _HIGH_MULTIPLIERS = MULTIPLIERS & _LOW, MULTIPLIERS >> _HALF


def uniform(names: Words) -> NDArray[np.float64]:
    """One random number in [0, 1) for each row, a function of the row's name alone.

    Parameters
    ----------
    names : np.ndarray
        ``[num_rows, 4] uint64``: seed, noise key, choice, index of the token. The first two are the key, the
        others count.

    Returns
    -------
    np.ndarray
        ``[num_rows] float64``, multiples of 2**-53.
    """
    seed, noise_key, choice, token_index = names.T
    first = np.ones_like(seed)  # a generator counts before it draws
    words = _first_words(np.stack((seed, noise_key)), np.stack((first, token_index)), np.stack((first * 0, choice)))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _first_words(key: Words, even: Words, odd: Words) -> Words:
    """Word 0 of Philox of every row, ``[num_rows]``.

    Parameters
    ----------
    key, even, odd : np.ndarray
        ``[2, num_rows]``: the key's words, words 0 and 2 of the counter, words 1 and 3 of it.
    """
    for _ in range(NUM_ROUNDS):
        high, low = _multiply(even)
        even, odd = high[::-1] ^ odd ^ key, low[::-1]
        key = key + KEY_STEPS
    words: Words = even[0]
    return words


def _multiply(words: Words) -> tuple[Words, Words]:
    """High and low word of the 128-bit products with `MULTIPLIERS`, by their halves; no sum here exceeds a word."""
    low, high = words & _LOW, words >> _HALF
    crossed = high * _LOW_MULTIPLIERS
    middle = (low * _LOW_MULTIPLIERS >> _HALF) + (crossed & _LOW) + low * _HIGH_MULTIPLIERS
    return high * _HIGH_MULTIPLIERS + (crossed >> _HALF) + (middle >> _HALF), words * MULTIPLIERS
