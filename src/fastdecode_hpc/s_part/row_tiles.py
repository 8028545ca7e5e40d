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

import torch
from torch import Tensor

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.schedule.row_tiles import TileSizes

logger = logging.getLogger(__name__)

RowFunction = Callable[..., Tensor]

BASE_SIZES = (2, 8, 16, 32, 1)
"""Smallest tiles to try, best first; 1 is row by row: slow, but the same call for every row."""

FEW_ROWS = 8
"""A base tile below this is taken only where all larger ones agree with it: else most rows would go in tiny tiles."""

ANY_COUNTS = (1, 2, 3, 7, 13, 33, 98)
"""Row counts at which a function that ought to give the same bits at any is tried."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RowTiles(TileSizes):
    """Runs functions on the rows of a batch in tiles."""

    __slots__ = ()

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
        sizes = self.split(num_rows)
        if len(sizes) == 1:
            return function(*(pad_rows(x, sizes[0]) for x in inputs))[:num_rows]
        tiles, first = [], 0
        for size in sizes:
            rows = [x[first : first + size] for x in inputs]
            tiles.append(function(*(pad_rows(x, size) for x in rows))[: rows[0].shape[0]])
            first += size
        return torch.cat(tiles)


def pad_rows(x: Tensor, size: int) -> Tensor:
    """`x` with rows of zeros added up to `size`; `x` itself where it has as many."""
    if x.shape[0] == size:
        return x
    padded = x.new_zeros((size, *x.shape[1:]))
    padded[: x.shape[0]] = x
    return padded


def find_row_tiles(
    name: str, function: RowFunction, samples: tuple[Tensor, ...], sizes: tuple[int, ...], *, row_wise: bool = False
) -> RowTiles:
    """Try a row-wise function on this machine and keep the row counts at which a row's bits never change.

    The result holds for the current number of threads.

    Parameters
    ----------
    name : str
        What is checked, for messages.
    function : callable
        As for `RowTiles.run`.
    samples : tuple of Tensor
        Its inputs, at least ``max(BASE_SIZES)`` distinct rows.
    sizes : tuple of int
        Row counts to try beside the base size.
    row_wise : bool
        Its products give a row the same bits at any row count: if all else does too, no tiles are needed.

    Raises
    ------
    ConfigError
        If not even row by row a row gives the same bits twice.
    """
    if row_wise and _agrees_everywhere(function, samples):
        return RowTiles()
    for base in BASE_SIZES:
        expected = _in_tiles(function, samples, base)
        larger = [size for size in sorted(sizes) if size > base and size % base == 0]
        good = [size for size in larger if _agrees(function, samples, expected, size)]
        if 1 < base < FEW_ROWS and len(good) < len(larger):
            continue
        # A larger tile that agrees had the rows in other places, which vouches for the base tile's places too.
        if good or _agrees(function, samples, expected, base):
            _report(name, base, good, len(larger))
            return RowTiles((base, *good))
    raise ConfigError(
        f"batch invariance is not possible here: the {name} gave one row different bits when computed twice; "
        "turn it off (batch_invariant=False)"
    )


def _in_tiles(function: RowFunction, samples: tuple[Tensor, ...], base: int) -> Tensor:
    """The function on at least `FEW_ROWS` of the sample rows, `base` at a time."""
    firsts = range(0, max(base, FEW_ROWS), base)
    return torch.cat([function(*(x[first : first + base] for x in samples)) for first in firsts])


def _agrees(function: RowFunction, samples: tuple[Tensor, ...], expected: Tensor, size: int) -> bool:
    """Whether the sample rows, in other places of a call on `size` rows, have the bits of `expected`."""
    num_rows = expected.shape[0]
    place = torch.arange(size, device=expected.device)
    row = (place + 1 + place // num_rows) % num_rows  # rotated by one more each time that all have had a place
    agrees: bool = torch.equal(_as_bits(function(*(x[row] for x in samples))), _as_bits(expected[row]))
    return agrees


def _agrees_everywhere(function: RowFunction, samples: tuple[Tensor, ...]) -> bool:
    expected = _in_tiles(function, samples, 1)
    return all(_agrees(function, samples, expected, count) for count in ANY_COUNTS)


def _as_bits(x: Tensor) -> Tensor:
    """The bits of `x` as integers: unlike floats, they tell zeros apart and equal themselves when not a number."""
    return x.contiguous().view(_BITS[x.element_size()])


def _report(name: str, base: int, good: list[int], num_tried: int) -> None:
    if base == 1:
        logger.warning("batch invariance: the %s must run row by row on this machine, which is slow", name)
    elif len(good) < num_tried:
        logger.info("batch invariance: the %s runs in tiles of %s rows", name, [base, *good])
