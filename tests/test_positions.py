"""Which requirements a model has, and that they are decided before a run, without running it."""

from typing import Any

import numpy as np
import pytest
import textual

from onnx_inplace import Session
from onnx_inplace.compiler import errors, loader, positions
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, function, kv, model, op
from onnx_inplace.runner import checks, inputs

CACHE, NEW = "float[heads, capacity, 2] cache", "float[heads, n, 2] new"
ZERO = np.zeros((2, 1, 2), np.float32)


class Checked:
    """The checks of a text, without a plan: nothing can be written here."""

    def __init__(self, text: str, lent: tuple[str, ...] = ("cache",), returns: Any = None):
        returns = list(lent) if returns is None else returns
        loaded = loader.load(textual.build(text, lent, returns))
        self.graph = loaded.model.graph
        self.checks = positions.build(loaded)
        self.slots = {str(v.name): k for k, v in enumerate(self.graph.inputs)}
        self.runner = checks.Prechecks(self.checks, self.slots)

    def run(self, **given: Any) -> None:
        """Raise what a run with these arguments would be refused with."""
        dims: inputs.Dims = {}
        values: list[Any] = []
        for value in self.graph.inputs:
            port = inputs.Port.of(value)
            values.append(np.asarray(given[port.name], port.dtype))
            port.unify(values[-1].shape, dims)
        for check in self.runner.prepare(dims):
            check(values)

    def refuses(self, **given: Any) -> errors.CapacityError:
        with pytest.raises(errors.CapacityError) as caught:
            self.run(**given)
        return caught.value


def values_of(error: errors.CapacityError) -> tuple[Any, ...]:
    return error.cache, error.position, error.length, error.capacity, error.batch


def cache(capacity: int = 8) -> np.ndarray:
    return np.zeros((2, capacity, 2), np.float32)


def new(length: int = 1) -> np.ndarray:
    return np.zeros((2, length, 2), np.float32)


def update(position: str = "position", values: str = "new", name: str = "cache") -> str:
    return f"onnx_inplace.CacheUpdate ({name}, {values}, {position})"


DIRECT = (
    f"g ({CACHE}, {NEW}, int64 position) => (float[heads, capacity, 2] out) {{ out = {update()} }}"
)


@pytest.mark.parametrize("position, length", [(0, 8), (7, 1), (8, 0), (0, 0)])
def test_what_fits_exactly_is_accepted(position: int, length: int) -> None:
    """Case 35."""
    Checked(DIRECT).run(cache=cache(), new=new(length), position=position)


@pytest.mark.parametrize(
    "position, length",
    [
        (8, 1),
        (7, 2),
        (0, 9),
        (9, 0),
        (-1, 1),
        (-(2**63), 1),
        (2**31, 1),
        (2**62, 3),
        (2**63 - 1, 8),
    ],
)
def test_what_does_not_fit_is_named_with_all_numbers(position: int, length: int) -> None:
    """Cases 35, 40, 44. A sum would overflow; nothing is clamped."""
    error = Checked(DIRECT).refuses(cache=cache(), new=new(length), position=position)
    assert values_of(error) == ("cache", position, length, 8, None)


def test_a_position_that_is_an_input_needs_no_model() -> None:
    c = Checked(DIRECT).checks
    assert len(c.direct) == 1 and c.sliced is None and not c.late


SHIFTED = f"""g ({CACHE}, {NEW}, int32[1] start, float[a, b] other)
    => (float[heads, capacity, 2] out) {{
    wide = Cast <to = 7> (start)
    shape = Shape (other)
    one = Constant <value_int: int = 1> ()
    columns = Gather (shape, one)
    empty = Constant <value_ints: ints = []> ()
    scalar = Reshape (wide, empty)
    there = Add (columns, scalar)
    position = Sub (there, one)
    out = {update()}
}}"""


def test_an_input_plus_sizes_needs_no_model() -> None:
    c = Checked(SHIFTED)
    assert c.checks.sliced is None and len(c.checks.direct) == 1
    given = dict(cache=cache(), new=new(2), other=np.zeros((2, 3)))
    c.run(**given, start=[4])
    assert values_of(c.refuses(**given, start=[5])) == ("cache", 7, 2, 8, None)


