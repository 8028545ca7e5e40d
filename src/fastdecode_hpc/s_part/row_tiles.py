"""Batch invariance: rows are computed in tiles of row counts that a start-up check found to agree bitwise.

Notes
-----
Matrix products, and even elementwise functions split over threads, may round a row differently with the
number of rows beside it. So the rows of a batch are padded and cut into tiles, and only tile sizes are used
for which this machine, with its library and thread count, gave a row the same bits at every place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastdecode_hpc.config import ConfigError

logger = logging.getLogger(__name__)

RowFunction = Callable[..., Tensor]

BASE_SIZES = (8, 16, 32, 1)
"""Smallest tiles to try, best first; 1 is row by row: slow, but the same call for every row."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Row counts, ascending, at which a function may be called; none: any count, no padding."""

    sizes: tuple[int, ...] = ()

    def run(self, function: RowFunction, *inputs: Tensor) -> Tensor:
        """Call a row-wise `function` on all rows, in tiles.

        Parameters
        ----------
        function : callable
            Takes tensors of equally many rows, returns one tensor of as many rows.
        inputs : Tensor
            ``[num_rows, ...]``

        Returns
        -------
        Tensor
            ``[num_rows, ...]``; may be a view of a padded one.
        """
        num_rows = inputs[0].shape[0]
        if not self.sizes or num_rows == 0:
            return function(*inputs)
        if num_rows <= self.sizes[-1]:
            return self._run_tile(function, inputs)
        largest = self.sizes[-1]
        tiles = [tuple(x[first : first + largest] for x in inputs) for first in range(0, num_rows, largest)]
        return torch.cat([self._run_tile(function, tile) for tile in tiles])

    def _run_tile(self, function: RowFunction, inputs: tuple[Tensor, ...]) -> Tensor:
        num_rows = inputs[0].shape[0]
        size = next(size for size in self.sizes if size >= num_rows)
        return function(*(pad_rows(x, size) for x in inputs))[:num_rows]


def pad_rows(x: Tensor, size: int) -> Tensor:
    """`x` with rows of zeros added up to `size`; `x` itself where it has as many."""
    if x.shape[0] == size:
        return x
    padded = x.new_zeros((size, *x.shape[1:]))
    padded[: x.shape[0]] = x
    return padded


def find_row_tiles(name: str, function: RowFunction, row: tuple[Tensor, ...], sizes: tuple[int, ...]) -> RowTiles:
    """Try a row-wise function on this machine and keep the row counts at which a row's bits never change.

    One row is repeated, so that every place of every tile must give the same bits. The result holds for the
    current number of threads.

    Parameters
    ----------
    name : str
        What is checked, for messages.
    function : callable
        As for `RowTiles.run`.
    row : tuple of Tensor
        Its inputs, of one row each, ``[1, ...]``.
    sizes : tuple of int
        Row counts to try beside the base size.

    Raises
    ------
    ConfigError
        If not even row by row a row gives the same bits twice.
    """
    for base in BASE_SIZES:
        tile = _run_copies(function, row, base)
        expected = tile[:1]
        # A tile of one row has no other row to agree with: it is computed twice.
        if _is_equal(tile, expected) if base > 1 else _agrees(function, row, expected, 1):
            larger = [size for size in sorted(sizes) if size > base and size % base == 0]
            good = [size for size in larger if _agrees(function, row, expected, size)]
            _report(name, base, good, len(larger))
            return RowTiles((base, *good))
    raise ConfigError(
        f"batch invariance is not possible here: the {name} gave one row different bits when computed twice; "
        "turn it off (batch_invariant=False)"
    )


def _agrees(function: RowFunction, row: tuple[Tensor, ...], expected: Tensor, size: int) -> bool:
    """Whether every row of a call on `size` copies of a row has the bits of `expected`, ``[1, ...]``."""
    return _is_equal(_run_copies(function, row, size), expected)


def _is_equal(rows: Tensor, expected: Tensor) -> bool:
    """Whether all rows have the bits of `expected`, ``[1, ...]``."""
    bits = _BITS[rows.element_size()]
    return bool((rows.contiguous().view(bits) == expected.contiguous().view(bits)).all())


def _run_copies(function: RowFunction, row: tuple[Tensor, ...], size: int) -> Tensor:
    return function(*(x.repeat(size, *[1] * (x.ndim - 1)) for x in row))


def _report(name: str, base: int, good: list[int], num_tried: int) -> None:
    if base == 1:
        logger.warning("batch invariance: the %s must run row by row on this machine, which is slow", name)
    elif len(good) < num_tried:
        logger.info("batch invariance: the %s runs in tiles of %s rows", name, [base, *good])
