"""Which kernels attend over the pages of a cache: chosen, and compiled, when a model is loaded."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from onnx_inplace.numba_kernels import pages_attention, pages_portable
from onnx_inplace.numba_kernels.pages_attention import PagesLayout

_Int64s = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Kernels:
    """Compiled code for the formats of one cache and the heads of one query.

    Attributes:
        attend: address of the driver, for ``invoke``.
        merge: address of what follows a parallel call with several splits.
        portable: (formats) int64, addresses of page kernels for any number of rows.
    """

    attend: int
    merge: int
    portable: _Int64s

    def choose(self, x: PagesLayout) -> tuple[PagesLayout, _Int64s]:
        """A call's layout with its last four fields filled in; ``Tables.kernels`` for it."""
        rows = min(pages_attention.ROWS, x.group * x.tokens)
        x = x._replace(rows=rows, scratch=pages_portable.scratch_size(x.head_size), prepared=0)
        return x._replace(worker_bytes=pages_attention.worker_bytes(x)), self.portable


def ready(descriptions: _Int64s) -> Kernels:
    """Compile, or load from disk, what attention over pages of these formats needs.

    Shapes:
        descriptions: (formats, pages_layout.WORDS)
    """
    portable: int = pages_portable.attend.ready().address
    return Kernels(
        attend=pages_attention.attend.ready().address,
        merge=pages_attention.merge.ready().address,
        portable=np.full(len(descriptions), portable, np.int64),
    )
