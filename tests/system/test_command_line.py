"""Commands in messages can be typed as they are printed."""

import shlex
from pathlib import Path
from subprocess import list2cmdline

import pytest

from edgespec.system.command_line import join_words, quote, split_words

WORDS = ["plain", "two words", "it's", 'a "b"', "$HOME", "x;y", ""]


def test_a_posix_shell_reads_the_words_that_were_joined() -> None:
    assert shlex.split(join_words(WORDS, "linux")) == split_words(join_words(WORDS, "linux"), "linux") == WORDS
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


def test_words_of_windows_keep_their_backslashes() -> None:
    words = [r"C:\tools\vim.exe", r"C:\My Tools\vim.exe", "it's", "", "-f", "#1"]
    assert split_words(join_words(words, "win32"), "win32") == words
    assert split_words(r"'C:\My Tools\vim.exe' -f", "win32") == [r"C:\My Tools\vim.exe", "-f"]
    with pytest.raises(ValueError, match="quot"):
        split_words('"C:', "win32")


def test_a_path_that_begins_with_a_dash_is_no_option() -> None:
    assert quote(Path("-x"), "linux") == "./-x"
    assert quote("-x", "linux") == "-x"
