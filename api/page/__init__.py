"""A plan as one HTML page that stands alone: no network, no other file.

``facts`` and ``lanes`` gather what is shown, ``folding`` finds what repeats, and the modules called
after the sections draw it. All text goes through ``markup``, which escapes it.
"""

from onnx_inplace.page.document import render

__all__ = ["render"]
