"""Find the passages of text files that a question is about (BM25). Knows nothing of language models."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

SUFFIXES = (".md", ".txt", ".rst", ".org")
_NUM_WORDS = 90  # a passage has about this many words
_MAX_BYTES = 1 << 20  # a larger file is not a note
# BM25: how quickly repetitions of a word stop counting, and how much long passages lose (Robertson et al., 1994).
_K1, _B = 1.2, 0.75
_MIN_SHARE = 0.4  # a passage with a smaller share of the best score matches by chance


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
    """Read the passages of all notes in a folder and its subfolders, but not in hidden ones."""
    names = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if _is_note(path)]
    shown = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    texts = ((name, (folder / name).read_text(encoding="utf-8", errors="replace")) for name in shown)
    return [passage for name, text in texts for passage in split_passages(name.as_posix(), text)]


def _is_note(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file() and path.stat().st_size <= _MAX_BYTES


def split_passages(file: str, text: str) -> Iterator[Passage]:
    """Split a text into passages: neighbouring paragraphs under one heading, joined while they are short."""
    heading, paragraphs, start = "", list[str](), 1
    for line, paragraph in _split_paragraphs(text):
        is_heading = paragraph.startswith("#")
        if paragraphs and (is_heading or len(" ".join([*paragraphs, paragraph]).split()) > _NUM_WORDS):
            yield Passage(file, start, heading, "\n".join(paragraphs))
            paragraphs = []
        if is_heading:
            first, _, paragraph = paragraph.partition("\n")
            heading, line = first.lstrip("# "), line + 1
        if paragraph:
            start = start if paragraphs else line
            paragraphs.append(paragraph)
    if paragraphs:
        yield Passage(file, start, heading, "\n".join(paragraphs))


def _split_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Split a text at blank lines; yields each paragraph with its line number."""
    start, lines = 1, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if line.strip():
            start = start if lines else number
            lines.append(line.rstrip())
        elif lines:
            yield start, "\n".join(lines)
            lines = []


def words(text: str) -> list[str]:
    """The words of a text in lower case, without the s of a plural, so that "boats" finds "boat"."""
    return [
        word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
        for word in re.findall(r"\w+", text.casefold())
    ]


# These words do not show what a question is about.
_COMMON = frozenset(
    words(
        "a an and are at be by can did do does for from has have how i in is it its me my of on or shall that the "
        "their there they this to was we were what when where which who why will with you your"
    )
)


class Index:
    """Passages by their words; the file name and the heading of a passage count as its words."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = list(passages)
        counts = [Counter(words(f"{each.file} {each.heading} {each.text}")) for each in passages]
        self._lengths = np.array([count.total() for count in counts], float)
        postings: dict[str, list[tuple[int, int]]] = {}
        for i, count in enumerate(counts):
            for word, times in count.items():
                postings.setdefault(word, []).append((i, times))
        self._postings = {word: np.array(pairs) for word, pairs in postings.items()}

    def scores(self, question: str) -> npt.NDArray[np.float64]:
        """BM25 score of each passage, [num_passages]; 0 for a passage that shares no word with the question."""
        scores = np.zeros(len(self.passages))
        relative = self._lengths / max(self._lengths.mean(), 1.0) if len(scores) else self._lengths
        for word in (set(words(question)) - _COMMON) & self._postings.keys():
            rows, times = self._postings[word].T
            rarity = np.log1p((len(scores) - len(rows) + 0.5) / (len(rows) + 0.5))
            scores[rows] += rarity * times * (_K1 + 1) / (times + _K1 * (1 - _B + _B * relative[rows]))
        return scores

    def best(self, question: str, max_passages: int) -> list[Passage]:
        """At most max_passages passages that share uncommon words with the question, best first."""
        scores = self.scores(question)
        lowest = _MIN_SHARE * scores.max(initial=0.0)
        order = np.argsort(-scores, kind="stable")[:max_passages]
        return [self.passages[i] for i in order if scores[i] > 0 and scores[i] >= lowest]
