"""Which graph output continues which graph input, by the names that exporters give them.

Decides on names alone. That types and shapes fit, and that the storage can be one, is decided in
``adoption``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Words that say "state" on their own: no model calls an ordinary result so.
_PAST = ("past_key_values.", "past_key_values_", "past.", "past_")
_PRESENT = ("present_key_values.", "present_key_values_", "present.", "present_")
_UPDATED = "updated_"
# Words that an ordinary result may have too: they count where the rest is the name of a state.
_OLD = re.compile(r"(?:prev|old|in|initial|init)[_.](.+)|(.+?)[_.](?:prev|old|in|initial|init|0)")
_NEW = re.compile(
    r"(?:new|next|out|final)[_.](.+)|(.+?)[_.](?:new|next|out|output|final|updated|n|N|1)"
    r"|(.+?)(?:N|n|Out)"
)
_STATE = re.compile(
    r"(?:^|[._/])(?:state|hidden|cell|cache|conv|ssm|mem|memory|buffer|buf|key|value|ctx|context|rnn"
    r"|lstm|gru|h|c|k|v)s?\d*(?:$|[._/])",
    re.IGNORECASE,
)


def pairs(inputs: Iterable[str], outputs: Iterable[str]) -> dict[str, str]:
    """Output by output the input that it is the next content of; an input is used once."""
    known = list(inputs)
    before: dict[str, str] = {}
    for name in known:
        for stem in _stems_before(name):
            before.setdefault(stem, name)
    found: dict[str, str] = {}
    for output in outputs:
        for stem in _stems_after(output):
            root = before.get(stem)
            if root is not None and root != output and root not in found.values():
                found[output] = root
                break
    return found


def _stems_before(name: str) -> list[str]:
    """What may be asked for this input, the most specific first."""
    for prefix in _PAST:
        if name.startswith(prefix):
            return [f"past:{name.removeprefix(prefix)}", f"any:{name}"]
    stems = [f"any:{name}"]
    if _STATE.search(name):
        stems.append(f"state:{name}")
        match = _OLD.fullmatch(name)
        if match is not None:
            stems.append(f"state:{match[1] or match[2]}")
    return stems


def _stems_after(name: str) -> list[str]:
    """The stems of the inputs that this output may continue."""
    for prefix in _PRESENT:
        if name.startswith(prefix):
            return [f"past:{name.removeprefix(prefix)}"]
    if name.startswith(_UPDATED):
        return [f"any:{name.removeprefix(_UPDATED)}"]
    match = _NEW.fullmatch(name)
    stem = None if match is None else match[1] or match[2] or match[3]
    return [f"state:{stem}"] if stem is not None and _STATE.search(stem) else []