def test_many_caches_at_one_position_are_compared_once() -> None:
    names = [f"c{k}" for k in range(60)]
    parameters = ", ".join(f"float[heads, capacity, 2] {n}" for n in names)
    results = ", ".join(f"float[heads, capacity, 2] {n}_out" for n in names)
    body = "\n".join(f"{n}_out = {update(name=n)}" for n in names)
    c = Checked(
        f"g ({parameters}, {NEW}, int64 position) => ({results}) {{ {body} }}", tuple(names)
    )
    assert len(c.checks.direct) == 1 and not c.checks.static
    given = {n: cache() for n in names}
    assert values_of(c.refuses(**given, new=new(3), position=6)) == ("c0", 6, 3, 8, None)


def test_the_narrowest_cache_decides_and_is_named() -> None:
    text = f"""g (float[heads, m, 2] wide, float[heads, k, 2] narrow, {NEW}, int64 position)
        => (float[heads, m, 2] a, float[heads, k, 2] b) {{
        a = {update(name="wide")}
        b = {update(name="narrow")}
    }}"""
    c = Checked(text, ("wide", "narrow"))
    error = c.refuses(wide=cache(9), narrow=cache(5), new=new(), position=5)
    assert values_of(error) == ("narrow", 5, 1, 5, None)


ROWS = """g (float[batch, capacity, 2] cache, float[batch, n, 2] new, int64[batch] position)
    => (float[batch, capacity, 2] out) {{
    out = onnx_inplace.CacheUpdate <axis = 1, batch_axis = 0, mode = "{mode}"> (cache, new,
    position)
}}"""


def test_the_row_that_does_not_fit_is_named() -> None:
    """Cases 32, 49: all rows or none."""
    given = dict(cache=np.zeros((3, 5, 2)), new=np.zeros((3, 3, 2)))
    c = Checked(ROWS.format(mode="linear"))
    c.run(**given, position=[0, 1, 2])
    assert values_of(c.refuses(**given, position=[1, 2, 3])) == ("cache", 3, 3, 5, 2)
    many = np.zeros(100, np.int64)
    many[70] = -1
    wide = dict(cache=np.zeros((100, 5, 2)), new=np.zeros((100, 3, 2)))
    assert values_of(c.refuses(**wide, position=many)) == ("cache", -1, 3, 5, 70)


def test_a_ring_takes_any_position_but_no_more_than_its_size() -> None:
    c = Checked(ROWS.format(mode="circular"))
    c.run(cache=np.zeros((2, 4, 2)), new=np.zeros((2, 4, 2)), position=[0, 2**63 - 1])
    error = c.refuses(cache=np.zeros((2, 4, 2)), new=np.zeros((2, 4, 2)), position=[3, -1])
    assert values_of(error)[1:] == (-1, 4, 4, 1)
    error = c.refuses(cache=np.zeros((2, 4, 2)), new=np.zeros((2, 5, 2)), position=[0, 0])
    assert (error.length, error.capacity) == (5, 4)


def test_no_rows_have_no_position() -> None:
    """Case 43."""
    c = Checked(ROWS.format(mode="linear"))
    c.run(cache=np.zeros((0, 5, 2)), new=np.zeros((0, 3, 2)), position=np.zeros(0, np.int64))


BRANCH = f"""g ({CACHE}, {NEW}, int64 position, bool keep) => (float[heads, capacity, 2] out) {{
    out = If (keep) <
        then_branch = a () => (float[heads, capacity, 2] x) {{ x = {update()} }},
        else_branch = b () => (float[heads, capacity, 2] y) {{ y = Identity (cache) }}
    >
}}"""


def test_a_branch_that_is_not_taken_requires_nothing() -> None:
    c = Checked(BRANCH)
    c.run(cache=cache(), new=new(), position=8, keep=False)
    assert values_of(c.refuses(cache=cache(), new=new(), position=8, keep=True))[1] == 8
    c.run(cache=cache(), new=new(), position=7, keep=True)


