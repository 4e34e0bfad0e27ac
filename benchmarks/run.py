"""All benchmarks, piece by piece, each in a process of its own; `make bench` runs this.

    python benchmarks/run.py                        everything, into build/benchmarks
    python benchmarks/run.py attention decode-2     some pieces
    python benchmarks/run.py --summary              what the last runs found

A piece takes one to two minutes on an idle machine of two cores. At the end stands every promise
with its number; pictures are drawn where matplotlib is installed. Status 1 if a promise fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE.parent / "build" / "benchmarks"
PICTURES = HERE.parent / "docs" / "pictures"
SHAPES = "--shapes 128x4 64x3 --cache float32 float16 bfloat16 INT8 FP8_E4M3 FP8_E5M2 INT4"
PIECES = {
    "attention": "attention.py",
    "attention-shapes": f"attention.py --no-peers {SHAPES}",
    "batch": "batch.py --shapes 8x128x4",
    "batch-small": "batch.py --shapes 3x64x3",
    "prefill": "prefill.py --lengths 16/4096 128/4096 512/512",
    "prefill-long": "prefill.py --lengths 2048/2048 --rounds 5",
    "capacity": "capacity.py",
    "crossover": "crossover.py",
    "hot": "hot.py",
    "quantize": "quantize.py",
    "update": "update.py",
    "startup": "startup.py --cold",
    "cache_bytes": "cache_bytes.py",
    "decode-2": "decode.py --threads 2 --positions 64 1024 --no-prompt",
    "decode-2-long": "decode.py --rounds 2 --threads 2 --positions 4000 8000 --no-prompt",
    "prompt-2": "decode.py --threads 2 --positions",
    "decode-1": "decode.py --threads 1 --positions 64 1024 --fuse auto --no-prompt",
    "decode-1-long": "decode.py --threads 1 --positions 4000 --fuse auto --no-prompt --rounds 2",
    "decode-1-longest": "decode.py --threads 1 --positions 8000 --fuse auto --no-prompt --rounds 2"
    " --peers onnxruntime-genai",
}
"""Programs with their options, by the name of the file that they write."""


def summary(paths: list[Path]) -> bool:
    """Print every promise with its number; True if all hold."""
    held = True
    for path in paths:
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        print(f"\n{path.stem} ({result['machine']['cpu']})")
        for reason in result["skipped"]:
            print(f"  skipped: {reason}")
        for claim in result["claims"]:
            word = "holds" if claim["holds"] else "FAILS"
            limit = f"{claim['bound']} {claim['limit']:.3g}"
            print(f"  {word}  {claim['claim']}: {claim['value']:.3g} ({limit})")
        held &= all(claim["holds"] for claim in result["claims"])
    return held


def main(arguments: list[str] | None = None) -> bool:
    """Run, draw, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pieces", nargs="*", metavar="piece", help=", ".join(PIECES))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for JSON")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="for SVG")
    parser.add_argument("--summary", action="store_true", help="run nothing")
    given = parser.parse_args(arguments)
    pieces = given.pieces or list(PIECES)
    if unknown := sorted(set(pieces) - PIECES.keys()):
        parser.error(f"no such piece: {', '.join(unknown)}. There are {', '.join(PIECES)}.")
    paths = [given.folder / f"{piece}.json" for piece in pieces]
    crashed = []
    for piece, path in zip(pieces, paths, strict=True):
        if given.summary:
            break
        program, *options = PIECES[piece].split()
        print(f"\n== {piece}: python benchmarks/{PIECES[piece]}", flush=True)
        path.unlink(missing_ok=True)
        command = [sys.executable, HERE / program, *options, "--json", path]
        subprocess.run(command, check=False)
        if not path.exists():
            crashed.append(piece)
    if importlib.util.find_spec("matplotlib") is None:
        print("\nskipped: pictures need matplotlib")
    elif not given.summary:
        command = [sys.executable, HERE / "pictures.py", given.folder, given.pictures]
        subprocess.run(command, check=False)
    held = summary(paths)
    for piece in crashed:
        print(f"\n{piece} wrote no result", file=sys.stderr)
    return held and not crashed


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
