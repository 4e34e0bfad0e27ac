"""What the caches of SmolLM2-135M take at a context length: of real pages and arrays, no times.

    python benchmarks/cache_bytes.py

Pages are allocated as a text grows and age by the tutorial's policy; one layer is filled, and
counted for all 30. Peers allocate an array for the longest text when they begin, of float32
(onnxruntime-genai) or float16 (llama.cpp).
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tutorials" / "smollm2"))

import numpy as np  # noqa: E402
import record  # noqa: E402
import step_models  # noqa: E402
from config import SMOLLM2_135M  # noqa: E402
from paged import TIERS  # noqa: E402
from paged_decoder import PAGE_SIZE  # noqa: E402
from record import Row  # noqa: E402

from onnx_inplace import SequencePool, policy  # noqa: E402

HEADS, SIZE, LAYERS = SMOLLM2_135M.kv_heads, SMOLLM2_135M.head_size, SMOLLM2_135M.layers
FORMATS = "FLOAT16", "INT8", "INT4"


def growing(first: str, tiers: policy.Policy | None, lengths: list[int]) -> dict[int, int]:
    """Bytes of all layers at each length; a page of tokens at a time."""
    names = [first, *(name for name in FORMATS if name != first)]
    cache, session = step_models.page_writer(HEADS, PAGE_SIZE, SIZE, names)
    blocks = -(-max(lengths) // PAGE_SIZE)
    pool = SequencePool([cache], first, max_pages=blocks)
    sequence, found = pool.new(), {}
    values = np.random.default_rng(0).standard_normal((2, HEADS, PAGE_SIZE, SIZE), np.float32)
    with session.bind(cache=cache) as step:
        for length in sorted(lengths):
            while sequence.length < length:
                new = min(PAGE_SIZE, length - sequence.length)
                with sequence.writing(new, blocks) as place:
                    table, position = place.block_table[0], place.position[0]
                    step.run(blocks=table, values=values[:, :, :new], position=position)
                if tiers is not None:
                    policy.apply(tiers, pool)
            found[length] = LAYERS * cache.nbytes
    return found


def main(arguments: list[str] | None = None) -> bool:
    """Count and print."""
    parser = record.parser(__doc__)
    lengths = [64, 1024, 2048, 4096, 6144, 8192]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    given = parser.parse_args(arguments)
    most = max(given.lengths)
    elements = 2 * LAYERS * HEADS * SIZE * most
    found = {
        "onnxruntime-genai, float32": dict.fromkeys(given.lengths, 4 * elements),
        "llama.cpp, float16": dict.fromkeys(given.lengths, 2 * elements),
        "FLOAT16 pages": growing("FLOAT16", None, given.lengths),
        "INT8 pages": growing("INT8", None, given.lengths),
        "FLOAT16, INT8, INT4 by age": growing("FLOAT16", TIERS, given.lengths),
    }
    print(f"{'MiB at tokens':<52}" + "".join(f"{n:>9,}" for n in sorted(given.lengths)))
    for name, sizes in found.items():
        print(f"{name:<52}" + "".join(f"{sizes[n] / 2**20:9.1f}" for n in sorted(sizes)))
    rows: list[Row] = [
        {"variant": name, "tokens": n, "bytes": size}
        for name, sizes in found.items()
        for n, size in sizes.items()
    ]
    return record.Record("cache_bytes", record.options(given), rows).conclude(given.json)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