LOOP = f"""g ({CACHE}, {NEW}, int64 steps, int64 stride) => (float[heads, capacity, 2] out) {{
    out = Loop (steps, , cache) <body = b (int64 i, bool going, float[heads, capacity, 2] c)
        => (bool again, float[heads, capacity, 2] d) {{
        again = Identity (going)
        position = Mul (i, stride)
        d = {update(name="c")}
    }}>
}}"""


def test_the_last_round_of_a_loop_is_known_before_the_first() -> None:
    c = Checked(LOOP)
    c.run(cache=cache(), new=new(2), steps=4, stride=2)
    error = c.refuses(cache=cache(), new=new(2), steps=10, stride=2)
    assert values_of(error) == ("cache", 8, 2, 8, None)
    c.run(cache=cache(), new=new(9), steps=0, stride=2)  # nothing happens, nothing is required


NESTED = f"""g ({CACHE}, {NEW}, int64 steps, bool[k] mask)
    => (float[heads, capacity, 2] out, int64 last) {{
    zero = Constant <value_int: int = 0> ()
    one = Constant <value_int: int = 1> ()
    out, last = Loop (steps, , cache, zero) <body = b (
            int64 i, bool going, float[heads, capacity, 2] c, int64 p)
        => (bool again, float[heads, capacity, 2] d, int64 q) {{
        again = Identity (going)
        take = Gather (mask, i)
        d, q = If (take) <
            then_branch = t () => (float[heads, capacity, 2] x, int64 u) {{
                x, u = Loop (steps, , c, p) <body = inner (
                        int64 j, bool on, float[heads, capacity, 2] e, int64 r)
                    => (bool more, float[heads, capacity, 2] f, int64 s) {{
                    more = Identity (on)
                    f = {update("r", name="e")}
                    s = Add (r, one)
                }}>
            }},
            else_branch = f () => (float[heads, capacity, 2] y, int64 v) {{
                y = Identity (c)
                v = Identity (p)
            }}
        >
    }}>
}}"""


def test_a_position_goes_round_nested_loops() -> None:
    c = Checked(NESTED, returns=["cache", None])
    c.run(cache=cache(), new=new(), steps=4, mask=[True, False, True, False])
    error = c.refuses(cache=cache(), new=new(), steps=4, mask=[True, False, True, True])
    assert values_of(error) == ("cache", 8, 1, 8, None)


WHILE = f"""g ({CACHE}, {NEW}, int64 limit) => (float[heads, capacity, 2] out, int64 last) {{
    zero = Constant <value_int: int = 0> ()
    three = Constant <value_int: int = 3> ()
    on = Less (zero, limit)
    out, last = Loop (, on, cache, zero) <body = b (
            int64 i, bool going, float[heads, capacity, 2] c, int64 p)
        => (bool again, float[heads, capacity, 2] d, int64 q) {{
        d = {update("p", name="c")}
        q = Add (p, three)
        again = Less (q, limit)
    }}>
}}"""


def test_a_while_is_followed_to_its_end() -> None:
    c = Checked(WHILE, returns=["cache", None])
    c.run(cache=cache(), new=new(2), limit=7)
    assert values_of(c.refuses(cache=cache(), new=new(2), limit=10))[1:4] == (9, 2, 8)


SCAN = f"""g ({CACHE}, float[k, heads, n, 2] news, int64[k] starts)
    => (float[heads, capacity, 2] out, int64[k] doubled) {{
    out, doubled = Scan <num_scan_inputs = 2, scan_input_directions = [1, 0],
        body = b (float[heads, capacity, 2] c, int64 p, float[heads, n, 2] v)
        => (float[heads, capacity, 2] d, int64 twice) {{
            d = {update("p", "v", "c")}
            twice = Add (p, p)
        }}> (cache, starts, news)
}}"""


def test_a_scan_is_followed_in_its_direction() -> None:
    c = Checked(SCAN, returns=["cache", None])
    news = np.zeros((3, 2, 2, 2), np.float32)
    c.run(cache=cache(), news=news, starts=[0, 6, 3])
    error = c.refuses(cache=cache(), news=news, starts=[7, 6, -5])
    assert values_of(error) == ("cache", -5, 2, 8, None)  # the last one comes first


