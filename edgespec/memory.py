"""Earlier answers of one model as tokens in a file, and the drafter that reads on in them.

The file is a convenience: one that is missing, damaged or foreign is an empty one, and no answer fails with it.
Knows nothing of engines.
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

from edgespec.disk import sync
from edgespec.lock import locked
from edgespec.suffix import Follower, draft_of
from edgespec.types import NOTHING, Ask, Draft, Logits, Sampler, TokenIds

CAP_BYTES = 1 << 20
NUM_PROMPT_TOKENS = 64  # of a prompt are kept before its answer, which begins alike where the question ended alike
_MAGIC = b"edgespec memory 1\n"
_END = -1  # behind each answer
_LONGEST_HEADER = 1024
_DEPTH = 32  # the longest context that is told apart
_PATIENCE_S = 1.0  # a file is written in milliseconds: who holds it for longer hangs or was stopped
_MAX_FOLLOWED = 16  # occurrences that are read on in, the most recent of them

_EMPTY = np.zeros(0, np.int32)


class Memory:
    """Answers in a file of the model home, and those of this session until save.

    vocab_sha256: what the tokens mean; a file of other tokens is not read.
    vocab_size: of the model, which could not run a token from there on.
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
        key = hashlib.sha256(f"{model}\n{vocab_sha256}".encode()).hexdigest()[:16]
        self.path = folder / f"{key}.tokens"
        self._vocab_size = vocab_size
        self._header = _MAGIC + vocab_sha256.encode() + b"\n"
        self._report = report
        self._max_tokens = cap_bytes // 4
        self._new: list[TokenIds] = []
        self._index: MemoryIndex | None = None
        self._builder: Thread | None = None
        self._has_reported = False
        self._lock = Lock()

    def add(self, prompt: TokenIds, answer: TokenIds) -> None:
        """Keep an answer, which save will write."""
        if len(answer):
            with self._lock:
                self._new.append(np.concatenate([prompt[-NUM_PROMPT_TOKENS:], answer]))

    def save(self) -> None:
        """Write what was added behind what the file holds by now; the oldest answers go where it is full.

        Where another process holds the file for more than a second that is told, and what was added waits for the
        next save.
        """
        with self._lock:
            new, self._new = self._new, []
        if not new:
            return
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(self.path.with_suffix(".lock"), patience_s=_PATIENCE_S):
                self._write(_newest([*_split(self.read()), *new], self._max_tokens))
        except TimeoutError as error:
            with self._lock:
                self._new = new + self._new
            self._report(f"{_counted(len(new))} not kept in {self.path}: {error} (waited {_PATIENCE_S:g} s)")
        except OSError as error:
            self._report(f"this session's answers are not kept: cannot write {self.path} ({error})")

    def read(self) -> TokenIds:
        """All answers in the file, oldest first, each with _END behind it, [num_tokens]."""
        try:
            stated = self.path.stat()
            is_ours = stat.S_ISREG(stated.st_mode) and stated.st_size <= 4 * self._max_tokens + _LONGEST_HEADER
            content = self.path.read_bytes() if is_ours else b""
        except FileNotFoundError:
            return _EMPTY
        except OSError as error:
            self._tell(f"earlier answers are not used: cannot read {self.path} ({error})")
            return _EMPTY
        tokens = self._parsed(content)
        if tokens is None:
            self._tell(f"earlier answers are not used: {self.path} is damaged or foreign; it is begun anew")
            return _EMPTY
        return tokens

    def _parsed(self, content: bytes) -> TokenIds | None:
        """The tokens of a file; None if it is not as save writes it."""
        checked, payload = content[: len(self._header) + 32], content[len(self._header) + 32 :]
        if checked != self._header + hashlib.sha256(payload).digest() or len(payload) % 4:
            return None
        tokens = np.frombuffer(payload, "<i4").astype(np.int32)
        return tokens if np.all((tokens >= _END) & (tokens < self._vocab_size)) else None

    def index(self) -> "MemoryIndex | None":
        """The answers of earlier sessions, searchable; None until another thread has sorted them."""
        with self._lock:
            if self._builder is None:
                self._builder = Thread(target=self._build, name="memory", daemon=True)
                self._builder.start()
        return self._index

    def wait(self) -> None:
        """Until index has an answer."""
        self.index()
        assert self._builder is not None
        self._builder.join()

    def _tell(self, line: str) -> None:
        if not self._has_reported:  # save reads the file again
            self._has_reported = True
            self._report(line)

    def _build(self) -> None:
        self._index = MemoryIndex(self.read()[-self._max_tokens :])

    def _write(self, answers: Sequence[TokenIds]) -> None:
        payload = b"".join(np.append(answer, _END).astype("<i4").tobytes() for answer in answers)
        new = self.path.with_suffix(".new")
        new.unlink(missing_ok=True)  # of a process that was killed; the lock says that none is writing
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(self._header + hashlib.sha256(payload).digest() + payload)
        sync(new)
        os.replace(new, self.path)


