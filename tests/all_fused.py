"""Fuses whatever has a template: sessions themselves do so only beside products with few rows.

    python all_fused.py WAY PROGRAM.py

runs a program as it stands, but for its sessions: with ``off`` they are loaded with ``fuse="off"``,
with ``fused`` they fuse whatever has a template. The last line says how many frames were fused.
"""

import runpy
import sys
from unittest import mock

from onnx_inplace import Session
from onnx_inplace.compiler import fusable
from onnx_inplace.runner.fused.choice import Alternative


def all_fused() -> mock._patch:
    """While it lasts, a plan counts every node as a product of one row."""
    return mock.patch.multiple(
        fusable, is_product=lambda node, context: True, rows=lambda node, context: (1,)
    )


def main(way: str, program: str) -> None:
    """Run the program."""
    frames, regions = [], Alternative.regions

    def noted(self, dims, roots):
        found = regions(self, dims, roots)
        frames.extend([dims] if found else [])
        return found

    with mock.patch.object(Alternative, "regions", noted):
        if way == "fused":
            with all_fused():
                runpy.run_path(program, run_name="__main__")
        else:
            with mock.patch.dict(Session.__init__.__kwdefaults__, fuse=way):
                runpy.run_path(program, run_name="__main__")
    print(f"fused frames: {len(frames)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