STACKED = f"""g ({CACHE}, {NEW}, int64 steps) => (float[heads, capacity, 2] out) {{
    two = Constant <value_int: int = 2> ()
    nothing = Constant <value_int: int = 0> ()
    none, starts = Loop (steps, , nothing) <body = a (int64 i, bool g, int64 x) => (bool h, int64 y,
    int64 z) {{
        h = Identity (g)
        y = Identity (x)
        z = Mul (i, two)
    }}>
    out = Loop (steps, , cache) <body = b (int64 i, bool g, float[heads, capacity, 2] c)
        => (bool h, float[heads, capacity, 2] d) {{
        h = Identity (g)
        p = Gather (starts, i)
        d = {update("p", name="c")}
    }}>
}}"""


def test_positions_may_be_stacked_by_another_loop() -> None:
    c = Checked(STACKED)
    c.run(cache=cache(), new=new(), steps=4)
    assert c.refuses(cache=cache(), new=new(), steps=5).position == 8


COUNTER = f"""g ({CACHE}, int64[1] count, {NEW})
    => (float[heads, capacity, 2] out, int64[1] next) {{
    length = Shape <start = 1, end = 2> (new)
    empty = Constant <value_ints: ints = []> ()
    position = Reshape (count, empty)
    more = Add (count, length)
    first = {update()}
    next = onnx_inplace.Assign (count, more)
    behind = Reshape (next, empty)
    out = {update("behind", name="first")}
}}"""


def test_a_counter_in_storage_is_followed_through_its_assignment() -> None:
    c = Checked(COUNTER, ("cache", "count"))
    assert not c.checks.late
    c.run(cache=cache(), count=[2], new=new(3))
    assert values_of(c.refuses(cache=cache(), count=[3], new=new(3))) == ("cache", 6, 3, 8, None)


WRITTEN = """g (int64[capacity] cache, int64[n] new, int64 start) => (int64[capacity] out) {
    first = onnx_inplace.CacheUpdate <axis = 0> (cache, new, start)
    zero = Constant <value_int: int = 0> ()
    position = Gather (first, zero)
    second = onnx_inplace.CacheUpdate <axis = 0> (first, new, position)
    out = onnx_inplace.CacheUpdate <axis = 0> (second, new, start)
}"""


def test_what_depends_on_written_content_is_left_to_its_step() -> None:
    c = Checked(WRITTEN)
    assert [late.bound.root for late in c.checks.late] == ["cache"]
    assert "written" in c.checks.late[0].reason
    assert len(c.checks.direct) == 1  # the other two are known
    assert c.refuses(cache=np.zeros(4), new=np.zeros(2), start=3).position == 3


UNKNOWN_LENGTH = """g (float[capacity] cache, float[n] new, bool[n] mask, int64 position)
    => (float[capacity] out) {
    kept = Compress <axis = 0> (new, mask)
    out = onnx_inplace.CacheUpdate <axis = 0> (cache, kept, position)
}"""


def test_a_length_that_depends_on_data_is_measured() -> None:
    c = Checked(UNKNOWN_LENGTH)
    assert c.checks.sliced is not None
    given = dict(cache=np.zeros(4), new=np.zeros(6), position=2)
    c.run(**given, mask=[1, 0, 0, 0, 0, 1])
    error = c.refuses(**given, mask=[1, 1, 0, 0, 0, 1])
    assert values_of(error) == ("cache", 2, 3, 4, None)


FOUR_HEADS = f"""g ({CACHE}, float[n, heads, 2] turned, int64 position)
    => (float[heads, capacity, 2] out) {{
    out = {update(values="turned")}
}}"""


def test_values_of_other_heads_are_refused() -> None:
    c = Checked(FOUR_HEADS)
    c.run(cache=cache(), turned=np.zeros((2, 2, 2)), position=0)
    with pytest.raises(errors.StorageMismatch) as caught:
        c.run(cache=cache(), turned=np.zeros((4, 2, 2)), position=0)
    assert (caught.value.name, caught.value.expected, caught.value.given) == ("cache", 2, 4)


