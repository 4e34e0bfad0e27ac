"""An operator of your own: in place, executable anywhere, and part of one call a token.

Run me: python tutorials/06_add_an_operator.py

The operator is Leak(state, factor, value) -> updated: updated = factor * state + value, element by
element, written where the state is. Recurrent networks do this for each token.
"""

from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir

from onnx_inplace import Session, errors
from onnx_inplace.compiler import contract, fusable_context, operators, steps
from onnx_inplace.compiler.fused import Operation
from onnx_inplace.dsl import FLOAT, Alias, Mutable, domain, model, op, weight
from onnx_inplace.numba_kernels.floats import floats
from onnx_inplace.numba_kernels.fused.kernel import KERNEL, reader, share_elements
from onnx_inplace.numba_kernels.memory import address, kernel
from onnx_inplace.runner import registry
from onnx_inplace.runner.actions import Action, Settings, Slots
from onnx_inplace.runner.fused import templates
from onnx_inplace.runner.fused.table import Builder

WIDTH = 256

# First, what it promises and what it means: output 0 is the storage of input 0, and a function of
# standard operators gives the same numbers in storage of its own. Every ONNX runtime can execute
# that function; here it is what in-place runs are compared with.

RULE = contract.OperatorRule("mine", "Leak", contract.Effect.WRITE, (contract.OutputAlias(0, 0),))


def meaning(node: ir.Node, opset: int) -> onnx.FunctionProto:
    """The body of the operator."""
    return onnx.parser.parse_function(
        f"""<domain: "mine", opset_import: ["" : {opset}]>
        Leak (state, factor, value) => (updated)
        {{ kept = Mul (factor, state) updated = Add (kept, value) }}"""
    )


operators.register(RULE, meaning)

# Second, a kernel for a step of its own. It checks before it writes: a run that is refused has
# changed nothing.


def leak(step: steps.Kernel, settings: Settings) -> Action:
    """Made once, when a model is loaded; called in every run, possibly in several threads."""
    state_slot, factor_slot, value_slot = (slot for slot in step.inputs if slot is not None)
    (updated_slot,) = (slot for slot in step.outputs if slot is not None)

    def act(slots: Slots) -> None:
        state, factor, value = slots[state_slot], slots[factor_slot], slots[value_slot]
        if factor.shape != state.shape or value.shape != state.shape:
            raise errors.OperatorError(f"Leak: {factor.shape} and {value.shape} for {state.shape}")
        np.multiply(state, factor, out=state)
        np.add(state, value, out=state)
        slots[updated_slot] = state  # the very array

    return act


registry.register("mine", "Leak", leak)

# Third, a kernel for fused steps. It is told the address of its arguments and does its share of the
# work: several threads walk through the same instructions.


class Leak(NamedTuple):
    """``state = factor * state + value`` for ``size`` float32."""

    state: int
    factor: int
    value: int
    size: int


read = reader(Leak)


@kernel(KERNEL)
def leak_share(arguments: Any, thread: Any, threads: Any) -> None:
    """A Leak; threads take whole cache lines."""
    x = read(arguments)
    begin, end = share_elements(x.size, thread, threads)
    count = end - begin
    state, factor = floats(x.state + 4 * begin, count), floats(x.factor + 4 * begin, count)
    value = floats(x.value + 4 * begin, count)
    for i in range(count):
        state[i] = factor[i] * state[i] + value[i]


# Fourth, which nodes may be fused, asked when a plan is made, and the template that writes the
# instruction. ``reads`` and ``writes`` tell where threads have to wait for one another.


def rule(node: ir.Node, context: fusable_context.Context) -> str | None:
    """Why a node cannot be fused; None: it can."""
    if any(value is None or value.dtype != ir.DataType.FLOAT for value in node.inputs):
        return "not all float32"
    shapes = {context.shape(value) for value in node.inputs}
    return None if len(shapes) == 1 else "its inputs differ in shape"


def template(b: Builder, o: Operation) -> None:
    """Instructions for one node, once its sizes are known."""
    state = b.array(o.inputs[0])  # what the caller has lent
    factor, value = (b.contiguous(b.array(k)) for k in o.inputs[1:])
    block = Leak(address(state), address(factor), address(value), state.size)
    b.emit(leak_share, block, [state, factor, value], [state], first=False)
    b.view(o.outputs[0], state)


templates.register("mine", "Leak", rule, template)

# A model that uses it.

mine = domain("mine", 1)
rng = np.random.default_rng(0)


def matrix(name: str) -> Any:
    """A random weight."""
    values = rng.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)
    return weight(values.astype(np.float32), name)


@model
def cell(
    state: Mutable[FLOAT[1, WIDTH]], x: FLOAT[1, WIDTH]
) -> tuple[FLOAT[1, WIDTH], Alias["state"]]:
    """One step of a recurrent network."""
    factor = op.Sigmoid(op.MatMul(x, matrix("forget")))
    value = op.MatMul(x, matrix("take"))
    updated = mine.Leak(state, factor, value)
    y = op.MatMul(op.Tanh(updated), matrix("give"))
    return y, updated


cell.save("cell.onnx")

# All of it is one call.

xs = rng.standard_normal((20, 1, WIDTH)).astype(np.float32)
results = {}
for fuse in ("off", "auto"):
    session = Session("cell.onnx", threads=2, fuse=fuse)
    state = session.allocate("state")
    with session.bind(state=state) as run:
        for x in xs:
            out = run.run(x=x)
            assert out["updated"] is state, "the caller's array, not a copy"
    results[fuse] = out["y"], state
fused = session.plan.fused
assert not fused.refusals
print(f"{fused.regions[0].nodes} nodes in {len(fused.regions)} call")

# The same file, in a runtime that knows nothing of this: out of place, the same numbers.

reference = onnx.reference.ReferenceEvaluator("cell.onnx")
expected = np.zeros((1, WIDTH), np.float32)
for x in xs:
    y, expected = reference.run(None, {"state": expected, "x": x})
for name, (found, state) in results.items():
    error = max(abs(found - y).max(), abs(state - expected).max())
    print(f"fuse={name}: differs by {error:.1e}")
    assert error < 1e-4

# What the promise forbids is found before anything runs: the old state is gone after the write.

try:

    @model
    def stale(
        state: Mutable[FLOAT[1, WIDTH]], x: FLOAT[1, WIDTH]
    ) -> tuple[FLOAT[1, WIDTH], Alias["state"]]:
        """Reads what has been written over."""
        updated = mine.Leak(state, op.Sigmoid(x), x)
        return op.Tanh(state), updated

except errors.ContractError as refusal:
    print("refused:", refusal)

# What the rule refuses stays an ordinary step, and the plan says why.


@model
def stepwise(
    state: Mutable[FLOAT[4, WIDTH]], x: FLOAT[1, WIDTH]
) -> tuple[FLOAT[4, WIDTH], Alias["state"]]:
    """A factor for all rows of the state at once."""
    updated = mine.Leak(state, op.Sigmoid(op.MatMul(x, matrix("forget"))), x)
    return op.MatMul(updated, matrix("give")), updated


print("not fused:", *Session(stepwise).plan.fused.refusals)
