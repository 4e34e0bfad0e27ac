"""The analysis alone, on graphs as text: roots, versions, summaries, and rules in odd corners."""

import time

import onnx
import onnx_ir as ir
import pytest

from onnx_inplace import errors
from onnx_inplace.compiler import alias, contract, operators, program
from onnx_inplace.compiler.contract import Access, OutputAlias

HERE = errors.Location("text.py", 1)
DOMAINS = ("onnx_inplace", "com.microsoft", "f", "g", "x")


def declare(text, mutable, returns, functions=(), opset=25):
    """A declaration of a graph, whose functions follow it, callees first.

    ``functions`` holds (domain, name, mutable, returns) of each.
    """
    imports = ", ".join([f'"": {opset}', *(f'"{d}": 1' for d in DOMAINS)])
    text = f"<ir_version: 11, opset_import: [{imports}]>\n{text}"
    model = ir.serde.deserialize_model(onnx.parser.parse_model(text))
    known = []
    for domain, name, lent, back in functions:
        function = model.functions[domain, name, ""]
        access = accesses(function.inputs, lent)
        known.append(program.Declaration(function, access, tuple(back), tuple(known), HERE))
    main = ir.Function("main", "main", graph=model.graph, attributes=[])
    access = accesses(main.inputs, mutable)
    return program.Declaration(main, access, tuple(returns), tuple(known), HERE)


def accesses(values, mutable):
    return tuple(Access.READ_WRITE if v.name in mutable else Access.READ_ONLY for v in values)


def analyze(*args, **kwargs):
    return program.check_function(declare(*args, **kwargs)).aliases


def codes(*args, **kwargs):
    """Codes of all findings, in order of the program; none: it is legal."""
    try:
        analyze(*args, **kwargs)
    except errors.ContractError as error:
        return [f.code for f in error.findings]
    return []


def names(table):
    """A table of values, by name."""
    return {k.name: getattr(v, "name", v) for k, v in table.items()}


# -- versions


def test_names_of_a_root_in_order_of_version():
    text = """
        main (float[2,8,4] c, float[2,1,4] n, int64 p, bool b, float[2,8,4] r)
            => (float[2,8,4] out, float s) {
            v = Identity (c)
            s = ReduceSum <keepdims = 0> (v)
            u = onnx_inplace.CacheUpdate (v, n, p)
            w = Identity (u)
            i = If (b) <
                then_branch = t () => (float[2,8,4] a) { a = onnx_inplace.CacheUpdate (w, n, p) },
                else_branch = e () => (float[2,8,4] z) { z = Identity (u) }
            >
            out = onnx_inplace.Assign (i, r)
        }"""
    found = analyze(text, ["c"], ["c", None])
    version = names(found.version)
    assert names(found.root) == dict.fromkeys(["c", "v", "u", "w", "a", "z", "i", "out"], "c")
    assert version["c"] == version["v"] < version["u"] == version["w"] == version["z"]
    assert version["u"] < version["a"] < version["i"] < version["out"]
    source = {"v": "c", "u": "v", "w": "u", "a": "w", "z": "u", "i": "c", "out": "i"}
    assert names(found.source) == source
    assert [n.op_type for n in found.stateful] == ["If"]
    assert found.result == [OutputAlias(0, 0)]
    assert all(ports == [OutputAlias(0, 0)] for ports in found.node.values())


LOOP = """
    main (float[2,8,4] c, float[2,8,4] d, float[2,1,4] n, int64 k)
        => (float[2,8,4] x, float[2,8,4] y, float s) {
        t = ReduceSum <keepdims = 0> (n)
        x, y, s = Loop (k, , c, d, t) <body = body
            (int64 i, bool on, float[2,8,4] cc, float[2,8,4] dd, float ss)
            => (bool go, float[2,8,4] cu, float[2,8,4] du, float sn) {
            go = Identity (on)
            BODY
        }>
    }"""
READ = "r = ReduceSum <keepdims = 0> (cc)  sn = Add (ss, r)\n"
WRITE = "cu = onnx_inplace.CacheUpdate (cc, n, i)\n"
KEEP = "du = Identity (dd)\n"


