# ruff: noqa
"""Over Python values a staged function does what Python does: the same text is run by both."""

import pytest

from onnx_inplace.dsl import FLOAT, model

k = 7


def make(a: int, out: list):
    """A function whose result is put into ``out``, since it records nothing."""
    b, c = 3, 4

    def program(x: FLOAT["n"]) -> FLOAT["n"]:
        total: int = 0
        seen = []

        def inner(q):
            for z in range(q):
                if z == 2:
                    return z
                elif z > 100:
                    pass
            return total

        for i in range(a):
            if i % 2 == 0 and i < b or i == c:
                total += i
            elif 0 < i < 3:
                total -= 1
                seen.append(lambda: total)
            else:
                left = i
                while left > 0:
                    left -= 1
                    try:
                        if left == 2:
                            raise ValueError(left)
                    except ValueError as error:
                        total += error.args[0]
                    else:
                        total += 0
                if i == 7:
                    continue
                del left
            match i:
                case 3:
                    total += 1
                case [p, *q]:
                    pass
                case {"a": r, **s}:
                    pass
                case _:
                    pass
            for j, (m, n) in enumerate([(1, 2)]):
                if not j:
                    total += m * n if i else k
            if total > 1000:
                break
        else:
            total += 1
        import os.path as path

        if (w := total) > 3:

            def doubled():
                return w * 2

            total = doubled()

            class Held:
                value = total

            total = Held.value + (yes := 1) + yes
        kept = [y for y in range(3) if y and y != 2]
        out.append((total, i, [s() for s in seen], inner(5), kept, path is not None, 1 < b != c))
        return x

    return program


@pytest.mark.parametrize("a", [0, 1, 2, 5, 9, 60])
def test_a_text_does_what_python_does(a: int) -> None:
    def outcome(run) -> object:
        out: list = []
        try:
            run(make(a, out))
        except UnboundLocalError as error:
            return type(error), error.name
        except NameError as error:
            return UnboundLocalError, error.name
        return out

    assert outcome(model) == outcome(lambda f: f(None))
