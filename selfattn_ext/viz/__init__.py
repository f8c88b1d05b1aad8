"""Pictures: heatmaps of attention weights, and who sees whom under a mask.

Drawing needs matplotlib and seaborn, the optional extra `viz` (`pip install 'selfattn_ext[viz]'`). Importing
this module imports neither of them, so that a program can offer pictures without depending on them. `require`
imports both, or says what to install: before the work whose result is to be drawn.
"""

from .drawing import require, save
from .heatmaps import plot_attention, plot_heads, plot_layers
from .mask_picture import plot_mask

__all__ = ["plot_attention", "plot_heads", "plot_layers", "plot_mask", "require", "save"]