def test_a_body_starts_with_a_version_of_what_it_writes():
    found = analyze(LOOP.replace("BODY", READ + WRITE + KEEP), ["c", "d"], ["c", "d", None])
    version = names(found.version)
    assert version["c"] < version["cc"] < version["cu"] < version["x"]
    assert version["d"] == version["dd"] == version["du"] == version["y"]  # nobody writes it
    source = {"cc": "c", "dd": "d", "cu": "cc", "du": "dd", "x": "c", "y": "d"}
    assert names(found.source) == source
    [(loop, ports)] = [(n, p) for n, p in found.node.items() if n.op_type == "Loop"]
    assert ports == [OutputAlias(0, 2), OutputAlias(1, 3)] and loop in found.stateful


BODIES = [
    (READ + WRITE + KEEP, []),
    (WRITE + READ + KEEP, ["E104"]),  # after the write
    (READ.replace("(cc)", "(c)") + WRITE + KEEP, ["E104"]),  # overwritten in the second iteration
    (READ.replace("(cc)", "(d)") + WRITE + KEEP, []),  # nobody overwrites it
    (READ + WRITE.replace("(cc", "(c") + KEEP, ["E105"]),
    (READ + WRITE + "du = Identity (cu)", ["E108"]),
    (READ + WRITE + "du = Neg (dd)", ["E108"]),
    (READ + "cu = Identity (dd)  du = Identity (cc)", ["E108", "E108"]),
    (READ + WRITE + "e = onnx_inplace.CacheUpdate (dd, n, i)" + KEEP, ["E104"]),
    (READ + WRITE + "du = onnx_inplace.CacheUpdate (dd, n, i)", []),
    (READ + WRITE + KEEP + "e = onnx_inplace.CacheUpdate (cu, n, i)", ["E104"]),
    (READ + WRITE + KEEP + "e = onnx_inplace.CacheUpdate (dd, n, i)", ["E104"]),
    (READ + WRITE + "du = onnx_inplace.Assign (dd, cu)", []),
    (READ + WRITE + "du = onnx_inplace.Assign (dd, cc)", ["E104"]),
]


@pytest.mark.parametrize(("body", "expected"), BODIES, ids=range(len(BODIES)))
def test_bodies_of_loops(body, expected):
    assert codes(LOOP.replace("BODY", body), ["c", "d"], ["c", "d", None]) == expected


def test_a_root_that_is_carried_twice():
    text = """
        main (float[2,8,4] c, float[2,1,4] n, int64 k) => (float[2,8,4] x, float[2,8,4] y) {
            x, y = Loop (k, , c, c) <body = body (int64 i, bool on, float[2,8,4] a, float[2,8,4] b)
                => (bool go, float[2,8,4] au, float[2,8,4] bu) { go = Identity (on)  BODY }>
        }"""

    def judge(body):
        return codes(text.replace("BODY", body), ["c"], ["c", "c"])

    write = "au = onnx_inplace.CacheUpdate (a, n, i)  "
    assert judge("au = Identity (a)  bu = Identity (b)") == []
    assert judge("au = Identity (b)  bu = Identity (a)") == []  # nobody writes: both are c
    assert judge(write + "bu = Identity (au)") == []
    assert judge(write + "bu = Identity (b)") == ["E104"]
    assert judge("r = ReduceSum (b)  " + write + "bu = Identity (au)") == ["E104"]
    assert judge("bu = onnx_inplace.CacheUpdate (b, n, i)  au = Identity (bu)") == ["E105"]


def test_the_condition_of_a_loop_that_overwrites_it():
    text = """
        main (bool[1] f, bool[1] v) => (bool[1] x) {
            start = Squeeze (f)
            x = Loop (, start, f) <body = body (int64 i, bool on, bool[1] a)
                => (bool go, bool[1] au) { BODY }>
        }"""

    def judge(body):
        return codes(text.replace("BODY", body), ["f"], ["f"])

    assert judge("au = onnx_inplace.Assign (a, v)  go = Squeeze (au)") == []
    assert judge("old = Squeeze (a)  au = onnx_inplace.Assign (a, v)  go = Not (old)") == ["E104"]
    assert judge("old = Squeeze (a)  go = Not (old)  au = onnx_inplace.Assign (a, v)") == []
    # the condition of the last iteration may be a view of what this one overwrites
    assert judge("au = onnx_inplace.Assign (a, v)  go = Not (on)") == ["E104"]


