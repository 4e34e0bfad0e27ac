"""Runs the steps of a plan on slots. Storage has been checked before."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime

from onnx_inplace.compiler import errors, planner, positions, steps
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner import registry
from onnx_inplace.runner.actions import Settings

Action = Callable[[list], None]


def compile_block(block: planner.Block) -> Action:
    """Make one closure per step; no dispatch is left for run time."""
    actions = [_COMPILE[type(step)](step) for step in block.steps]

    def act(slots: list) -> None:
        for action in actions:
            action(slots)

    return actions[0] if len(actions) == 1 else act


def options() -> onnxruntime.SessionOptions:
    o = onnxruntime.SessionOptions()
    o.intra_op_num_threads = o.inter_op_num_threads = 1
    o.log_severity_level = 3
    return o


def _standard(step: planner.Standard) -> Action:
    session = onnxruntime.InferenceSession(step.model, options(), providers=["CPUExecutionProvider"])
    run, inputs, outputs = session._sess.run, step.inputs, step.outputs
    names = [name for name, _ in outputs]
    places = [slot for _, slot in outputs]

    def act(slots: list) -> None:
        for place, value in zip(places, run(names, {name: slots[slot] for name, slot in inputs}, None)):
            slots[place] = value

    return act



def _write(step: planner.Write) -> Action:
    domain = "onnx_inplace" if step.op_type == "CacheUpdate" else ""
    ports = step.cache, step.values, step.position
    return registry.compile_step(
        steps.Kernel(domain, step.op_type, 1, ports, (step.output,), {"axis": step.axis}, (), {0: step.root}, {}, None), Settings())


def _read(step: planner.Read) -> Action:
    return registry.compile_step(
        steps.Kernel("", step.op_type, 24, tuple(step.inputs), (step.output,), step.attributes, (), {}, {}, None), Settings())


def _forward(step: planner.Forward) -> Action:
    def act(slots: list) -> None:
        slots[step.output] = slots[step.source]

    return act


def _branch(step: planner.Branch) -> Action:
    bodies = [compile_block(body) for body in step.bodies]
    results = [list(zip(step.outputs, body.outputs)) for body in step.bodies]

    def act(slots: list) -> None:
        k = 0 if slots[step.condition] else 1
        bodies[k](slots)
        for target, source in results[k]:
            slots[target] = slots[source]

    return act


def _repeat(step: planner.Repeat) -> Action:
    body = compile_block(step.body)
    n = len(step.initial)
    number, going, carried = step.formals[0], step.formals[1], step.formals[2:]
    again, results, stacked = step.body.outputs[0], step.body.outputs[1:1 + n], step.body.outputs[1 + n:]

    def act(slots: list) -> None:
        count = None if step.count is None else int(slots[step.count])
        condition = True if step.condition is None else bool(slots[step.condition])
        state = [slots[s] for s in step.initial]
        stacks: list[list] = [[] for _ in stacked]
        i = 0
        while condition and (count is None or i < count):
            slots[number], slots[going] = np.asarray(i, np.int64), np.asarray(condition)
            for formal, value in zip(carried, state):
                slots[formal] = value
            body(slots)
            condition = bool(slots[again])
            state = [slots[s] for s in results]
            for stack, s in zip(stacks, stacked):
                stack.append(slots[s])
            i += 1
        for output, value in zip(step.outputs, state):
            slots[output] = value
        for output, stack in zip(step.stacked, stacks):
            slots[output] = np.stack(stack)

    return act


_COMPILE = {planner.Standard: _standard, planner.Write: _write, planner.Forward: _forward, planner.Read: _read, planner.Branch: _branch, planner.Repeat: _repeat}


