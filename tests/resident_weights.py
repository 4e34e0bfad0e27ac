"""Run as a program: how much of a model's weights is resident in a process that only decodes.

Prints JSON: for each moment, bytes of mapped files whose names begin like the model's, by suffix,
and bytes that belong to no file.
"""

import json
import sys
from pathlib import Path

import generate

from onnx_inplace import Session


def resident(model: Path) -> dict[str, int]:
    """Bytes by suffix of a file of the model; ``""``: of no file."""
    found, suffix = {"": 0}, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            name = words[5] if len(words) > 5 else ""
            suffix = Path(name).suffix if name.startswith(str(model)) else ""
        elif words[0] == "Rss:" and suffix:
            found[suffix] = found.get(suffix, 0) + 1024 * int(words[1])
        elif words[0] == "Anonymous:":
            found[""] += 1024 * int(words[1])
    return found


def main(path: str, fuse: str, prompt: int) -> None:
    """Decode a few tokens, then take a prompt; what is resident before and after each."""
    model = Path(path)
    conversation = generate.Conversation(Session(path, fuse=fuse), 256)
    moments = [resident(model)]
    for tokens in [*[[1]] * 8, *[[1] * prompt][: bool(prompt)]]:
        conversation.run(tokens)
        moments.append(resident(model))
    print(json.dumps({"loaded": moments[0], "decoding": moments[8], "last": moments[-1]}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
