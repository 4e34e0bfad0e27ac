# ruff: noqa: F841, B007, RUF021  (programs as authors write them, faulty ones among them)
"""Python values run, tensors record: statements and expressions that decide."""

import dataclasses

import numpy as np
import pytest
from recorded import one, operators, outputs, proto, reference, shapes, stock, walk

from onnx_inplace.dsl import BOOL, FLOAT, FLOAT16, INT64, Alias, Mutable, function, kv, model, op

Cache, New = FLOAT["heads", "capacity", 4], FLOAT["heads", "n", 4]

# -- if


def test_if_over_a_python_value_leaves_one_branch() -> None:
    fast = True

    @model
    def program(x: FLOAT["n"]) -> FLOAT["n"]:
        if fast:
            return op.Relu(x)
        return op.Abs(x)

    assert operators(program) == ["Relu"]


@pytest.mark.parametrize("k", [True, False])
def test_if_over_a_tensor_becomes_an_if(k: bool) -> None:
    @model
    def program(x: FLOAT["n"], k: BOOL[()]) -> FLOAT["n"]:
        if k:
            x = x * 2.0
        return x

    assert operators(program) == ["If"]
    assert one(program, x=[1, 2], k=k).tolist() == ([2, 4] if k else [1, 2])


@pytest.mark.parametrize("i", range(4))
def test_elif_chains_nest(i: int) -> None:
    @model
    def program(i: INT64[()]) -> INT64[()]:
        if i == 0:
            y = i + 10
        elif i == 1:
            y = i + 20
        elif i == 2:
            y = i + 30
        else:
            y = i + 40
        return y

    assert one(program, i=i) == i + 10 * (i + 1)


def test_a_variable_of_one_branch_may_stay_unused() -> None:
    @model
    def program(x: FLOAT["n"], k: BOOL[()]) -> FLOAT["n"]:
        if k:
            doubled = x * 2.0
            x = doubled
        return x

    [node] = proto(program).graph.node
    assert len(node.output) == 1


def test_a_temporary_that_differs_in_type_may_stay_unused() -> None:
    @model
    def program(x: FLOAT["n"], i: INT64[()], k: BOOL[()]) -> FLOAT["n"]:
        if k:
            t = x * 2.0
            x = t
        else:
            t = i + 1
            x = x + op.Cast(t, to=FLOAT)
        return x

    assert one(program, x=[1], i=3, k=False) == [5]


def test_outputs_that_nobody_reads_are_dropped_inside_out() -> None:
    @model
    def program(x: FLOAT["n"], a: BOOL[()], b: BOOL[()]) -> FLOAT["n"]:
        y = x
        if a:
            x = x + 1.0
            if b:
                y = x * 3.0
        return x

    [node] = proto(program).graph.node
    assert node.op_type == "If" and list(node.output) == outputs(program)
    assert [n.op_type for n in walk(proto(program).graph)] == ["If", "Constant", "Add", "Identity"]


def test_a_number_in_one_branch_takes_the_type_of_the_other() -> None:
    @model
    def program(x: FLOAT16["n"], k: BOOL[()]) -> FLOAT16[()]:
        y = op.ReduceMax(x, keepdims=0)
        if k:
            y = 1.5
        return y

    assert one(program, x=[2], k=True) == np.float16(1.5)


def test_numbers_in_both_branches_become_one_tensor() -> None:
    @model
    def program(k: BOOL[()]) -> FLOAT[()]:
        if k:
            y = 1
        else:
            y = 2.5
        return y

    assert [one(program, k=k) for k in (True, False)] == [1.0, 2.5]


def test_equal_python_values_stay_python_values() -> None:
    @model
    def program(x: FLOAT[2, 3], k: BOOL[()]) -> FLOAT["a", "b"]:
        if k:
            axis = 1
            x = x + 1.0
        else:
            axis = 1
        return op.ReduceSum(x, [axis])  # a tensor would do as well, a Python number is inferred

    assert shapes(program) == [(2, 1)]