def test_a_scan_hands_out_slices():
    text = """
        main (float[3,2,8,4] c, float[3,2,8,4] d, float[2,1,4] n, int64 p)
            => (float[3,2,8,4] x, float s, float[3] each) {
            z = ReduceSum <keepdims = 0> (n)
            x, s, each = Scan <num_scan_inputs = 1, body = body
                (float[3,2,8,4] a, float t, float[2,8,4] e)
                => (float[3,2,8,4] au, float tn, float y) {
                y = ReduceSum <keepdims = 0> (e)  tn = Add (t, y)  BODY }> (c, z, SCANNED)
        }"""

    def judge(body, scanned):
        full = text.replace("BODY", body).replace("SCANNED", scanned)
        return codes(full, ["c", "d"], ["c", None, None])

    write = "v = Unsqueeze (n, zero)  au = onnx_inplace.CacheUpdate (a, v, p)"
    write = "v = Expand (n, shape)  zero = Identity (p)  au = onnx_inplace.CacheUpdate (a, v, zero)"
    write = "shape = Constant <value_ints = [3,2,1,4]> ()  " + write
    assert judge("au = Identity (a)", "c") == []  # slices are only read
    assert judge(write, "d") == []
    assert judge(write, "c") == ["E104"]
    assert judge("au = Identity (a)  q = onnx_inplace.CacheUpdate (e, n, p)", "d") == ["E106"]


def test_a_slice_does_not_leave_its_scan():
    text = """
        main (float[3,4] c, float[4] first) => (float[4] last, float[3,4] all) {
            zero = Neg (first)
            last, all = Scan <num_scan_inputs = 1, body = body (float[4] t, float[4] e)
                => (float[4] tn, float[4] y) { y = RESULT (e)  tn = CARRIED (e) }> (zero, c)
        }"""

    def judge(carried, result):
        return codes(text.replace("CARRIED", carried).replace("RESULT", result), ["c"], [None] * 2)

    assert judge("Neg", "Neg") == []
    assert judge("Identity", "Neg") == ["E108"]
    assert judge("Neg", "Identity") == ["E108"]
    assert (
        codes(text.replace("CARRIED", "Identity").replace("RESULT", "Identity"), [], [None] * 2)
        == []
    )


# -- operators


def test_group_query_attention_writes_what_it_gives_back():
    text = """
        main (float[1,1,16] q, float[1,1,8] k, float[1,1,8] v, float[1,1,8,8] pk, float[1,1,8,8] pv,
              int32[1] last, int32 total)
            => (float[1,1,16] y, float[1,1,8,8] nk, float[1,1,8,8] nv) {
            y, nk, nv = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1>
                (q, k, v, pk, pv, last, total)
        }"""
    found = analyze(text, ["pk", "pv"], [None, "pk", "pv"])
    assert list(found.node.values()) == [[OutputAlias(1, 3), OutputAlias(2, 4)]]
    assert codes(text, [], [None, None, None]) == []  # functional on what nobody lends
    assert codes(text, ["pk"], [None, "pk", None]) == ["E106"]  # it writes both, or none
    assert codes(text, ["pk", "pv"], [None, "pk", None]) == ["E111"]
    assert codes(
        text.replace("pk, pv,\n", "pk, pk,\n").replace("(q, k, v, pk, pv", "(q, k, v, pk, pk"),
        ["pk"],
        [None, "pk", "pk"],
    ) == ["E116"]
    only = text.replace(", float[1,1,8,8] nk, float[1,1,8,8] nv)", ")").replace(
        "y, nk, nv =", "y ="
    )
    assert codes(only, ["pk", "pv"], [None]) == ["E109", "E109"]  # written all the same
    assert codes(only, [], [None]) == []


def test_states_of_opset_27():
    linear = """
        main (float[1,1,4] q, float[1,1,4] k, float[1,1,4] v, float[1,1,4,4] s)
            => (float[1,1,4] y, float[1,1,4,4] t) {
            y, t = LinearAttention <q_num_heads = 1, kv_num_heads = 1> (q, k, v, s)
        }"""
    convolution = """
        main (float[1,4,1] x, float[4,1,3] w, float[1,4,2] s) => (float[1,4,1] y, float[1,4,2] t) {
            y, t = CausalConvWithState (x, w, , s)
        }"""
    for text in (linear, convolution):
        found = analyze(text, ["s"], [None, "s"], opset=27)
        assert list(found.node.values()) == [[OutputAlias(1, 3)]]
        assert codes(text, ["s"], [None, None], opset=27) == ["E111"]
        assert codes(text, [], [None, None], opset=27) == []


