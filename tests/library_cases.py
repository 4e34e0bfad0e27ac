"""Small sub-sessions, one for each thing that onnxruntime does with memory.

    python tests/library_cases.py THREADS

prints, by name of the case, what was measured, what the plan says, and what it says is estimated.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import allocations
import numpy as np
import peaks

from onnx_inplace import Session, compiler
from onnx_inplace.compiler.memory import machine
from onnx_inplace.dsl import FLOAT, FLOAT16, Tensor, domain, model, op, weight

SIZES = {"n": 100}
microsoft = domain("com.microsoft", 1)
RANDOM = np.random.default_rng(0)


def constant(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape, np.float32)


def program(body: Callable[[Tensor], Tensor], kind: Any = FLOAT["n", 64]) -> compiler.Program:
    """``body`` between two operators whose memory is known, so that its own is seen."""

    @model
    def case(x: kind) -> FLOAT[...]:
        return op.Neg(body(op.Neg(x)))

    return case


UNARY = [
    "Abs", "Ceil", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "Identity",
    "LeakyRelu", "Log", "LogSoftmax", "Neg", "Reciprocal", "Relu", "Selu", "Sigmoid", "Sign",
    "Sin", "Softmax", "Softplus", "Softsign", "Sqrt", "Tanh", "ThresholdedRelu",
]  # fmt: skip
BINARY = ["Add", "Div", "Max", "Mean", "Min", "Mul", "Pow", "Sub", "Sum"]


def quantized(bits: int, accuracy: int, block: int) -> Callable[[Tensor], Tensor]:
    inner, columns = 64, 96
    blocks = -(-inner // block)
    codes = RANDOM.integers(0, 255, (columns, blocks, block * bits // 8)).astype(np.uint8)
    return lambda a: microsoft.MatMulNBits(
        a,
        weight(codes, f"codes{bits}{accuracy}{block}"),
        weight(np.ones(columns * blocks, np.float32), f"scales{bits}{accuracy}{block}"),
        K=inner,
        N=columns,
        bits=bits,
        block_size=block,
        accuracy_level=accuracy,
    )


def chain(a: Tensor) -> Tensor:
    """A dead value of the same shape is written over, one of another shape is not."""
    b = op.Concat(op.Exp(a), a, axis=1)
    c = op.Slice(op.Cos(op.Sin(b)), [0], [64], [1])
    return op.Add(c, op.Exp(op.Sin(c)))


def order(a: Tensor) -> Tensor:
    """What is executed first decides what is alive together."""
    small = op.ReduceSum(op.Exp(a), [1], keepdims=1)
    large = op.Concat(a, op.Sin(a), op.Cos(a), axis=1)
    return op.Mul(small, op.ReduceMax(op.Exp(large), [1], keepdims=1)) + a


def norms(a: Tensor) -> Tensor:
    a = op.LayerNormalization(a, constant(64), constant(64))
    return op.RMSNormalization(a, constant(64))


def attention(causal: int) -> Callable[[Tensor], Tensor]:
    return lambda a: op.Attention(
        op.Exp(a), op.Sin(a), op.Cos(a), is_causal=causal, q_num_heads=4, kv_num_heads=4
    )


def recurrent(kind: str, gates: int) -> Callable[[Tensor], Tensor]:
    def body(a: Tensor) -> Tensor:
        w, r = constant(1, gates * 64, 64), constant(1, gates * 64, 64)
        y, *_ = getattr(op, kind)(a, w, r, hidden_size=64)
        return y

    return body


def half(a: Tensor) -> Tensor:
    """Float16 is computed in float32, between casts; in a row there is none between two."""
    h = op.Cast(a, to=FLOAT16.dtype)
    return op.Cast(op.Tanh(op.Add(op.Exp(h), h)), to=FLOAT.dtype)


def unary(name: str) -> Callable[[], compiler.Program]:
    return lambda: program(lambda a: getattr(op, name)(a))


def binary(name: str) -> Callable[[], compiler.Program]:
    return lambda: program(lambda a: getattr(op, name)(a, op.Exp(a)))


CASES: dict[str, Callable[[], compiler.Program]] = {
    **{name: unary(name) for name in UNARY},
    **{name: binary(name) for name in BINARY},
    "Clip": lambda: program(lambda a: op.Clip(a, np.float32(-1), np.float32(1))),
    "bias": lambda: program(lambda a: a + constant(64)),
    "Reshape": lambda: program(lambda a: op.Exp(op.Reshape(a, [-1, 8, 8]))),
    "Transpose": lambda: program(lambda a: op.Transpose(a, perm=[1, 0])),
    "Concat": lambda: program(lambda a: op.Concat(a, a, axis=1)),
    "Split": lambda: program(lambda a: op.Mul(*op.Split(a, axis=1, num_outputs=2))),
    "Slice": lambda: program(lambda a: op.Slice(a, [0], [32], [1])),
    "Gather": lambda: program(lambda a: op.Gather(a, [0, 5], axis=1)),
    "ReduceSum": lambda: program(lambda a: op.ReduceSum(a, [1])),
    "ReduceMean": lambda: program(lambda a: op.ReduceMean(a, [0])),
    "Where": lambda: program(lambda a: op.Where(op.Less(a, op.Exp(a)), a, op.Sin(a))),
    "Softmax of the first axis": lambda: program(lambda a: op.Softmax(a, axis=0)),
    "norms": lambda: program(norms),
    "MatMul": lambda: program(lambda a: op.MatMul(a, constant(64, 128))),
    "MatMul of values": lambda: program(lambda a: op.MatMul(op.Transpose(a, perm=[1, 0]), a)),
    "MatMul and bias": lambda: program(lambda a: op.MatMul(a, constant(64, 128)) + constant(128)),
    "MatMul and scale": lambda: program(
        lambda a: op.MatMul(op.Transpose(op.Exp(a), perm=[1, 0]), a) * 0.5
    ),
    "Gemm": lambda: program(lambda a: op.Gemm(a, constant(128, 64), constant(128), transB=1)),
    "SiLU": lambda: program(lambda a: a * op.Sigmoid(a)),
    "gated": lambda: program(lambda a: op.Exp(a) * (a * op.Sigmoid(a))),
    "Cast to the same type": lambda: program(lambda a: op.Cast(a, to=FLOAT.dtype)),
    "half": lambda: program(half),
    "chain": lambda: program(chain),
    "order": lambda: program(order),
    "LSTM": lambda: program(recurrent("LSTM", 4), FLOAT["n", 2, 64]),
    "GRU": lambda: program(recurrent("GRU", 3), FLOAT["n", 2, 64]),
    "Conv": lambda: program(
        lambda a: op.Conv(a, constant(32, 16, 3), kernel_shape=[3], pads=[1, 1]),
        FLOAT[1, 16, "n"],
    ),
    "Attention": lambda: program(attention(0), FLOAT[2, "n", 256]),
    "causal Attention": lambda: program(attention(1), FLOAT[2, "n", 256]),
    **{
        f"MatMulNBits {bits} bits, accuracy {accuracy}, blocks of {block}": (
            lambda bits=bits, accuracy=accuracy, block=block: program(
                quantized(bits, accuracy, block)
            )
        )
        for bits in (4, 8)
        for accuracy in (0, 4)
        for block in (16, 32, 64)
    },
}  # fmt: skip


def measured(case: compiler.Program, threads: int) -> tuple[int, int, list[str]]:
    """Bytes that onnxruntime had inside of the last of several runs; what the plan says."""
    session = Session(case, threads=threads)
    (port,) = session.inputs
    x = RANDOM.random([SIZES.get(d, d) for d in port.shape], np.float32)
    found = []
    with session.bind() as step:
        for _ in range(5):
            had = allocations.read().aligned
            allocations.restart()
            result = step.run(x=x)
            found.append(allocations.read().aligned_peak - had)
            del result
    # the first run notes shapes, the second one prepares buffers, a late thread takes its own once
    most = min(found[2:])
    plan = session.plan
    stated = peaks.inside(plan.block, plan.footprint.block, machine(SIZES, threads))
    return most, stated, list(plan.memory(**SIZES).estimates)


if __name__ == "__main__":
    peaks.take_the_arena_away()
    print(json.dumps({name: measured(make(), int(sys.argv[1])) for name, make in CASES.items()}))
