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

MAX_PADDING = 48
"""Most rows of padding in a tile: about what one product more costs, for it reads all weights again."""

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
        sizes = self.split(num_rows)
        if len(sizes) == 1:
            return function(*(pad_rows(x, sizes[0]) for x in inputs))[:num_rows]
        tiles, first = [], 0
        for size in sizes:
            rows = [x[first : first + size] for x in inputs]
            tiles.append(function(*(pad_rows(x, size) for x in rows))[: rows[0].shape[0]])
            first += size
        return torch.cat(tiles)

    def split(self, num_rows: int) -> list[int]:
        """Sizes of the tiles for a number of rows; only the last may hold more than there are."""
        tiles, rest = [], num_rows
        while rest > 0:
            covering = next((size for size in self.sizes if size >= rest), None)
            if covering is None or (covering - rest > MAX_PADDING and covering > self.sizes[0]):
                covering = max(size for size in self.sizes if size <= rest)
            tiles.append(covering)
            rest -= covering
        return tiles


def pad_rows(x: Tensor, size: int) -> Tensor:
    """`x` with rows of zeros added up to `size`; `x` itself where it has as many."""
    if x.shape[0] == size:
        return x
    padded = x.new_zeros((size, *x.shape[1:]))
    padded[: x.shape[0]] = x
    return padded


def find_row_tiles(name: str, function: RowFunction, samples: tuple[Tensor, ...], sizes: tuple[int, ...]) -> RowTiles:
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

    Raises
    ------
    ConfigError
        If not even row by row a row gives the same bits twice.
    """
    for base in BASE_SIZES:
        expected = function(*(x[:base] for x in samples))
        larger = [size for size in sorted(sizes) if size > base and size % base == 0]
        good = [size for size in larger if _agrees(function, samples, expected, size)]
        # A larger tile that agrees had the rows in other places, which vouches for the base tile's places too.
        if good or _agrees(function, samples, expected, base):
            _report(name, base, good, len(larger))
            return RowTiles((base, *good))
    raise ConfigError(
        f"batch invariance is not possible here: the {name} gave one row different bits when computed twice; "
        "turn it off (batch_invariant=False)"
    )


def _agrees(function: RowFunction, samples: tuple[Tensor, ...], expected: Tensor, size: int) -> bool:
    """Whether the sample rows, in other places of a call on `size` rows, have the bits of `expected`."""
    base = expected.shape[0]
    place = torch.arange(size, device=expected.device)
    row = (place + 1 + place // base) % base  # every base tile is rotated by one more
    out = function(*(x[row] for x in samples))
    return all(
        torch.equal(_as_bits(tile), _as_bits(expected[rows]))
        for tile, rows in zip(out.split(base), row.split(base), strict=True)
    )


def _as_bits(x: Tensor) -> Tensor:
    """The bits of `x` as integers: unlike floats, they tell zeros apart and equal themselves when not a number."""
    return x.contiguous().view(_BITS[x.element_size()])


def _report(name: str, base: int, good: list[int], num_tried: int) -> None:
    if base == 1:
        logger.warning("batch invariance: the %s must run row by row on this machine, which is slow", name)
    elif len(good) < num_tried:
        logger.info("batch invariance: the %s runs in tiles of %s rows", name, [base, *good])