@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
@pytest.mark.parametrize("op_type", ["ScatterElements", "ScatterND"])
def test_scatters(op_type, reduction):
    text = """
        main (float[4] c, int64[2,1] i, float[2] n) => (float[4] u) { u = OP (c, i, n) }"""
    if op_type == "ScatterElements":
        text = text.replace("int64[2,1]", "int64[2]")
    written = text.replace("OP", op_type)
    reduced = text.replace("OP", f'{op_type} <reduction = "{reduction}">')
    assert codes(written, ["c"], ["c"]) == [] and codes(written, ["c"], [None]) == ["E111"]
    assert codes(reduced, ["c"], ["c"]) == ["E110"] and codes(reduced, ["c"], [None]) == []


@pytest.mark.parametrize("name", ["Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"])
def test_views(name):
    parameter = "" if name in ("Flatten", "Identity") else ", shape"
    text = f"""
        main (float[2,3] c, float[2,3] n, int64[1] shape) => (float[2,3] u, float[1] s) {{
            v = {name} (c{parameter})
            u = onnx_inplace.Assign (c, n)
            s = ReduceSum (v)
        }}"""
    assert codes(text, ["c"], ["c", None]) == ["E104"]
    assert codes(text.replace("(v)", "(n)"), ["c"], ["c", None]) == []


@pytest.mark.parametrize(
    "line",
    [
        "Transpose (c)",
        "Concat <axis = 0> (c, c)",
        "Slice (c, i, i)",
        "Gather (c, i)",
        "Neg (c)",
        "onnx_inplace.Copy (c)",
        "Expand (c, i)",
    ],
)
def test_what_makes_a_new_value(line):
    text = f"""
        main (float[2,3] c, float[2,3] n, int64[2] i) => (float[2,3] u, float[1] s) {{
            v = {line}
            u = onnx_inplace.Assign (c, n)
            s = ReduceSum (v)
        }}"""
    assert codes(text, ["c"], ["c", None]) == []


def test_a_sequence_of_a_root_is_a_copy():
    text = """
        main (float[2,3] c, float[2,3] n) => (float[2,3] u, float[2,3] v) {
            q = SequenceConstruct (c)
            u = onnx_inplace.Assign (c, n)
            zero = Constant <value_int = 0> ()
            v = SequenceAt (q, zero)
        }"""
    assert codes(text, ["c"], ["c", None]) == []


def test_a_body_that_is_mapped_reads_and_does_not_write():
    text = """
        main (float[2,3] c, float[2,3] n) => (float[2,3] u, float[2,3] v) {
            q = SequenceConstruct (n)
            m = SequenceMap <body = body (float[2,3] e) => (float[2,3] y) { y = LINE }> (q)
            u = onnx_inplace.Assign (c, n)
            zero = Constant <value_int = 0> ()
            v = SequenceAt (m, zero)
        }"""
    assert codes(text.replace("LINE", "Add (e, c)"), ["c"], ["c", None]) == []
    assert codes(text.replace("LINE", "onnx_inplace.Assign (c, e)"), ["c"], ["c", None]) == ["E105"]


def test_operators_of_others_keep_to_what_their_file_says():
    text = "main (float[4] c, float[4] n) => (float[4] u) { u = x.Rotate (c, n) }"
    declaration = declare(text, ["c"], ["c"])

    def judge(mutable, returns, *ports):
        values = {v.name: v for v in declaration.function.inputs}
        found = alias.analyze(
            declaration.function,
            [values[m] for m in mutable],
            [None if r is None else values[r] for r in returns],
            declared=lambda node: [OutputAlias(*p) for p in ports],
        )
        return [f.code for f in found.findings]

    assert judge(["c"], ["c"], (0, 0)) == []
    assert judge(["c"], [None], (0, 0)) == ["E111"]
    assert judge(["c"], ["c"]) == ["E110"]  # nothing said: a new value
    assert judge([], [None], (0, 0)) == ["E106"]
    assert judge(["c"], ["c"], (0, 2)) == ["E101"] == judge(["c"], ["c"], (1, 0))
    assert judge(["c"], ["c"], (0, -1)) == ["E101"]


