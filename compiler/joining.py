"""All sub-sessions of a plan as one model, in which what stands between them are operators of ours.

A session of the library (onnxruntime) has threads of its own. With a session for each stretch of
ordinary nodes they are woken at each of them: 31 times a token for a decoder of 30 layers. In one
session they stay awake, and our kernels may use them, too.

**Order.** The library orders nodes by the values that pass between them; writes of caches pass
none. So every call takes what the one before it gave, and all that the sub-session before it makes
for others: whatever of that the library refuses, it refuses before the call writes.

**Memory.** Shapes inside are not declared, as they are for a sub-session: where the library knows
that values are of one size, it keeps a dead one for the next, and in a model of all layers until
the last of them. A prompt of 512 tokens of SmolLM2 then held 49.6 MB, and 20.2 so; the plan states
28.3, for values between sub-sessions and inside of them.

**No roots.** Storage of the caller never passes through the library: a read of it by an ordinary
node would not be ordered against the writes. A plan with such reads is not joined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import onnx
import onnx_ir as ir

from onnx_inplace.compiler.steps import ExecutionPlan, Kernel, Port, Step, SubSession, View

DOMAIN = "onnx_inplace.calls"
"""Of the operators that stand for our steps; they exist in this model alone."""


@dataclasses.dataclass(frozen=True)
class Call:
    """Steps between two sub-sessions, as an operator: ``(token, *inputs) -> (token, *outputs)``.

    Attributes:
        op_type: of the operator, in ``DOMAIN``; each call has its own.
        steps: what it does, in order.
        inputs: what the steps read of the library's values.
        unread: inputs behind those, which only have to be there before.
        outputs: what the steps make for others.
    """

    op_type: str
    steps: tuple[Kernel | View, ...]
    inputs: tuple[Port, ...]
    unread: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclasses.dataclass(frozen=True)
class Joined:
    """One model for the main block of a plan.

    Attributes:
        session: the model. Behind the ports of its inputs and outputs it has ``token``, int64[1],
            and ``last``, int64[1], which is the same number.
        token: name of the input that the first call takes.
        last: name of the output that the last call gives.
        calls: the operators, in the order in which they run.
    """

    session: SubSession
    token: str
    last: str
    calls: tuple[Call, ...]


def join(plan: ExecutionPlan) -> Joined | None:
    """The main block of a plan as one model; None where that cannot be.

    It cannot where the block has steps with bodies, where a sub-session reads storage of the
    caller, where what passes is no tensor of whole bytes, and where some sub-sessions may pack
    their weights and others must not.
    """
    stretches = list(_stretches(plan.block.steps))
    sessions = [s for s in stretches if isinstance(s, SubSession)]
    if not sessions or len({s.packs for s in sessions}) > 1:
        return None
    if any(not isinstance(s, SubSession | Kernel | View) for s in plan.block.steps):
        return None
    wanted = list(dict.fromkeys(o.slot for o in plan.outputs if o.root is None))
    calls = _calls(plan, stretches, wanted)
    passing = {p.slot for s in sessions for p in (*s.inputs, *s.outputs)}
    passing.update(p.slot for c in calls for p in (*c.inputs, *c.outputs))
    if not all(_passes(plan, slot) for slot in passing):
        return None
    made = {p.slot: p for s in sessions for p in s.outputs}
    made |= {p.slot: p for c in calls for p in c.outputs}
    if not made.keys() >= set(wanted):
        return None  # an input is an output, or a constant
    entering = {p.slot: p for s in sessions for p in s.inputs if p.slot not in made}
    return _joined(plan, stretches, calls, [*entering.values()], [made[slot] for slot in wanted])


def _stretches(steps: Sequence[Step]) -> Iterator[SubSession | tuple[Step, ...]]:
    """Sub-sessions, and what stands between them."""
    between: list[Step] = []
    for step in steps:
        if isinstance(step, SubSession):
            if between:
                yield tuple(between)
            yield step
            between = []
        else:
            between.append(step)
    if between:
        yield tuple(between)


def _passes(plan: ExecutionPlan, slot: int) -> bool:
    """Whether the library may hold a value: a tensor with elements of whole bytes, no storage."""
    dtype = plan.values[slot].dtype
    whole = dtype is not None and dtype != ir.DataType.STRING and dtype.bitwidth >= 8
    return whole and is_own(plan, slot)


def is_own(plan: ExecutionPlan, slot: int) -> bool:
    """Whether a value is neither storage of the caller nor a paged cache."""
    value = plan.values[slot]
    return value.root is None and value.pages is None


def _reads(step: Kernel | View) -> Iterator[int]:
    found = step.inputs if isinstance(step, Kernel) else (step.source, step.parameter)
    yield from (slot for slot in found if slot is not None)


def makes(step: Kernel | View) -> Iterator[int]:
    """Slots that a step fills."""
    found = step.outputs if isinstance(step, Kernel) else (step.output,)
    yield from (slot for slot in found if slot is not None)


def _calls(
    plan: ExecutionPlan, stretches: Sequence[SubSession | tuple[Step, ...]], wanted: Iterable[int]
) -> list[Call]:
    """The calls in order; what they make and nobody else needs stays inside."""
    names = {p.slot: p for s in stretches if isinstance(s, SubSession) for p in s.inputs}
    needed, between = {*wanted, *names}, [s for s in stretches if isinstance(s, tuple)]
    groups = [[s for s in group if isinstance(s, Kernel | View)] for group in between]
    for group in groups:
        inside = {slot for step in group for slot in makes(step)}
        needed.update(slot for step in group for slot in _reads(step) if slot not in inside)
    calls: list[Call] = []
    held: dict[int, Port] = {}
    before: tuple[Port, ...] = ()
    waiting = iter(groups)
    for stretch in stretches:
        if isinstance(stretch, SubSession):
            before = stretch.outputs
            held |= {p.slot: p for p in before}
            continue
        steps = tuple(next(waiting))
        read = dict.fromkeys(slot for step in steps for slot in _reads(step) if slot in held)
        made = dict.fromkeys(
            slot for step in steps for slot in makes(step) if slot in needed and is_own(plan, slot)
        )
        outputs = tuple(names.get(slot) or Port(plan.values[slot].name, slot) for slot in made)
        calls.append(
            Call(
                f"Call{len(calls)}",
                steps,
                tuple(held[slot] for slot in read),
                tuple(p for p in before if p.slot not in read),
                outputs,
            )
        )
        held |= {p.slot: p for p in outputs}
        before = ()
    return calls


def _joined(
    plan: ExecutionPlan,
    stretches: Sequence[SubSession | tuple[Step, ...]],
    calls: Sequence[Call],
    entering: Sequence[Port],
    leaving: Sequence[Port],
) -> Joined:
    sessions = [s for s in stretches if isinstance(s, SubSession)]
    models = [onnx.ModelProto.FromString(s.model) for s in sessions]
    known = {v.name: v for m in models for v in (*m.graph.input, *m.graph.output)}
    used = set(known) | {name for m in models for n in m.graph.node for name in n.output}
    tokens = [_unused(f"token.{number}", used) for number in range(len(calls) + 1)]
    nodes: list[onnx.NodeProto] = []
    left, waiting, token = iter(models), iter(calls), iter(tokens)
    before = next(token)
    for stretch in stretches:
        if isinstance(stretch, SubSession):
            nodes.extend(next(left).graph.node)
            continue
        call, after = next(waiting), next(token)
        inputs = [before, *(p.name for p in (*call.inputs, *call.unread))]
        outputs = [after, *(p.name for p in call.outputs)]
        nodes.append(onnx.helper.make_node(call.op_type, inputs, outputs, domain=DOMAIN))
        before = after
    graph = onnx.helper.make_graph(
        nodes,
        "joined",
        [*(_info(plan, p, known) for p in entering), _token(tokens[0])],
        [*(_info(plan, p, known) for p in leaving), _token(tokens[-1])],
        initializer=list({t.name: t for m in models for t in m.graph.initializer}.values()),
    )
    domains = {o.domain: o for m in models for o in m.opset_import}
    functions = {(f.domain, f.name, f.overload): f for m in models for f in m.functions}
    proto = onnx.helper.make_model(
        graph,
        ir_version=max(m.ir_version for m in models),
        opset_imports=[*domains.values(), onnx.helper.make_opsetid(DOMAIN, 1)],
        functions=list(functions.values()),
    )
    session = SubSession(
        proto.SerializeToString(deterministic=True),
        tuple(entering),
        tuple(leaving),
        tuple({w.name: w for s in sessions for w in s.weights}.values()),
        sessions[0].packs,
    )
    return Joined(session, tokens[0], tokens[-1], tuple(calls))


def _unused(name: str, used: set[str]) -> str:
    while name in used:
        name += "_"
    return name


def _token(name: str) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, [1])


def _info(
    plan: ExecutionPlan, port: Port, infos: dict[str, onnx.ValueInfoProto]
) -> onnx.ValueInfoProto:
    """What a sub-session says of a value, or the plan, where only calls of ours know it."""
    if port.name in infos:
        return infos[port.name]
    value = plan.values[port.slot]
    assert value.dtype is not None
    return onnx.helper.make_tensor_value_info(port.name, value.dtype.value, value.shape)