def test_structures_leave_branches_member_by_member() -> None:
    @model
    def program(x: FLOAT["n"], y: FLOAT["n"], k: BOOL[()]) -> tuple[FLOAT["n"], FLOAT["n"]]:
        pair = (x, y)
        if k:
            pair = (y, x)
        return pair

    assert [v.tolist() for v in stock(program, x=[1], y=[2], k=True).values()] == [[2], [1]]


def test_a_python_loop_inside_of_a_branch_may_break() -> None:
    @model
    def program(x: FLOAT["n"], k: BOOL[()]) -> FLOAT["n"]:
        if k:
            for j in range(10):
                if j == 3:
                    break
                x = x + float(j)
        return x

    assert one(program, x=[0], k=True) == [3]


@pytest.mark.parametrize("keep", [True, False])
def test_branches_may_write_or_not(keep: bool) -> None:
    @model
    def program(cache: Mutable[Cache], new: New, p: INT64[()], keep: BOOL[()]) -> Alias["cache"]:
        if keep:
            cache = kv.CacheUpdate(cache, new, p)
        return cache

    assert outputs(program) == ["updated_cache"]
    got = one(program, cache=np.zeros((1, 3, 4)), new=np.ones((1, 1, 4)), p=1, keep=keep)
    assert got[0, :, 0].tolist() == [0, int(keep), 0]


# -- for


def test_a_loop_over_python_values_is_unrolled() -> None:
    @model
    def program(x: FLOAT["n"]) -> FLOAT["n"]:
        for scale in (2.0, 3.0):
            x = x * scale
        return x + scale

    assert operators(program).count("Mul") == 2
    assert one(program, x=[1]) == [9]


@pytest.mark.parametrize(
    ("start", "stop", "step"),
    [(0, 4, 1), (4, 0, 1), (1, 8, 3), (1, 9, 3), (8, 1, -3), (1, 8, -1), (-5, 5, 4), (0, 0, 7)],
)
def test_range_of_tensors_counts_as_pythons(start: int, stop: int, step: int) -> None:
    @model
    def constant_step(a: INT64[()], b: INT64[()]) -> tuple[INT64[()], INT64[()]]:
        total, count = 0, 0
        for i in range(a, b, step):
            total, count = total * 3 + i, count + 1
        return total, count

    @model
    def any_step(a: INT64[()], b: INT64[()], s: INT64[()]) -> tuple[INT64[()], INT64[()]]:
        total, count = 0, 0
        for i in range(a, b, s):
            total, count = total * 3 + i, count + 1
        return total, count

    total, count = 0, 0
    for i in range(start, stop, step):
        total, count = total * 3 + i, count + 1
    assert [int(v) for v in stock(constant_step, a=start, b=stop).values()] == [total, count]
    assert [int(v) for v in stock(any_step, a=start, b=stop, s=step).values()] == [total, count]


def test_loops_nest_and_hide_their_variable() -> None:
    @model
    def program(n: INT64[()]) -> INT64[()]:
        total = 0
        for i in range(n):
            for j in range(i):
                if j % 2 == 0:
                    total += i * j
        return total

    assert one(program, n=7) == sum(i * j for i in range(7) for j in range(0, i, 2))


def test_a_carried_number_takes_the_type_of_what_it_meets() -> None:
    @model
    def program(x: FLOAT16[()], n: INT64[()]) -> tuple[FLOAT16[()], INT64[()]]:
        total, count = 0.0, 0
        for _ in range(n):
            total = total * 0.5 + x
            count += 1
        return total, count

    got = list(stock(program, x=2, n=3).values())
    assert got[0].dtype == np.float16 and got[0] == 3.5 and got[1] == 3


def test_a_number_that_becomes_a_fraction_is_carried_as_one() -> None:
    @model
    def program(n: INT64[()]) -> FLOAT[()]:
        x = 8
        for _ in range(n):
            x = x * 0.5
        return x

    assert one(program, n=2) == 2.0


