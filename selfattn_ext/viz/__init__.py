"""Pictures: heatmaps of attention weights and of their entropy, and grids of the pairs that masks hide.

Drawing needs matplotlib and seaborn, the optional extra ``viz`` (``pip install 'selfattn_ext[viz]'``).
Importing this module imports neither of them, so that a program can offer pictures without depending on them.
:func:`require` imports both or says what to install; a program calls it before the work whose result it
draws.
"""

from .drawing import require, save
from .entropy_picture import plot_entropy
from .heatmaps import plot_attention, plot_heads, plot_layers
from .mask_picture import plot_mask

__all__ = ["plot_attention", "plot_entropy", "plot_heads", "plot_layers", "plot_mask", "require", "save"]
