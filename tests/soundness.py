"""The soundness property on one program, and a verdict.

`judge` compiles, loads and runs a program on storage of the caller, and compares everything that
the design promises with the functional meaning of the same file, as ``interpreter`` understands it
and, when asked, as stock onnxruntime does. A refused program is judged as well: would program order
on one storage have given the functional meaning?
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence

import interpreter
import numpy as np
import onnx
import onnxruntime
import strategies

from onnx_inplace import Session
from onnx_inplace.compiler import errors, loader, program

MARGIN, FENCE = 16, 0x5A5A


class Verdict(enum.Enum):
    """What became of a program."""

    HOLDS = "accepted, and the property holds"
    REFUSED = "refused, and in place it would have gone wrong"
    NEEDLESS = "refused, though program order would have gone well on these inputs"


class Unsound(AssertionError):
    """The property fails: the product accepted what it cannot run, or ran it wrong."""


@dataclasses.dataclass(frozen=True)
class Judgement:
    """A verdict, the codes of a refusal, and whether a run took fused steps."""

    verdict: Verdict
    codes: frozenset[str] = frozenset()
    fused: bool = False


def judge(
    example: strategies.Example,
    *,
    order: bool = True,
    run: bool = True,
    fuse: Sequence[str] = ("auto",),
) -> Judgement:
    """Decide about a program.

    Args:
        example: the program, its storage and inputs.
        order: judge the analysis: what it accepts must give its functional meaning in program
            order on one storage.
        run: load and run what is accepted: judges analysis, plan and runner together.
        fuse: how sessions run it, one after the other.

    Raises:
        Unsound: what the product promises does not hold.
    """
    plain = example.plain()
    try:
        compiled = program.build(example.declaration)
    except errors.ContractError as error:
        return _refused(example, plain, error)
    if order:
        demand(harmless(example, plain), "accepted, but program order on one storage goes wrong")
    if run:
        try:
            loaded = loader.load(compiled)
        except errors.ContractError as error:
            return _never_fits(example, plain, error)
        fused = [_accepted(example, plain, compiled, loaded, word) for word in fuse]
        return Judgement(Verdict.HOLDS, fused=any(fused))
    return Judgement(Verdict.HOLDS)


def _never_fits(
    example: strategies.Example, plain: bytes, error: errors.ContractError
) -> Judgement:
    """What a call makes known is decided on the flat model: a write that fits in no run (E112)."""
    codes = frozenset(f.code for f in error.findings)
    demand(codes == {"E112"}, f"compiled, but not loaded: {error}")
    model = interpreter.Model.parse(plain)
    for feed in example.feeds:
        try:
            interpreter.functional(model, {**feed, **example.storage})
        except interpreter.OutOfRange:
            continue
        raise Unsound(f"refused as if it fitted in no run, but it fits: {error}")
    return Judgement(Verdict.REFUSED, codes)


def _refused(example: strategies.Example, plain: bytes, error: errors.ContractError) -> Judgement:
    codes = frozenset(f.code for f in error.findings)
    demand(bool(codes) and codes <= set(errors.RULES), f"codes {sorted(codes)} of a refusal")
    demand(all(f.location is not None for f in error.findings), "a finding without a place")
    verdict = Verdict.NEEDLESS if harmless(example, plain) else Verdict.REFUSED
    return Judgement(verdict, codes)


def harmless(example: strategies.Example, plain: bytes) -> bool:
    """Whether program order on one storage keeps every promise, on the inputs of the example."""
    model, declaration = interpreter.Model.parse(plain), example.declaration
    storage = {name: array.copy() for name, array in example.storage.items()}
    for feed in example.feeds:
        before = {name: array.copy() for name, array in storage.items()}
        try:
            expected = interpreter.functional(model, {**feed, **before})
            results = interpreter.in_place(model, feed, storage)
        except interpreter.OutOfRange:
            return True  # nothing is promised
        except (interpreter.Forbidden, TypeError, ValueError, IndexError, ZeroDivisionError):
            return False  # the rest: where a name that was hidden stands for another array
        returned: set[str] = set()
        for declared, wanted, got in zip(declaration.returns, expected, results, strict=True):
            if not np.array_equal(wanted, got):
                return False
            if declared is None:
                if any(interpreter.overlap(got, s) for s in storage.values()):
                    return False
            elif not _same(got, storage.get(declared)):
                return False
            else:
                returned.add(declared)
        for name, array in storage.items():
            if name not in returned and not np.array_equal(array, before[name]):
                return False  # a lost update
    return True


def _same(a: np.ndarray, b: np.ndarray | None) -> bool:
    return b is not None and a.shape == b.shape and a.ctypes.data == b.ctypes.data


def _accepted(
    example: strategies.Example,
    plain: bytes,
    compiled: program.Program,
    loaded: loader.Loaded,
    fuse: str,
) -> bool:
    """Run it; whether in fused steps."""
    model = interpreter.Model.parse(compiled.serialized)
    reference = _stock(compiled.serialized) if example.stock and _stock_can(compiled) else None
    try:
        session = Session(loaded, fuse=fuse)
    except errors.InplaceError as error:
        raise Unsound(f"compiled, but no session: {error}") from error
    fences = {name: _fenced(array) for name, array in example.storage.items()}
    storage = {name: array for name, (array, _) in fences.items()}
    kept: list[tuple[np.ndarray, np.ndarray]] = []
    fused = False
    with session.bind(**storage) as step:
        for feed in example.feeds:
            before = {name: array.copy() for name, array in storage.items()}
            given = {name: array.copy() for name, array in feed.items()}
            try:
                expected = interpreter.functional(model, {**given, **before})
            except interpreter.OutOfRange:
                needed = _needed(plain, feed, before)
                _refuses(step, feed, storage, before, needed)
                return fused
            if reference is not None:
                _agrees(reference.run(None, {**given, **before}), expected, "stock onnxruntime")
            try:
                outputs = step.run(**feed)
                fused = fused or step._frame.frame.fused
            except errors.InplaceError as error:
                raise Unsound(f"accepted, but not run: {error!r}") from error
            _check(example.declaration, feed, given, storage, before, list(outputs), expected)
            for array, copy in kept:
                demand(np.array_equal(array, copy), "a run changed a result of the run before")
                array[...] = 77  # the caller's own: what it does with it changes no later run
            pairs = zip(example.declaration.returns, outputs, strict=True)
            kept = [(array, array.copy()) for declared, array in pairs if declared is None]
            for name, (_, fence) in fences.items():
                demand(bool((fence == FENCE).all()), f"memory beside {name} was written")
    return fused


def _fenced(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A copy that stands inside of a larger array, and what stands beside it."""
    whole = np.full(array.size + 2 * MARGIN, FENCE, array.dtype)
    inner = whole[MARGIN : MARGIN + array.size].reshape(array.shape)
    inner[...] = array
    strides = ((MARGIN + array.size) * whole.itemsize, whole.itemsize)
    return inner, np.lib.stride_tricks.as_strided(whole, (2, MARGIN), strides, writeable=False)


