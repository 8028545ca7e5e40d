"""How pictures look: sizes, colours that all readers can tell apart, ink. The only matplotlib import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from fastdecode_hpc.config import ConfigError

# Okabe and Ito's palette, made for readers with any kind of colour vision.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY: Final = "#BBBBBB"  # what is left over

PAGE_WIDTH_CM: Final = 17.0  # the text of an A4 page
DPI: Final = 200
_CM: Final = 1 / 2.54

STYLE: Final[Mapping[str, Any]] = MappingProxyType({
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
})  # fmt: skip


def check_plot(path: Path, option: str = "--plot") -> None:
    """Raise `ConfigError` if nothing can be drawn to `path`, which `option` names."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"{option} needs matplotlib: pip install 'fastdecode-hpc[plot]'") from None
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in known:
        raise ConfigError(f"{option} is {path}; its ending must be one of {', '.join(sorted(known))}")


@contextmanager
def page(height_cm: float, *, width_cm: float = PAGE_WIDTH_CM) -> Iterator[Any]:
    """An empty figure, to be drawn on inside the block; its layout keeps text from overlapping."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(dict(STYLE)):
        yield Figure(figsize=(width_cm * _CM, height_cm * _CM), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write a figure to a file.

    Raises
    ------
    ConfigError
        If the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def patches(names: Mapping[str, str]) -> list[Any]:
    """Legend entries of filled areas, from colour by name."""
    from matplotlib.patches import Patch

    return [Patch(color=colour, label=name) for name, colour in names.items()]


def rectangles(boxes: Any, colours: Any) -> Any:
    """Many filled rectangles as one artist; `boxes` is ``[num, 4]``: left, right, bottom, top."""
    import numpy as np
    from matplotlib.collections import PolyCollection

    left, right, bottom, top = np.asarray(boxes).T
    outline = ((left, bottom), (left, top), (right, top), (right, bottom))
    corners: Any = np.stack([np.stack(corner, axis=-1) for corner in outline], axis=1)
    return PolyCollection(corners, facecolors=colours, edgecolors="none", linewidths=0)
