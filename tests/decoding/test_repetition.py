"""What is a loop, and what only repeats."""

import re

import pytest

from edgespec.decoding.repetition import LoopWatch, ends_in_loop

_IDS: dict[str, int] = {}

POEM = """Row upon row the barley stands,
and the wind comes over the hill.
{verse}
Sing low, sing low, the mill goes round,
sing low, the night is still.
"""
SONG = "{n} bottles of beer on the wall, {n} bottles of beer. Take one down, pass it around.\n"
TABLE = "| {n} | yes | no | 0 | 0 | 0 |\n"
CODE = """    if value == {n}:
        return result[{n}]
"""
EMPTY_CELLS = "<tr><td></td><td></td><td></td></tr>\n"


def ids(text: str) -> list[int]:
    """A token for each word, space and sign."""
    return [_IDS.setdefault(word, len(_IDS)) for word in re.findall(r"\w+|\s|[^\w\s]", text)]


SENTENCE = "The sky is blue because the air scatters short waves of light more than long ones. "
PARAGRAPH = " ".join(f"word{i} and" for i in range(60)) + ".\n\n"


def test_a_watch_finds_a_loop_soon_and_at_one_place_however_the_tokens_come() -> None:
    tokens = ids(SENTENCE * 30)
    founds = set()
    for width in (1, 5, 7, 64, 200, len(tokens)):
        watch = LoopWatch()
        ends = (
            num and at + num
            for at in range(0, len(tokens), width)
            for num in [watch.find(tokens[at : at + width])]
        )
        founds.add(next(filter(None, ends)))
    (found,) = founds
    assert ends_in_loop(tokens[:found])
    assert not ends_in_loop(tokens[: found - 64])
    watch = LoopWatch()
    assert not any(watch.find([token]) for token in range(1000))


@pytest.mark.parametrize(
    ("before", "span", "times"),
    [
        ("", "-", 900),
        ("A list:\n", "na ", 500),
        ("", SENTENCE, 12),
        ("First. ", PARAGRAPH, 9),
        ("", "Sorry, no. ", 130),
    ],
)
def test_a_span_over_and_over_is_a_loop(before: str, span: str, times: int) -> None:
    assert ends_in_loop(ids(before + span * times))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "word",
        "\n".join(POEM.format(verse=f"Verse {i} tells of the {i}th year.") for i in range(30)),
        "".join(SONG.format(n=99 - i) for i in range(99)),
        "".join(TABLE.format(n=i) for i in range(200)),
        "".join(CODE.format(n=i) for i in range(200)),
        EMPTY_CELLS * 12,
        "[0, 0, 0, 0, 0, 0, 0, 0, 0, 0],\n" * 10,
        "0, " * 128,
        "=" * 80 + "\n" + "+----" * 16 + "\n",
        "".join(f"{i}. item\n" for i in range(300)),
        SENTENCE * 5 + "And that is all.",
        "All work and no play makes Jack a dull boy.\n" * 7,
    ],
)
def test_tables_code_lists_and_refrains_are_none(text: str) -> None:
    tokens = ids(text)
    assert all(not ends_in_loop(tokens[:end]) for end in range(0, len(tokens) + 1, 7))
    assert not ends_in_loop(tokens)


def test_a_loop_that_has_ended_is_none() -> None:
    assert not ends_in_loop(ids(SENTENCE * 30 + "So much for that."))