def _check(declaration, feed, given, storage, before, outputs, expected) -> None:
    _agrees(outputs, expected, "in place")
    last = dict(before)  # the last version of each root: what is returned, or else what was there
    pairs = zip(declaration.returns, outputs, expected, strict=True)
    for k, (declared, array, wanted) in enumerate(pairs):
        if declared is not None:
            demand(array is storage[declared], f"result {k} is not the array lent as {declared}")
            last[declared] = wanted
            continue
        for name, other in {**storage, **feed}.items():
            demand(not interpreter.overlap(array, other), f"result {k} shares memory with {name}")
    for name, array in storage.items():
        demand(np.array_equal(array, last[name]), f"{name} does not hold its last version")
    for name, array in feed.items():
        demand(np.array_equal(array, given[name]), f"the input {name} was changed")


def _agrees(results, expected, who: str) -> None:
    for k, (got, wanted) in enumerate(zip(results, expected, strict=True)):
        demand(
            got.shape == wanted.shape,
            f"{who}: result {k} has shape {got.shape}, not {wanted.shape}",
        )
        demand(got.dtype == wanted.dtype, f"{who}: result {k} is {got.dtype}, not {wanted.dtype}")
        demand(
            np.array_equal(got, wanted),
            f"{who}: result {k} is {got.tolist()}, not {wanted.tolist()}",
        )


def _needed(plain: bytes, feed: dict, before: dict) -> bool:
    """Whether the write that does not fit is one of lent storage."""
    copies = {name: array.copy() for name, array in before.items()}
    try:
        interpreter.in_place(interpreter.Model.parse(plain), feed, copies)
    except interpreter.Undefined:
        return False
    except interpreter.OutOfRange:
        return True
    raise Unsound("in program order everything fits")


def _refuses(step, feed, storage, before, needed: bool) -> None:
    """A write that does not fit: an error; nothing was written, or the binding says so.

    Only what is ``needed`` must fail: a value that nobody lent and nobody reads is not computed,
    and onnxruntime has errors of its own for it.
    """
    expected = (errors.CapacityError,) if needed else (errors.CapacityError, errors.OperatorError)
    try:
        step.run(**feed)
    except expected:
        if all(np.array_equal(array, before[name]) for name, array in storage.items()):
            return
        try:
            step.run(**feed)
        except errors.DirtyState:
            return
        raise Unsound("a failed run left a write behind, and the binding is not dirty") from None
    demand(not needed, "a write that does not fit was run")


def _stock_can(compiled: program.Program) -> bool:
    """Whether stock onnxruntime runs the file as it means.

    onnxruntime 1.32 drops the overload of a call that stands in a function: a second variant of an
    operator inside of a function is run as the first one (docs/format.md).
    """
    functions = compiled.proto.functions
    return not any(node.overload for f in functions for node in _all_nodes(f.node))


def _all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            yield from _all_nodes(attribute.g.node)


def _stock(serialized: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    # onnxruntime 1.32 cannot inline every If whose condition it has found to be a constant
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])


def demand(condition: bool, what: str) -> None:
    if not condition:
        raise Unsound(what)