IN_A_BRANCH = f"""g ({CACHE}, float[n, m, 2] other, bool take) => (float[heads, capacity, 2] out) {{
    zero = Constant <value_int: int = 0> ()
    out = If (take) <
        then_branch = a () => (float[heads, capacity, 2] x) {{ x = {update("zero", "other")} }},
        else_branch = b () => (float[heads, capacity, 2] y) {{ y = Identity (cache) }}
    >
}}"""


def test_shapes_in_a_branch_matter_only_when_it_runs() -> None:
    c = Checked(IN_A_BRANCH)
    c.run(cache=cache(), other=np.zeros((4, 1, 2)), take=False)
    with pytest.raises(errors.StorageMismatch) as caught:
        c.run(cache=cache(), other=np.zeros((4, 1, 2)), take=True)
    assert (caught.value.expected, caught.value.given) == (2, 4)
    c.run(cache=cache(), other=np.zeros((2, 8, 2)), take=True)


def test_an_assigned_value_has_the_shape_of_the_state() -> None:
    c = Checked(
        """g (float[a, b] cache, float[c, d] x) => (float[a, b] out) {
        out = onnx_inplace.Assign (cache, x)
    }"""
    )
    c.run(cache=np.zeros((2, 3)), x=np.zeros((2, 3)))
    for shape in ((1, 3), (3, 2), (1, 1), (2, 4)):  # broadcasting is no assignment
        with pytest.raises(errors.StorageMismatch):
            c.run(cache=np.zeros((2, 3)), x=np.zeros(shape))


REORDER = """g (float[a, rows, b] cache, int64[k] order) => (float[a, rows, b] out) {
    out = onnx_inplace.CacheReorder <batch_axis = 1> (cache, order)
}"""


def test_rows_of_a_reordering_exist() -> None:
    c = Checked(REORDER)
    c.run(cache=np.zeros((2, 3, 4)), order=[2, 2, 0])
    for order, row in (([0, 3, 1], 1), ([0, 1, -1], 2), ([2**63 - 1, 0, 0], 0)):
        error = c.refuses(cache=np.zeros((2, 3, 4)), order=order)
        assert values_of(error) == ("cache", order[row], 1, 3, row)
    with pytest.raises(errors.StorageMismatch):
        c.run(cache=np.zeros((2, 3, 4)), order=[0, 1])


SCATTER = """g (float[b, h, capacity, 2] cache, float[b, h, n, 2] new, int64[b] {name})
    => (float[b, h, capacity, 2] out) {{ out = TensorScatter ({inputs}) }}"""


def test_a_standard_scatter_of_tokens_is_an_update() -> None:
    c = Checked(SCATTER.format(name="at", inputs="cache, new, at"))
    given = dict(cache=np.zeros((2, 1, 5, 2)), new=np.zeros((2, 1, 2, 2)))
    c.run(**given, at=[3, 0])
    assert values_of(c.refuses(**given, at=[0, 4])) == ("cache", 4, 2, 5, 1)
    c = Checked(SCATTER.format(name="unused", inputs="cache, new"))
    assert (
        c.refuses(cache=np.zeros((1, 1, 2, 2)), new=np.zeros((1, 1, 3, 2)), unused=[0]).length == 3
    )


def test_indices_of_a_scatter_may_count_from_the_end_but_not_beyond() -> None:
    c = Checked(
        """g (float[a, b] cache, int64[k, 2] places, float[k] x) => (float[a, b] out) {
        out = ScatterND (cache, places, x)
    }"""
    )
    given = dict(cache=np.zeros((2, 3)), x=np.zeros(2))
    c.run(**given, places=[[1, 2], [-2, -3]])
    for places, bad, size in (
        ([[0, 0], [2, 0]], 2, 2),
        ([[0, 3], [0, 0]], 3, 3),
        ([[0, 0], [-3, 0]], -3, 2),
    ):
        error = c.refuses(**given, places=places)
        assert (error.position, error.capacity) == (bad, size)
    with pytest.raises(errors.StorageMismatch):
        c.run(cache=np.zeros((2, 3)), x=np.zeros(1), places=[[1, 2], [0, 0]])


