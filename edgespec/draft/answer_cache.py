"""Earlier answers of one model as tokens in a file, and the drafters that copy from them or from a predicted text.

A file that is missing, damaged or foreign counts as empty; no answer fails because of it. Knows no engines.
"""

import hashlib
import os
import stat
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock, Thread

import numpy as np
import numpy.typing as npt

from edgespec.decoding.tree import NO_DRAFT, Tree
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.draft.suffix import follower_bucket
from edgespec.system.disk import hold_lock, sync, take_place
from edgespec.types import Sampler, TokenIds

CAP_BYTES = 1 << 20
NUM_PROMPT_TOKENS = 64  # stored before each answer, so that a question asked again finds it
_MAGIC = b"edgespec memory 1\n"  # the file format's
_END = -1  # after each answer
_LONGEST_HEADER = 1024
_DEPTH = 32  # the longest context that is compared
_PATIENCE_S = 1.0  # a file is written in milliseconds: a process that holds it for longer hangs or was stopped
_MAX_OCCURRENCES = 16  # whose next tokens are counted, the most recent ones

_EMPTY = np.zeros(0, np.int32)


def answers_file(folder: Path, model: str, vocab_sha256: str) -> Path:
    key = hashlib.sha256(f"{model}\n{vocab_sha256}".encode()).hexdigest()[:16]
    return folder / f"{key}.tokens"


