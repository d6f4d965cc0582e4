"""How the figures of all verbs look: ink, faint lines, type, and dots. Owns no state."""

from typing import Any

INK, FAINT = "#222222", "#DDDDDD"
STYLE: Any = {
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": "#AAAAAA",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
}
DOTS_PER_INCH = 160