def test_what_a_loop_leaves_alone_is_not_carried() -> None:
    @model
    def program(x: FLOAT["n"], y: FLOAT["n"], n: INT64[()]) -> FLOAT["n"]:
        z = y
        for _ in range(n):
            z = y
            x = x + z
        return x

    [loop] = [n for n in proto(program).graph.node if n.op_type == "Loop"]
    assert len(loop.input) == 3 and len(loop.output) == 1
    assert one(program, x=[1], y=[2], n=3) == [7]


def test_carried_values_can_change_places() -> None:
    @model
    def program(a: FLOAT["n"], b: FLOAT["n"], n: INT64[()]) -> tuple[FLOAT["n"], FLOAT["n"]]:
        for _ in range(n):
            a, b = b, a
        return a, b

    assert [v.item() for v in stock(program, a=[1], b=[2], n=3).values()] == [2, 1]


def test_a_carried_shape_may_change_from_step_to_step() -> None:
    @model
    def program(x: FLOAT[1, 2], n: INT64[()]) -> FLOAT["rows", 2]:
        for _ in range(n):
            x = op.Concat(x, x, axis=0)
        return x

    assert one(program, x=[[1, 2]], n=3).shape == (8, 2)
    assert shapes(program) == [("rows", 2)]


def test_the_count_of_a_loop_is_taken_before_it() -> None:
    @model
    def program(n: INT64[()]) -> INT64[()]:
        for _ in range(n):
            n = n + 1
        return n

    assert one(program, n=3) == 6


def test_onnx_reference_takes_the_steps_of_a_loop() -> None:
    @function
    def push(cache: Mutable[Cache], new: New, p: INT64[()]) -> Alias["cache"]:
        if p != 1:
            cache = kv.CacheUpdate(cache, new, p)
        return cache

    @model
    def program(cache: Mutable[Cache], new: New, n: INT64[()]) -> tuple[Alias["cache"], INT64[()]]:
        p = 0
        for i in range(n):
            while p <= i:
                cache = push(cache, new, p)
                p += 1
        return cache, p

    feeds = {"cache": np.zeros((1, 4, 4)), "new": np.ones((1, 1, 4)), "n": 3}
    for got, expected in zip(
        reference(program, **feeds), stock(program, **feeds).values(), strict=True
    ):
        np.testing.assert_array_equal(got, expected)
    assert reference(program, **feeds)[0][0, :, 0].tolist() == [1, 0, 1, 0]


# -- while


def test_while_over_a_tensor_becomes_a_loop() -> None:
    @model
    def program(x: INT64[()]) -> tuple[INT64[()], INT64[()]]:
        steps = 0
        while x != 1 and steps < 100:
            x = x // 2 if x % 2 == 0 else 3 * x + 1
            steps += 1
        return x, steps

    assert [int(v) for v in stock(program, x=6).values()] == [1, 8]


def test_a_flag_stops_a_loop_early() -> None:
    @model
    def program(limit: INT64[()], n: INT64[()]) -> tuple[INT64[()], INT64[()]]:
        i, total, done = 0, 0, False
        while not done and i < n:
            total += i
            done = total > limit
            i += 1
        return i, total

    for limit, n in ((5, 100), (100, 3), (0, 0), (-1, 4)):
        i, total, done = 0, 0, False
        while not done and i < n:
            total, done, i = total + i, total + i > limit, i + 1
        assert [int(v) for v in stock(program, limit=limit, n=n).values()] == [i, total]


def test_while_over_python_values_runs() -> None:
    @model
    def program(x: FLOAT["n"]) -> FLOAT["n"]:
        left = 3
        while left:
            x, left = x + 1.0, left - 1
        return x

    assert "Loop" not in operators(program) and one(program, x=[0]) == [3]


# -- expressions


@pytest.mark.parametrize("a", [True, False])
@pytest.mark.parametrize("b", [True, False])
def test_logic_mixes_python_values_and_tensors(a: bool, b: bool) -> None:
    @model
    def program(a: BOOL[()], b: BOOL[()]) -> tuple[BOOL[()], BOOL[()], BOOL[()], BOOL[()]]:
        return a and not b, True and a or b, a or (b and False), not (a and b and True)

    expected = [a and not b, a or b, a, not (a and b)]
    assert [bool(v) for v in stock(program, a=a, b=b).values()] == expected


