"""How the rows of a batch are cut into tiles, of row counts at which the S-Part gives a row the same bits."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PADDING = 48
"""Most rows of padding in a tile: about what one product more costs, for it reads all weights again."""


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Row counts, ascending, that are computed; none: any count, no padding."""

    sizes: tuple[int, ...] = ()

    def split(self, num_rows: int) -> list[int]:
        """Sizes of the tiles for a number of rows; only the last may hold more than there are."""
        if not self.sizes:
            return [num_rows] if num_rows else []
        tiles, rest = [], num_rows
        while rest > 0:
            covering = next((size for size in self.sizes if size >= rest), None)
            if covering is None or (covering - rest > MAX_PADDING and covering > self.sizes[0]):
                covering = max(size for size in self.sizes if size <= rest)
            tiles.append(covering)
            rest -= covering
        return tiles

    def padded(self, num_rows: int) -> int:
        """The rows that are computed for `num_rows`."""
        return sum(self.split(num_rows))