def test_element_indices_of_any_integer_type() -> None:
    c = Checked(
        """g (float[a, b] cache, int32[c, d] at, float[c, d] x) => (float[a, b] out) {
        out = ScatterElements <axis = 1> (cache, at, x)
    }"""
    )
    c.run(cache=np.zeros((2, 3)), at=[[2, -3]], x=[[1, 1]])
    assert c.refuses(cache=np.zeros((2, 3)), at=[[0, 3]], x=[[1, 1]]).position == 3
    with pytest.raises(errors.StorageMismatch):  # more rows than there are
        c.run(cache=np.zeros((2, 3)), at=[[0], [0], [0]], x=np.zeros((3, 1)))


def test_a_read_stays_within_the_valid_length() -> None:
    """Case 40."""
    c = Checked(
        """g (float[b, h, m, 4] cache, float[b, h, n, 4] q, int64[b] lengths)
        => (float[b, h, n, 4] y, float[b, h, m, 4] out) {
        y = Attention (q, cache, cache, , , , lengths)
        out = Identity (cache)
    }""",
        returns=[None, "cache"],
    )
    given = dict(cache=np.zeros((2, 1, 5, 4)), q=np.zeros((2, 1, 1, 4)))
    c.run(**given, lengths=[0, 5])
    assert values_of(c.refuses(**given, lengths=[5, 6])) == ("cache", 0, 6, 5, 1)
    assert values_of(c.refuses(**given, lengths=[-1, 5])) == ("cache", 0, -1, 5, 0)


VIEWED = """g (float[b, m, 6] cache, float[b, n, 2, 3] new, int64 position)
    => (float[b, m, 6] out) {
    split = Constant <value_ints: ints = [0, 0, 2, -1]> ()
    view = Reshape (cache, split)
    written = onnx_inplace.CacheUpdate <axis = 1> (view, new, position)
    back = Constant <value_ints: ints = [0, 0, 6]> ()
    out = Reshape (written, back)
}"""


def test_a_view_has_a_capacity_of_its_own() -> None:
    c = Checked(VIEWED)
    assert not c.checks.late
    c.run(cache=np.zeros((1, 5, 6)), new=np.zeros((1, 2, 2, 3)), position=3)
    error = c.refuses(cache=np.zeros((1, 5, 6)), new=np.zeros((1, 2, 2, 3)), position=4)
    assert values_of(error) == ("cache", 4, 2, 5, None)


FOLDED = """g (float[b, m, 6] cache, float[n] new, int64 position) => (float[b, m, 6] out) {
    flat = Constant <value_ints: ints = [-1]> ()
    view = Reshape (cache, flat)
    shape = Shape (cache)
    written = onnx_inplace.CacheUpdate <axis = 0> (view, new, position)
    out = Reshape (written, shape)
}"""


def test_the_capacity_of_a_folded_view_is_a_product() -> None:
    c = Checked(FOLDED)
    assert not c.checks.late
    c.run(cache=np.zeros((2, 5, 6)), new=np.zeros(10), position=50)
    assert c.refuses(cache=np.zeros((2, 5, 6)), new=np.zeros(10), position=51).capacity == 60


@function
def twice(
    cache: Mutable[FLOAT["h", "m", 2]], new: FLOAT["h", "k", 2], start: INT64[()]
) -> tuple[Alias["cache"], INT64[()]]:
    cache = kv.CacheUpdate(cache, new, start)
    cache = kv.CacheUpdate(cache, new, start + 1)
    return cache, start + 2


def test_calls_are_followed() -> None:
    @model
    def program(
        cache: Mutable[FLOAT["heads", "capacity", 2]], new: FLOAT["heads", "n", 2], start: INT64[()]
    ) -> Alias["cache"]:
        cache, then = twice(cache, new, start)
        cache, _ = twice(cache, new, then)
        return cache

    found = positions.build(loader.load(program))
    assert found.sliced is None and not found.late
    assert [d.offset for d in found.direct] == [0, 1, 2, 3]


