"""Commands in messages can be typed as they are printed."""

import shlex
from pathlib import Path
from subprocess import list2cmdline

import pytest

from edgespec.system.command_line import join_words, quote

WORDS = ["plain", "two words", "it's", 'a "b"', "$HOME", "x;y", ""]


def test_a_posix_shell_reads_the_words_that_were_joined() -> None:
    assert shlex.split(join_words(WORDS, "linux")) == WORDS
    assert shlex.split(join_words(WORDS, "darwin")) == WORDS


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("plain", "plain"),
        (r"C:\models\x", r"C:\models\x"),
        (r"C:\My Models\m.gguf", r'"C:\My Models\m.gguf"'),
        ("it's", '"it\'s"'),
    ],
)
def test_windows_takes_double_quotes(word: str, quoted: str) -> None:
    assert quote(word, "win32") == quoted


@pytest.mark.parametrize("word", ["two words", "it's mine", 'a "b" c', "D:\\my folder\\", 'a\\" b', ""])
def test_windows_programs_read_the_word(word: str) -> None:
    """By the rules that list2cmdline follows, which adds quotes only where there are spaces."""
    assert quote(word, "win32") == list2cmdline([word])


def test_a_path_that_begins_with_a_dash_is_no_option() -> None:
    assert quote(Path("-x"), "linux") == "./-x"
    assert quote("-x", "linux") == "-x"