def test_a_user_registers_an_operator(monkeypatch):
    monkeypatch.setattr(contract, "_RULES", dict(contract.RULES))
    monkeypatch.setattr(contract, "RULES", contract._RULES)
    monkeypatch.setattr(operators, "_BODIES", dict(operators._BODIES))
    rule = contract.OperatorRule(
        "x", "Add", contract.Effect.WRITE, (OutputAlias(0, 0),), functional=False
    )

    def body(node, opset):
        text = f'<domain: "x", opset_import: ["": {opset}]> Add (c, n) => (u) {{ u = Sum (c, n) }}'
        return onnx.parser.parse_function(text)

    operators.register(rule, body)
    text = "main (float[4] c, float[4] n) => (float[4] u) { u = x.Add (c, n) }"
    assert codes(text, ["c"], ["c"]) == [] and codes(text, [], [None]) == ["E106"]
    [function] = operators.attach_bodies(declare(text, ["c"], ["c"]).function)
    assert function.identifier() == ("x", "Add", "")
    with pytest.raises(ValueError, match="another rule"):
        contract.register(contract.OperatorRule("x", "Add", contract.Effect.VIEW, ()))


def test_a_rule_gives_a_port_one_meaning():
    with pytest.raises(ValueError, match="twice"):
        contract.OperatorRule(
            "x", "Swap", contract.Effect.WRITE, (OutputAlias(0, 0), OutputAlias(1, 0))
        )


# -- functions

WRITER = """
    <domain: "f", opset_import: ["": 25, "onnx_inplace": 1]>
    step (c, n, p) => (u) { u = onnx_inplace.CacheUpdate (c, n, p) }"""
READER = """
    <domain: "g", opset_import: ["": 25]>
    step (c, n, p) => (u) { a = Neg (c)  u = Neg (a) }"""
TWO = [("f", "step", ["c"], ["c"]), ("g", "step", [], [None])]


def test_two_functions_of_one_name_in_two_domains():
    text = """
        main (float[2,8,4] c, float[2,1,4] n, int64 p) => (float[2,8,4] x, float[2,8,4] y) {
            y = g.step (c, n, p)
            x = f.step (c, n, p)
        }"""
    found = analyze(text + WRITER + READER, ["c"], ["c", None], TWO)
    assert names(found.root) == {"c": "c", "x": "c"}
    swapped = text.replace("y = g", "y = f").replace("x = f", "x = g")
    assert codes(swapped + WRITER + READER, ["c"], [None, "c"], TWO) == ["E104"]


def test_one_function_called_twice_and_in_a_function():
    text = (
        """
        main (float[2,8,4] c, float[2,1,4] n, int64 p) => (float[2,8,4] x) {
            a = f.step (c, n, p)
            b = f.twice (a, n, p)
            x = f.step (b, n, p)
        }"""
        + WRITER
        + """
    <domain: "f", opset_import: ["": 25, "f": 1]>
    twice (c, n, p) => (u) { a = f.step (c, n, p)  u = f.step (a, n, p) }"""
    )
    functions = [TWO[0], ("f", "twice", ["c"], ["c"])]
    found = analyze(text, ["c"], ["c"], functions)
    version = names(found.version)
    assert version["c"] < version["a"] < version["b"] < version["x"]
    assert codes(text.replace("(b, n", "(a, n"), ["c"], ["c"], functions) == ["E105"]


def test_a_call_that_leaves_a_result_out():
    text = """
        main (float[2,8,4] c, float[2,1,4] n, int64 p) => (float[1] s) { s = f.both (n, c, p) }
    <domain: "f", opset_import: ["": 25, "onnx_inplace": 1]>
    both (n, c, p) => (s, u) { s = ReduceSum (n)  u = onnx_inplace.CacheUpdate (c, n, p) }"""
    functions = [("f", "both", ["c"], [None, "c"])]
    assert codes(text, ["c"], [None], functions) == ["E109"]
    named = text.replace("(float[1] s)", "(float[1] s, float[2,8,4] u)").replace(
        "s = f.", "s, u = f."
    )
    assert codes(named, ["c"], [None, "c"], functions) == []
    assert codes(named.replace("(n, c, p)", "(n)", 1), ["c"], [None, None], functions) == []