def test_a_random_position_is_not_guessed() -> None:
    c = Checked(
        f"""g ({CACHE}, {NEW}, float[k] scores) => (float[heads, capacity, 2] out) {{
        zero = Constant <value_ints: ints = [0]> ()
        two = Unsqueeze (scores, zero)
        place = Multinomial <sample_size = 1, dtype = 7> (two)
        empty = Constant <value_ints: ints = []> ()
        position = Reshape (place, empty)
        out = {update()}
    }}"""
    )
    assert len(c.checks.late) == 1 and "repeatable" in c.checks.late[0].reason


def test_a_view_that_comes_back_in_a_shape_of_data_is_refused() -> None:
    """It must have the root's shape, and what an author calls its dimensions proves nothing."""
    with pytest.raises(errors.ContractError) as caught:
        Checked(
            """g (float[a, b] cache, int64[2] shape) => (float[a, b] out) {
            out = Reshape (cache, shape)
        }"""
        )
    assert [finding.code for finding in caught.value.findings] == ["E102"]


FOLDED_IN_A_BRANCH = """g (float[2, m] cache, float[2, n] new, bool fold, int64 steps)
    => (float[2, m] out) {
    three = Constant <value_ints: ints = [2, 3]> ()
    zero = Constant <value_int: int = 0> ()
    either = If (fold) <
        then_branch = a () => (float[2, 3] x) { x = Reshape (cache, three) },
        else_branch = b () => (float[2, m] y) { y = Identity (cache) }
    >
    out = Loop (steps, , either) <body = c (int64 i, bool g, float[2, m] d)
        => (bool h, float[2, m] e) {
        h = Identity (g)
        view = Reshape (d, three)
        e = onnx_inplace.CacheUpdate <axis = 1> (view, new, zero)
    }>
}"""


def test_a_view_that_comes_back_has_the_roots_shape() -> None:
    """Through a branch and round a loop; what cannot be proven is compared before the run."""
    c = Checked(FOLDED_IN_A_BRANCH)
    given = dict(new=np.zeros((2, 3)), fold=True, steps=2)
    c.run(cache=np.zeros((2, 3)), **given)
    with pytest.raises(errors.StorageMismatch):
        c.run(cache=np.zeros((2, 4)), **given)
    assert c.refuses(cache=np.zeros((2, 3)), **{**given, "new": np.zeros((2, 4))}).length == 4


def test_a_long_chain_of_writes_is_no_deep_recursion() -> None:
    """Unrolled by Python: a thousand positions, each a step further than the one before."""

    @model
    def program(
        cache: Mutable[FLOAT["heads", "capacity", 2]], new: FLOAT["heads", "n", 2], start: INT64[()]
    ) -> Alias["cache"]:
        position = start
        length = op.Shape(new)[1]
        for _ in range(600):
            position = position + length
        return kv.CacheUpdate(cache, new, position)

    found = positions.build(loader.load(program))
    assert [str(d.offset) for d in found.direct] == ["(600 * n)"]


@pytest.mark.kernel
def test_an_error_at_a_step_has_its_line() -> None:
    """The position is content that the run writes, so nothing else can know it."""

    @model
    def late(
        cache: Mutable[FLOAT[4, 2]], place: Mutable[INT64[1]], new: FLOAT[1, 2], at: INT64[1]
    ) -> tuple[Alias["cache"], Alias["place"]]:
        place = kv.Assign(place, at + 0)
        position = op.Squeeze(op.Neg(op.Neg(place)), [0])
        return kv.CacheUpdate(cache, new, position, axis=0), place

    session = Session(late)
    lent = {port.name: session.allocate(port.name) for port in session.mutable_inputs}
    with session.bind(**lent) as step, pytest.raises(errors.CapacityError) as caught:
        step.run(new=np.zeros((1, 2), np.float32), at=[7])
    assert caught.value.position == 7
    assert str(caught.value.location).startswith("test_positions.py:")
    assert str(caught.value).startswith(f"{caught.value.location}: `cache`")
