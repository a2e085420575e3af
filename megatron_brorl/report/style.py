"""What all figures share: colours, a panel, a file. No pyplot: nothing here is global."""

from __future__ import annotations

import os
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_brorl.errors import UserError

# Okabe and Ito's palette, which every kind of colour vision tells apart.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
GREY = "#8C8C8C"


def panel(axes: Axes, title: str, ylabel: str, xlabel: str = "training step") -> None:
    """Title, labels and a quiet grid."""
    axes.set_title(title, fontsize=11, loc="left", fontweight="bold")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def say(axes: Axes, text: str) -> None:
    """In place of a curve."""
    axes.set_yticks([])
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)


def save(figure: Figure, path: Path) -> Path:
    """Write a PNG; the file is the old one or the new one at any instant."""
    aside = path.with_name(path.name + ".tmp")
    try:
        FigureCanvasAgg(figure).print_figure(aside, dpi=110, format="png", pil_kwargs={"optimize": True})
        os.replace(aside, path)
    except OSError as e:
        raise UserError(f"{path}: cannot be written: {e.strerror}; free some space or make it writable") from None
    return path