def summary(text, mutable, returns):
    return analyze(text, mutable, returns).summary


def test_a_summary_tells_what_is_shared_and_what_is_written():
    found = summary(
        """
        main (float[2,8] c, float[2,8] d, float[2,8] x, float[2,8] n)
            => (float[2,8] u, float[2,8] v, float[16] w, float[2,8] z) {
            u = onnx_inplace.Assign (c, n)
            v = Identity (d)
            flat = Constant <value_ints = [-1]> ()
            w = Reshape (x, flat)
            z = Neg (x)
        }""",
        ["c", "d"],
        ["c", "d", None, None],
    )
    assert [p.written for p in found.parameters] == [True, False, False, False]
    shared = [(r.parameter, r.reshaped) if r else None for r in found.results]
    assert shared == [(0, False), (1, False), (2, True), None]


RESTRICTED = {
    "E107": "y = If (b) <then_branch = t () => (q) { q = Identity (x) }, "
    "else_branch = e () => (r) { r = Neg (x) }>",
    "E108": "y = Loop (k, , x) <body = l (int64 i, bool on, xx) => (go, xn) "
    "{ go = Identity (on)  xn = Neg (xx) }>",
    "E106": "y = TensorScatter (x, x, p)",
}


@pytest.mark.parametrize("code", RESTRICTED)
def test_what_a_function_does_to_a_parameter_is_judged_where_it_is_lent(code):
    body = """
    <domain: "f", opset_import: ["": 25]>
    step (x, b, k, p) => (y) { BODY }
    <domain: "f", opset_import: ["": 25, "f": 1]>
    outer (x, b, k, p) => (y) { v = Identity (x)  z = f.step (v, b, k, p)  y = Neg (z) }"""
    body = body.replace("BODY", RESTRICTED[code])
    text = """
        main (float[2,4] c, bool b, int64 k, int64[2] p) => (float[2,4] y) {
            v = VIEW (c)  y = f.NAME (v, b, k, p)
        }"""
    functions = [("f", "step", [], [None]), ("f", "outer", [], [None])]
    for name in ("step", "outer"):
        called = text.replace("NAME", name) + body
        assert codes(called.replace("VIEW", "Identity"), ["c"], [None], functions) == [code]
        assert codes(called.replace("VIEW", "Identity"), [], [None], functions) == []
        assert codes(called.replace("VIEW", "onnx_inplace.Copy"), ["c"], [None], functions) == []


# -- declarations


def test_what_may_not_be_lent():
    declaration = declare("main (float[4] c) => (float[4] u) { u = Neg (c) }", [], [None])
    [c], [u] = declaration.function.inputs, declaration.function.outputs
    found = alias.analyze(declaration.function, [u], [None])
    assert [f.code for f in found.findings] == ["E106"]
    c.const_value = ir.tensor([1.0, 2.0, 3.0, 4.0], name="c")
    declaration.function.graph.register_initializer(c)
    found = alias.analyze(declaration.function.graph, [c], [None])
    assert [f.code for f in found.findings] == ["E106"]


def test_declared_results():
    text = "main (float[4] c, float[4] d, float[4] x) => (float[4] u) { u = LINE }"

    def judge(line, declared):
        return codes(text.replace("LINE", line), ["c", "d"], [declared])

    assert judge("Identity (c)", "c") == [] and judge("Identity (c)", None) == ["E111"]
    assert judge("Identity (c)", "d") == ["E101"] and judge("Identity (c)", "x") == ["E117"]
    assert judge("Neg (c)", "c") == ["E110"] and judge("Identity (x)", "c") == ["E110"]
    assert judge("Identity (x)", None) == []