def test_python_logic_stops_early() -> None:
    @model
    def program(x: FLOAT["n"]) -> FLOAT["n"]:
        nothing = None
        if nothing is not None and nothing.missing:
            x = x + 1.0
        return x * (nothing or 2.0)

    assert operators(program) == ["Constant", "Mul"]


@pytest.mark.parametrize("x", [-1, 0, 1, 5, 6])
def test_comparisons_chain(x: int) -> None:
    @model
    def program(x: INT64[()]) -> tuple[BOOL[()], BOOL[()]]:
        return 0 <= x < 6, 0 < x <= 5 != 3

    assert [bool(v) for v in stock(program, x=x).values()] == [0 <= x < 6, 0 < x <= 5 != 3]


def test_an_operand_of_a_chain_is_recorded_once() -> None:
    @model
    def program(x: INT64[()]) -> BOOL[()]:
        return 0 < op.Abs(x) < 5

    assert operators(program).count("Abs") == 1


@pytest.mark.parametrize("k", [True, False])
def test_a_conditional_expression_decides(k: bool) -> None:
    @model
    def program(x: FLOAT["n"], k: BOOL[()]) -> FLOAT["n"]:
        return (x + 1.0 if k else x - 1.0) * (2.0 if operators else 3.0)

    assert one(program, x=[1], k=k) == [4 if k else 0]


# -- members of structures


def test_members_can_be_assigned_in_branches_and_loops() -> None:
    @model
    def program(
        caches: tuple[Mutable[Cache], Mutable[Cache]], new: New, k: BOOL[()], n: INT64[()]
    ) -> Alias["caches"]:
        state = list(caches)
        same = state
        for layer in range(2):
            if k:
                state[layer] = kv.CacheUpdate(state[layer], new, layer)
        for i in range(n):
            for layer in range(2):
                same[layer] = kv.CacheUpdate(same[layer], new * 2.0, i + 2)
        return state

    zeros = np.zeros((1, 5, 4))
    feeds = {"caches.0": zeros, "caches.1": zeros, "new": np.ones((1, 1, 4)), "n": 2}
    got = [v[0, :, 0].tolist() for v in stock(program, **feeds, k=True).values()]
    assert got == [[1, 0, 2, 2, 0], [0, 1, 2, 2, 0]]


def test_attributes_and_keys_can_be_assigned_as_well() -> None:
    @dataclasses.dataclass
    class State:
        a: object
        b: object

    @model
    def program(x: FLOAT["n"], k: BOOL[()], n: INT64[()]) -> tuple[FLOAT["n"], FLOAT["n"]]:
        state, named = State(x, x), {"y": x}
        if k:
            state.a = state.a + 1.0
            named["y"] = state.a * 2.0
        for _ in range(n):
            state.b = state.b + named["y"]
        return state.a, state.b

    assert [v.item() for v in stock(program, x=[1], k=True, n=2).values()] == [2, 9]
    assert [v.item() for v in stock(program, x=[1], k=False, n=1).values()] == [1, 2]


def test_numbers_take_their_type_through_nested_loops() -> None:
    @model
    def program(x: FLOAT16[()], n: INT64[()], k: BOOL[()]) -> FLOAT16[()]:
        total = 0.0
        for _ in range(n):
            for _ in range(n):
                if k:
                    total = total + x
                else:
                    total = 1.0
        return total

    assert one(program, x=1.5, n=2, k=True) == np.float16(6)
    assert one(program, x=1.5, n=2, k=False) == 1


# -- what is Python's stays Python's


def test_closures_see_variables_that_blocks_assign() -> None:
    @model
    def program(x: FLOAT["n"]) -> FLOAT["n"]:
        scale = 1.0

        def scaled(y):
            return y * scale

        for k in range(3):
            scale = float(k)
            x = scaled(x + 1.0)
        return x

    x = 0.0
    for k in range(3):
        x = (x + 1.0) * k
    assert one(program, x=[0]) == [x]