class AnswerCache:
    """Answers in a file of the model home, and the answers of this session until save.

    vocab_sha256: identifies the vocabulary; a file with another one is not read.
    vocab_size: of the model; a file with a token beyond it is not read.
    report: takes a line where the file cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        vocab_sha256: str,
        vocab_size: int,
        report: Callable[[str], None] = lambda line: None,
        cap_bytes: int = CAP_BYTES,
    ) -> None:
        self.path = answers_file(folder, model, vocab_sha256)
        self._vocab_size = vocab_size
        self._header = _MAGIC + vocab_sha256.encode() + b"\n"
        self._report = report
        self._max_tokens = cap_bytes // 4
        self._new: list[TokenIds] = []
        self._index: AnswerIndex | None = None
        self._builder: Thread | None = None
        self._has_reported = False
        self._lock = Lock()

    def add(self, prompt: TokenIds, answer: TokenIds) -> None:
        if len(answer):
            with self._lock:
                self._new.append(np.concatenate([prompt[-NUM_PROMPT_TOKENS:], answer]))

    def save(self) -> None:
        """Append the answers that were added to the file; the oldest answers go where it is full.

        Where another process holds the file for more than a second that is reported, and they wait for the next
        save.
        """
        with self._lock:
            new, self._new = self._new, []
        if not new:
            return
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with hold_lock(self.path.with_suffix(".lock"), timeout_s=_PATIENCE_S):
                self._write(_newest([*split_answers(self.read()), *new], self._max_tokens))
        except TimeoutError as error:
            with self._lock:
                self._new = new + self._new
            count = f"{len(new)} answers are" if len(new) != 1 else "1 answer is"
            self._report(f"{count} not saved in {self.path}: {error} (waited {_PATIENCE_S:g} s)")
        except OSError as error:
            self._report(
                f"these answers cannot help to draft later ones: cannot write {self.path} ({error.strerror})"
            )

    def read(self) -> TokenIds:
        """All answers in the file, oldest first, each with _END after it, [num_tokens]."""
        try:
            stated = self.path.stat()
            is_ours = stat.S_ISREG(stated.st_mode) and stated.st_size <= 4 * self._max_tokens + _LONGEST_HEADER
            content = self.path.read_bytes() if is_ours else b""
        except FileNotFoundError:
            return _EMPTY
        except OSError as error:
            self._report_once(f"earlier answers are not used: cannot read {self.path} ({error})")
            return _EMPTY
        tokens = self._parse(content)
        if tokens is None:
            self._report_once(
                f"earlier answers are not used: {self.path} is damaged or of another program; a new file "
                "replaces it"
            )
            return _EMPTY
        return tokens

    def texts(self) -> list[tuple[TokenIds, TokenIds]]:
        """The end of each prompt and its answer, in the file; where the prompt was short the cut is a guess."""
        ends = [(min(NUM_PROMPT_TOKENS, len(text) // 2), text) for text in split_answers(self.read())]
        return [(text[:end], text[end:]) for end, text in ends]

    def _parse(self, content: bytes) -> TokenIds | None:
        """The tokens of a file; None if save cannot have written it."""
        checked, payload = content[: len(self._header) + 32], content[len(self._header) + 32 :]
        if checked != self._header + hashlib.sha256(payload).digest() or len(payload) % 4:
            return None
        tokens = np.frombuffer(payload, "<i4").astype(np.int32)
        return tokens if np.all((tokens >= _END) & (tokens < self._vocab_size)) else None

    def index(self) -> "AnswerIndex | None":
        """The answers of earlier sessions, searchable; None until another thread has sorted them."""
        with self._lock:
            if self._builder is None:
                self._builder = Thread(target=self._build, name="answers", daemon=True)
                self._builder.start()
        return self._index

    def _report_once(self, line: str) -> None:
        if not self._has_reported:  # save reads the file again
            self._has_reported = True
            self._report(line)

    def _build(self) -> None:
        self._index = AnswerIndex(self.read()[-self._max_tokens :])

    def _write(self, answers: Sequence[TokenIds]) -> None:
        payload = b"".join(np.append(answer, _END).astype("<i4").tobytes() for answer in answers)
        new = self.path.with_suffix(".new")
        new.unlink(missing_ok=True)  # left by a process that was killed; under the lock no other process writes
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(self._header + hashlib.sha256(payload).digest() + payload)
        sync(new)
        take_place(new, self.path)


def split_answers(tokens: TokenIds) -> list[TokenIds]:
    """The text of each answer, with the end of its prompt, from the tokens that read() gives."""
    return [part[part != _END] for part in np.split(tokens, np.flatnonzero(tokens == _END) + 1) if len(part)]


def _newest(answers: Sequence[TokenIds], max_tokens: int) -> list[TokenIds]:
    """The newest answers that fit, oldest first; of equal ones the newest, of one too long its end."""
    newest: dict[bytes, TokenIds] = {}
    room = max_tokens
    for answer in reversed(answers):
        end = answer[-max(1, max_tokens - 1) :]
        if end.tobytes() in newest:
            continue
        room -= len(end) + 1
        if room < 0:
            break
        newest[end.tobytes()] = end
    return list(reversed(newest.values()))


class AnswerIndex:
    """Positions of a text, sorted by the tokens before them, from the nearest: a match is a range of positions.

    250,000 tokens are sorted in 0.15 to 0.4 s and searched in 50 µs. Prefix doubling as in suffix arrays (Manber
    and Myers, 1990).
    """

    def __init__(self, tokens: TokenIds) -> None:
        text = np.concatenate([np.full(_DEPTH, _END, np.int32), tokens, np.full(1, _END, np.int32)])
        rank: npt.NDArray[np.int64] = text.astype(np.int64) - _END
        step = 1
        while step < _DEPTH:
            before = np.concatenate([np.zeros(step, np.int64), rank[:-step]])
            pairs = rank * (int(rank.max()) + 1) + before
            rank = np.unique(pairs, return_inverse=True)[1].astype(np.int64)
            step *= 2
        # Single elements of a buffer are read three times as fast as elements of an array.
        self._order = np.argsort(rank, kind="stable").astype(np.int64).data
        self._text = text.data

    def match(self, tokens: TokenIds) -> tuple[int, list[int]]:
        """Length of the longest suffix of tokens, up to 32, that occurs here, and the positions of its last token.

        Of more than 256 occurrences the last in sorted order are given, not the most recent.
        """
        low, high = 0, len(self._order)
        length = 0
        for token in tokens[: -_DEPTH - 1 : -1].tolist():

            def before(position: int, length: int = length) -> int:
                return self._text[position - length]

            first = bisect_left(self._order, token, low, high, key=before)
            last = bisect_right(self._order, token, first, high, key=before)
            if first == last:
                break
            low, high, length = first, last, length + 1
        return length, self._order[max(low, high - _MAX_OCCURRENCES**2) : high].tolist() if length else []

    def draft(self, tokens: TokenIds, num: int, source: str) -> Tree:
        """The most frequent continuation of the match's most recent occurrences, up to num tokens."""
        length, positions = self.match(tokens)
        positions = sorted(positions, reverse=True)[:_MAX_OCCURRENCES]  # the most recent wins a tie
        found, buckets = list[int](), list[int]()
        while len(found) < num:
            followers = [token for position in positions if (token := self._text[position + 1]) != _END]
            if not followers:
                break
            token, num_seen, num_kinds = followers[0], 1, 1
            if len(followers) > 1:
                counts = Counter(followers)
                (token, num_seen), num_kinds = counts.most_common(1)[0], len(counts)
            buckets.append(follower_bucket(length + len(found), num_seen, is_unanimous=num_kinds == 1))
            found.append(token)
            positions = [position + 1 for position in positions if self._text[position + 1] == token]
        return Tree(np.array(found, np.int32), tuple(buckets), source=source) if found else NO_DRAFT


class AnswerDrafter(Drafter):
    """Drafts the most frequent continuation of the longest suffix of the text that occurs in earlier answers."""

    name = "answers"

    def __init__(self, answers: AnswerCache) -> None:
        self._answers = answers

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        index = self._answers.index()
        return index.draft(tokens, request.num_tokens, self.name) if index else NO_DRAFT


class PredictionDrafter(Drafter):
    """Drafts what follows, in a predicted text, the longest end of the answer that occurs there.

    The predicted text lies after the end of the prompt, so that the first pass can draft its beginning already.
    `[1, 2]` before the prediction `[3, 4, 5]` drafts `[3, 4, 5]`; after `[1, 2, 9, 4]` it drafts `[5]`.
    """

    name = "prediction"

    def __init__(self, prompt: TokenIds, predicted: TokenIds) -> None:
        self._index = AnswerIndex(np.concatenate([prompt[-NUM_PROMPT_TOKENS:], predicted]))

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        return self._index.draft(tokens, request.num_tokens, self.name)