def test_names_that_hide_others():
    text = """
        main (float[4] c, bool b) => (float[4] u) {
            t = Neg (c)
            u = If (b) <
                then_branch = t () => (float[4] a) { NAME = Neg (t)  a = Neg (NAME) },
                else_branch = e () => (float[4] z) { w = Neg (t)  z = Neg (w) }
            >
            later = Neg (u)
        }"""
    for name, expected in {"w": [], "later": [], "t": ["E114"], "c": ["E114"]}.items():
        assert codes(text.replace("NAME", name), [], [None]) == expected, name


# -- cost and order


def layers(count):
    """A decoder with two caches a layer, each written in a branch of a loop."""
    caches = [f"{kind}{k}" for k in range(count) for kind in "kv"]
    carried = [f"float[2,8,4] {c}_in" for c in caches]
    lines = []
    for c in caches:
        lines.append(
            f"{c}_new = If (on) <then_branch = t () => (float[2,8,4] {c}_a) "
            f"{{ {c}_a = onnx_inplace.CacheUpdate ({c}_in, n, i) }}, "
            f"else_branch = e () => (float[2,8,4] {c}_b) {{ {c}_b = Identity ({c}_in) }}>"
        )
    results = ", ".join(f"{c}_out" for c in caches)
    return (
        f"""
        main ({", ".join(f"float[2,8,4] {c}" for c in caches)}, float[2,1,4] n, int64 times)
            => ({", ".join(f"float[2,8,4] {c}_out" for c in caches)}) {{
            {results} = Loop (times, , {", ".join(caches)}) <body = body
                (int64 i, bool on, {", ".join(carried)})
                => (bool go, {", ".join(f"float[2,8,4] {c}_new" for c in caches)}) {{
                go = Identity (on)
                {"".join(lines)}
            }}>
        }}""",
        caches,
    )


def test_the_cost_is_linear_in_the_layers():
    def seconds(count):
        text, caches = layers(count)
        declaration = declare(text, caches, caches)
        times = []
        for _ in range(3):
            start = time.process_time()
            program.check_function(declaration)
            times.append(time.process_time() - start)
        return min(times)

    seconds(10)
    assert seconds(320) < 3 * 4 * seconds(80)  # four times the nodes; quadratic would be sixteen


def test_findings_come_in_the_order_of_the_program():
    text, caches = layers(20)
    text = text.replace("_in, n, i", ", n, i")  # written by names from outside
    with pytest.raises(errors.ContractError) as caught:
        analyze(text, caches, caches)
    named = [f.message.split("`")[1] for f in caught.value.findings]
    assert named == caches


# -- graphs that only a program can build


def make_update(cache, name):
    new, position = ir.val("n", ir.DataType.FLOAT, [2, 1, 4]), ir.val("p", ir.DataType.INT64, [])
    node = ir.node("CacheUpdate", [cache, new, position], domain=contract.DOMAIN)
    node.outputs[0].name = name
    return node, node.outputs[0]


@pytest.mark.parametrize(("stale", "expected"), [(False, []), (True, ["E104"])])
def test_a_branch_returns_a_name_from_outside(stale, expected):
    cache, flag = ir.val("c", ir.DataType.FLOAT, [2, 8, 4]), ir.val("b", ir.DataType.BOOL, [])
    view = ir.node("Identity", [cache])
    [old] = view.outputs
    old.name = "old"
    first, one = make_update(old, "one")
    second, two = make_update(one, "two")
    branches = {
        "then_branch": ir.Graph([], [two], nodes=[second], name="then"),
        "else_branch": ir.Graph([], [old if stale else one], nodes=[], name="else"),
    }
    branch = ir.node("If", [flag], branches)
    branch.outputs[0].name = "three"
    graph = ir.Graph([cache, flag], branch.outputs, nodes=[view, first, branch], name="g")
    found = alias.analyze(graph, [cache], [cache])
    assert [f.code for f in found.findings] == expected
    assert stale or found.root[branch.outputs[0]] is cache


def test_a_finding_without_a_line_names_the_node():
    cache = ir.val("c", ir.DataType.FLOAT, [2, 8, 4])
    first, _ = make_update(cache, "one")
    second, two = make_update(cache, "two")
    second.name = "the_second"
    graph = ir.Graph([cache], [two], nodes=[first, second], name="g")
    [finding] = alias.analyze(graph, [cache], [cache]).findings
    assert finding.code == "E105" and finding.location is None
    assert "the_second" in finding.message and str(finding).startswith("model: E105")