def test_functions_inside_decide_as_well() -> None:
    @model
    def program(x: FLOAT["n"], k: BOOL[()]) -> FLOAT["n"]:
        def doubled(y):
            if k:
                y = y * 2.0
            return y

        return doubled(doubled(x))

    assert one(program, x=[1], k=True) == [4]


def test_python_keeps_comprehensions_strings_and_try() -> None:
    @model
    def program(xs: tuple[FLOAT["n"], FLOAT["n"]]) -> FLOAT["n"]:
        names = {f"x{k}": x for k, x in enumerate(xs)}
        try:
            total = names["missing"]
        except KeyError:
            total = sum((names[n] for n in sorted(names)), start=0.0)
        return total

    assert stock(program, **{"xs.0": [1], "xs.1": [2]})["total"] == [3]


def test_the_walrus_and_augmented_assignment_bind() -> None:
    @model
    def program(x: FLOAT["n"]) -> tuple[FLOAT["n"], FLOAT["n"]]:
        x += 1.0
        if (limit := 3) > 2 and limit:
            x *= float(limit)
        seen = [x]
        seen += [x + 1.0]
        return seen

    assert [v.item() for v in stock(program, x=[1]).values()] == [6, 7]


def test_a_variable_of_a_python_loop_outlives_it() -> None:
    @model
    def program(x: FLOAT["n"]) -> FLOAT["n"]:
        for k in range(3):
            pass
        return x * float(k)

    assert one(program, x=[1]) == [2]


def test_global_variables_stay_global() -> None:
    @model
    def program(x: FLOAT["n"]) -> FLOAT["n"]:
        global counted
        for _ in range(3):
            counted += 1
        return x

    assert counted == 3


counted = 0


def test_a_column_zero_string_is_no_obstacle() -> None:
    @model
    def program(x: FLOAT["n"]) -> FLOAT["n"]:
        """A docstring that reaches
        column zero.
        """
        return x + 1.0

    assert one(program, x=[1]) == [2]


def test_a_call_in_a_branch_writes_in_place() -> None:
    @function
    def push(cache: Mutable[Cache], new: New, p: INT64[()]) -> Alias["cache"]:
        return kv.CacheUpdate(cache, new, p)

    @model
    def program(cache: Mutable[Cache], new: New, n: INT64[()]) -> Alias["cache"]:
        for i in range(n):
            if i % 2 == 0:
                cache = push(cache, new, i)
        return cache

    got = one(program, cache=np.zeros((1, 4, 4)), new=np.ones((1, 1, 4)), n=4)
    assert got[0, :, 0].tolist() == [1, 0, 1, 0]


def test_annotated_variables_are_plain_ones() -> None:
    @model
    def program(x: FLOAT["n"], k: BOOL[()]) -> FLOAT["n"]:
        y: int
        if k:
            y: FLOAT = x * 2.0
        else:
            y: FLOAT = x
        return y

    assert one(program, x=[1], k=True) == [2]


def test_a_function_may_stand_inside_of_a_model() -> None:
    @model
    def program(x: FLOAT["n"], k: BOOL[()]) -> FLOAT["n"]:
        scale = 3.0

        @function
        def scaled(x: FLOAT["n"], k: BOOL[()]) -> FLOAT["n"]:
            if k:
                x = x * scale
            return x

        return scaled(x, k)

    assert operators(program) == ["scaled"] and one(program, x=[1], k=True) == [3]


def test_parameters_may_be_positional_or_keyword_only() -> None:
    @model
    def program(x: FLOAT["n"], /, y: FLOAT["n"], *, z: FLOAT["n"]) -> FLOAT["n"]:
        return x - y * z

    assert one(program, x=[10], y=[2], z=[3]) == [4]


def test_a_choice_may_be_a_structure_and_is_named_by_its_variables() -> None:
    @model
    def program(x: FLOAT["n"], y: FLOAT["n"], k: BOOL[()]) -> tuple[FLOAT["n"], FLOAT["n"]]:
        a, b = (x, y) if k else (y, x)
        return a, b

    got = stock(program, x=[1], y=[2], k=False)
    assert {n: v.item() for n, v in got.items()} == {"a": 2, "b": 1}
