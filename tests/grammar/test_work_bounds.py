"""How large a grammar is, by how it is spelled."""

import pytest

from edgespec.grammar.response_format import count_repetitions, measure_lark


@pytest.mark.parametrize(
    ("grammar", "size"),
    [
        ("", (0, 0)),
        ('start: "a"', (2, 0)),
        ('start: "a"* "b"+ | c?', (8, 0)),
        ('start: (("a" | "\\"(((") "b"){2,3}', (8, 0)),
        ("start: /a|b*\\/(((/i  // (((((\n# ((((\nc: D", (4, 1)),
        ('start: %json {"a*": [1, "(((", {"b": 2}]} "!"', (3, 0)),
        ("start: %json {", (3, 0)),
        ('start: <tool> <[7]> "a".."z"', (6, 0)),
        ('start: A\nA: "a"*\n  | B?\nB[lazy]: /x+y*/', (10, 4)),
        ('start: a\na: b* b*\nb: A*\nA.2: "a"+', (13, 1)),
        ('start: A\nA: B* B*\nB: C* C*\nC: "c"*', (15, 10)),
        ("A: B* \nB: A*", (6, 2)),
    ],
)
def test_parts_and_repetitions_are_counted(grammar: str, size: tuple[int, int]) -> None:
    assert measure_lark(grammar) == size


@pytest.mark.parametrize(
    ("expression", "num"),
    [
        ("abc", 0),
        ("a*b+c?d{2}", 4),
        (r"\*\+[*+?{][]*][^]*]\\*", 1),
        ("(?:a)(?i)(?P<x>b)*", 1),
        ("((a*)*)*" * 9, 27),
    ],
)
def test_repetitions_of_an_expression_are_counted(expression: str, num: int) -> None:
    assert count_repetitions(expression) == num


def test_any_text_has_a_size() -> None:
    for text in (
        "(",
        ")",
        '"',
        "/",
        "%json [",
        '%json {"a": "b',
        "\\",
        "a" * 9,
        '("a"|',
        "\n",
        "%json  ",
        "A:A\n",
    ):
        assert measure_lark(text * (20_000 // len(text)))[0] <= 20_000


def test_a_long_chain_of_terminals_is_followed() -> None:
    chain = "\n".join(f"T{i}: T{i + 1}*" for i in range(3000))
    assert measure_lark(f"start: T0\n{chain}\nT3000: /a/")[1] == 3000
