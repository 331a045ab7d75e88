"""Passages of text files, and which of them a question is about (BM25). Knows nothing of language models."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

SUFFIXES = (".md", ".txt", ".rst", ".org")
_NUM_WORDS = 90  # a passage is about this long
_MAX_BYTES = 1 << 20  # a larger file is no note
# How soon a word repeated counts no more, and how much a long passage is held against it (Robertson et al., 1994).
_K1, _B = 1.2, 0.75
_LEAST_SHARE = 0.4  # of the best passage's score; less is chance


@dataclass(frozen=True)
class Passage:
    file: str
    line: int
    heading: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def read_folder(folder: Path) -> list[Passage]:
    """The passages of all notes in a folder and below, in order; hidden files and folders are left out."""
    names = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if _is_note(path)]
    shown = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    texts = ((name, (folder / name).read_text(encoding="utf-8", errors="replace")) for name in shown)
    return [passage for name, text in texts for passage in passages_of(name.as_posix(), text)]


def _is_note(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file() and path.stat().st_size <= _MAX_BYTES


def passages_of(file: str, text: str) -> Iterator[Passage]:
    """Neighbouring paragraphs under one heading, together as long as they are short."""
    heading, held, start = "", list[str](), 1
    for line, paragraph in _paragraphs(text):
        is_heading = paragraph.startswith("#")
        if held and (is_heading or len(" ".join([*held, paragraph]).split()) > _NUM_WORDS):
            yield Passage(file, start, heading, "\n".join(held))
            held = []
        if is_heading:
            first, _, paragraph = paragraph.partition("\n")
            heading, line = first.lstrip("# "), line + 1
        if paragraph:
            start = start if held else line
            held.append(paragraph)
    if held:
        yield Passage(file, start, heading, "\n".join(held))


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """What stands between blank lines, with its line number."""
    start, held = 1, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if line.strip():
            start = start if held else number
            held.append(line.rstrip())
        elif held:
            yield start, "\n".join(held)
            held = []


def words(text: str) -> list[str]:
    """Lower case, and without the s of a plural, so that boats finds boat."""
    return [
        word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
        for word in re.findall(r"\w+", text.casefold())
    ]


# They say nothing of what a question is about.
_COMMON = frozenset(
    words(
        "a an and are at be by can did do does for from has have how i in is it its me my of on or shall that the "
        "their there they this to was we were what when where which who why will with you your"
    )
)


class Index:
    """Passages by the words that they hold; file names and headings count as words of theirs."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = list(passages)
        counts = [Counter(words(f"{each.file} {each.heading} {each.text}")) for each in passages]
        self._lengths = np.array([count.total() for count in counts], float)
        holders: dict[str, list[tuple[int, int]]] = {}
        for i, count in enumerate(counts):
            for word, times in count.items():
                holders.setdefault(word, []).append((i, times))
        self._holders = {word: np.array(pairs) for word, pairs in holders.items()}

    def scores(self, question: str) -> npt.NDArray[np.float64]:
        """How much each passage is about the question, [num_passages]; 0 for one that shares no word."""
        scores = np.zeros(len(self.passages))
        relative = self._lengths / max(self._lengths.mean(), 1.0) if len(scores) else self._lengths
        for word in (set(words(question)) - _COMMON) & self._holders.keys():
            rows, times = self._holders[word].T
            rarity = np.log1p((len(scores) - len(rows) + 0.5) / (len(rows) + 0.5))
            scores[rows] += rarity * times * (_K1 + 1) / (times + _K1 * (1 - _B + _B * relative[rows]))
        return scores

    def best(self, question: str, most: int) -> list[Passage]:
        """The passages that share telling words with the question, the likeliest first."""
        scores = self.scores(question)
        least = _LEAST_SHARE * scores.max(initial=0.0)
        order = np.argsort(-scores, kind="stable")[:most]
        return [self.passages[i] for i in order if scores[i] > 0 and scores[i] >= least]
