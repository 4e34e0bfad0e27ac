"""What a process waits for before its first token: imports, kernels, the model.

    python benchmarks/startup.py [--threads 2] [--cold] [--rounds 5] [--json FILE]

Every number is of fresh processes, the median over the rounds, with kernels that were compiled
before; --cold adds one process that compiles all of them. *kernels* are a part of loading or of the
first runs. *first token* is a prompt of eight tokens and the token behind it, of a loaded model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record
import timing

TUTORIAL = Path(__file__).parents[1] / "tutorials" / "smollm2"
PACKAGE, KERNELS, TOKEN = 0.5, 0.5, 1.0  # [s] at most
LOADED = "kernels [s]", "first token [s]"

IMPORTS = {
    "python alone": "pass",
    "import onnx_inplace": "import onnx_inplace",
    "from onnx_inplace.dsl import model": "from onnx_inplace.dsl import model",
    "from onnx_inplace import Session": "from onnx_inplace import Session",
}


def imports(rounds: int) -> dict[str, float]:
    """Seconds of a process that does nothing else."""
    commands = {
        name: lambda code=code: subprocess.run([sys.executable, "-c", code], check=True)
        for name, code in IMPORTS.items()
    }
    return {name: us / 1e6 for name, us in timing.interleaved(commands, rounds).items()}


def stages(threads: int) -> dict[str, float]:
    """What SmolLM2 takes in this process, which has done nothing before."""
    start = time.perf_counter()
    sys.path.insert(0, str(TUTORIAL))
    import generate
    from decoder import Precision

    from onnx_inplace import Session
    from onnx_inplace.numba_kernels import memory

    path = generate.compiled(Precision.FAST, "float16")
    imported = time.perf_counter()
    conversation = generate.Conversation(Session(path, threads=threads, fuse="auto"), 1024)
    loaded, ready = time.perf_counter(), len(memory.made())
    conversation.run(range(1, 9))
    conversation.run([9])
    done = time.perf_counter()
    made = memory.made()
    return {
        "imports [s]": imported - start,
        "load [s]": loaded - imported,
        "kernels [s]": sum(kernel.seconds for kernel in made),
        "first token [s]": done - loaded,
        "kernels": len(made),
        "compiled": sum(not kernel.read for kernel in made),
        "not ready at load": len(made) - ready,
    }


def fresh(threads: int, folder: str | None = None) -> dict[str, float]:
    """:func:`stages` of a new process, its compiled code in ``folder``."""
    environment = dict(os.environ)
    if folder is not None:
        environment["ONNX_INPLACE_CACHE"] = folder
    command = [sys.executable, __file__, "--child", "--threads", str(threads)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main(arguments: list[str] | None = None) -> bool:
    """Measure, print, judge."""
    parser = record.parser(__doc__)
    parser.set_defaults(rounds=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cold", action="store_true", help="also compile all kernels, once")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        print(json.dumps(stages(given.threads)))
        return True

    seconds = imports(given.rounds)
    print("seconds of a process")
    for name, found in seconds.items():
        print(f"  {name:<40}{found:>8.3f}")
    fresh(given.threads)  # compiles what is not compiled yet
    rounds = [fresh(given.threads) for _ in range(given.rounds)]
    columns = {"warm": {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}}
    if given.cold:
        with tempfile.TemporaryDirectory() as folder:
            columns["cold"] = fresh(given.threads, folder)
    print(f"\n{f'SmolLM2-135M, {given.threads} threads':<42}" + "".join(f"{c:>8}" for c in columns))
    for name in columns["warm"]:
        print(f"  {name:<40}" + "".join(f"{column[name]:>8.3g}" for column in columns.values()))
    rows: list[record.Row] = [{"process": name, "seconds": s} for name, s in seconds.items()]
    rows += [{"process": f"SmolLM2, {name}", **column} for name, column in columns.items()]
    package = seconds["import onnx_inplace"] - seconds["python alone"]
    kernels, token = (columns["warm"][name] for name in LOADED)
    most = record.Bound.AT_MOST
    claims = [
        record.Claim("seconds of `import onnx_inplace`", package, PACKAGE, most),
        record.Claim("seconds to read what SmolLM2 needs of kernels", kernels, KERNELS, most),
        record.Claim("seconds to the first token of a loaded SmolLM2", token, TOKEN, most),
    ]
    print()
    return record.Record("startup", record.options(given), rows, claims).conclude(given.json)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
