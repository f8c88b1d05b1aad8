"""Pictures: heatmaps of attention weights, and who sees whom under a mask.

Drawing needs matplotlib and seaborn, the optional extra `viz` (`pip install selfattn_ext[viz]`). Importing
this module imports neither of them, so that a program can offer pictures without depending on them.
"""

from .drawing import save
from .heatmaps import plot_attention, plot_heads, plot_layers
from .mask_picture import plot_mask

__all__ = ["plot_attention", "plot_heads", "plot_layers", "plot_mask", "save"]