def _counted(num_answers: int) -> str:
    return f"{num_answers} answers are" if num_answers != 1 else "1 answer is"


def _split(tokens: TokenIds) -> list[TokenIds]:
    return [part[part != _END] for part in np.split(tokens, np.flatnonzero(tokens == _END) + 1) if len(part)]


def _newest(answers: Sequence[TokenIds], max_tokens: int) -> list[TokenIds]:
    """The newest answers that fit, oldest first; of equal ones the newest, of one too long its end."""
    kept: dict[bytes, TokenIds] = {}
    room = max_tokens
    for answer in reversed(answers):
        end = answer[-max(1, max_tokens - 1) :]
        if end.tobytes() in kept:
            continue
        room -= len(end) + 1
        if room < 0:
            break
        kept[end.tobytes()] = end
    return list(reversed(kept.values()))


class MemoryIndex:
    """Positions of a text, sorted by the tokens before them, the nearest first: a match is a range of them.

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
        # Single elements of these are read three times as fast as those of an array of numpy.
        self._order = np.argsort(rank, kind="stable").astype(np.int64).data
        self._text = text.data

    def match(self, tokens: TokenIds) -> tuple[int, list[int]]:
        """Length of the longest suffix of tokens, up to 32, that occurs here, and where its last token lies.

        Of more than 256 occurrences these are the last in order, not the most recent.
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
        return length, self._order[max(low, high - _MAX_FOLLOWED**2) : high].tolist() if length else []

    def guesses(self, tokens: TokenIds, num: int) -> list[Follower]:
        """What most often followed the match, of its most recent occurrences, and then that, up to num tokens."""
        length, positions = self.match(tokens)
        followed = sorted(positions, reverse=True)[:_MAX_FOLLOWED]  # of equally frequent the most recent leads
        guessed: list[Follower] = []
        while len(guessed) < num:
            seen = [token for position in followed if (token := self._text[position + 1]) != _END]
            if not seen:
                break
            token, num_seen, num_kinds = seen[0], len(seen), 1
            if num_seen > 1:
                counts = Counter(seen)
                (token, num_seen), num_kinds = counts.most_common(1)[0], len(counts)
            guessed.append(Follower(token, length + len(guessed), num_seen, num_kinds == 1))
            followed = [position + 1 for position in followed if self._text[position + 1] == token]
        return guessed


class MemoryDrafter:
    """What most often followed the longest suffix of the text that occurs in earlier answers."""

    name = "memory"
    is_free = True

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def draft(self, tokens: TokenIds, ask: Ask, sampler: Sampler) -> Draft:
        index = self._memory.index()
        if index is None:
            return NOTHING
        return draft_of(index.guesses(tokens, ask.num_tokens), self.name)

    def learn(self, tokens: TokenIds, draft: Draft, logits: Logits) -> None:
        pass
