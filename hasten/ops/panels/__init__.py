"""Weight matrices in panels of 16 rows: formats, packing, and products with few and with many rows.

The layout is described in docs/design/003-serving.md, formats as data in `formats.py`, the meaning in plain
torch in `reference.py`. What is named here needs no torch.
"""

from hasten.ops.panels.formats import BFLOAT16, FLOAT32, GGUF, LANES, Format, named, quantised, rotated
from hasten.ops.panels.matrix import Panels, describe, restore

__all__ = [
    "BFLOAT16",
    "FLOAT32",
    "GGUF",
    "LANES",
    "Format",
    "Panels",
    "describe",
    "named",
    "quantised",
    "restore",
    "rotated",
]
