"""Text to token ids and back, whole and as a stream.

Text never becomes a special token: only a chat template, or a caller who asks for it, places those.

A tokenizer that comes with a model is tried once, in a process that can be ended, before this one reads it. Its
rules may grow a text, never end or panic, and what they do is not seen from how they are written. That a file was
tried is recorded in the model home, by its content.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as _Tokenizer

from edgespec.config.config_file import default_home
from edgespec.errors import ManifestError, MemoryExhausted, ModelError, UsageError
from edgespec.system.context_managers import contextmanager
from edgespec.system.line_process import WorkEnded, ask_once
from edgespec.system.text_files import decode_text, read_plain
from edgespec.system.threads import NO_THREAD
from edgespec.system.typed_json import RecordFile
from edgespec.text.special_tokens import special_pattern
from edgespec.tools import channels
from edgespec.types import TokenIds

# Stands for bytes that are not, or not yet, a character.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
# Behind a piece that another token has too: such a token stands for the same text, and no text becomes it.
TWIN = "\U0010fffd"
# Twice the file of Gemma 3, the largest in use; a file of 46 MB made to be slow takes 8 s and 1.2 GB.
_MAX_BYTES = 64 << 20
_MANY_TOKENS = 4096  # take a millisecond to decode
# Characters that are counted at a time, and the most tokens that a cut between two slices adds.
_SLICE, _JOINED_TOKENS = 1 << 16, 64
_PROBE = Path(__file__).with_name("tokenizer_probe.py")
_TRIED, _MOST_TRIED = "tokenizers.json", 500  # the file of those that were tried, and how many it keeps
# Of a trial, and for each byte of the file: real ones take 0.2 s and 25 MB for each MB.
_TRIAL_S, _S_EACH = 5.0, 1e-6
_TRIAL_BYTES, _BYTES_EACH = 512 << 20, 25


def vocabulary_sha256(tokenizer: _Tokenizer) -> str:
    """Hash of every piece in order of its id: equal for models whose tokens mean the same."""
    pieces = sorted((token, piece) for piece, token in tokenizer.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256("".join(f"{token}\t{piece}\n" for token, piece in pieces).encode()).hexdigest()


def open_tokenizer(path: Path, kind: type[ModelError], advice: str) -> _Tokenizer:
    """Read a tokenizer.json that may be hostile; padding and truncation are switched off.

    Raises an error of the given kind, ending in advice: not a tokenizer, or made to take time or memory.
    """
    with translate_errors(path, kind, advice):
        text = decode_text(data := read_plain(path, _MAX_BYTES))
        _require_harmless(path, data, kind, advice)
        tokenizer = _Tokenizer.from_str(text)
        tokenizer.no_padding()
        tokenizer.no_truncation()
    return tokenizer


@dataclass(frozen=True, kw_only=True)
class TriedTokenizer:
    """library: The version of tokenizers that it was tried with."""

    library: str


def _require_harmless(path: Path, data: bytes, kind: type[ModelError], advice: str) -> None:
    """Raises an error of the given kind, ending in advice: The tokenizer at path, whose content is data, harms."""
    key, library = hashlib.sha256(data).hexdigest(), version("tokenizers")
    records = _records()
    if records is not None and (known := records.read().get(key)) and known.library == library:
        return
    if said := _try(path, len(data)):
        raise kind(f"{path} is not a usable tokenizer ({said}); {advice}")
    remember_harmless(data)


def remember_harmless(data: bytes) -> None:
    """Record a tokenizer that was made of one that was tried, or by rules of edgespec."""
    if (records := _records()) is not None:
        with suppress(OSError):  # a home that may not be written: it is tried again the next time
            records.path.parent.mkdir(parents=True, exist_ok=True)
            records.write(hashlib.sha256(data).hexdigest(), TriedTokenizer(library=version("tokenizers")))


def _records() -> RecordFile[TriedTokenizer] | None:
    with suppress(UsageError):  # the configuration, which others complain of, names no home
        path = default_home() / _TRIED
        return RecordFile(path, dict[str, TriedTokenizer], "tried", version=1, most=_MOST_TRIED)
    return None


def _try(path: Path, num_bytes: int) -> str:
    """The fault of a tokenizer in words; empty for one that can be used."""
    most_s, most_bytes = _TRIAL_S + _S_EACH * num_bytes, _TRIAL_BYTES + _BYTES_EACH * num_bytes
    try:
        return ask_once([str(_PROBE), str(path.absolute())], b"\n", most_s, most_bytes).decode().strip()
    except OSError as error:
        raise ModelError(f"cannot start Python to try the tokenizer ({error})") from None
    except WorkEnded as ended:
        return str(ended)


@contextmanager
def translate_errors(path: object, kind: type[ModelError], advice: str) -> Iterator[None]:
    """Turn failures of the tokenizer library, bare Exceptions and panics, into errors of the given kind."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if "ThreadPoolBuildError" in str(error):
            raise MemoryExhausted(NO_THREAD) from None
        raise kind(f"{path} is not a usable tokenizer ({error}); {advice}") from None


def _encode_plain(tokenizer: _Tokenizer, text: str) -> list[int]:
    # Alone the library's other methods leave the interpreter to other threads.
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _byte_by_character() -> dict[str, int]:
    """The byte of each printable character that byte-level BPE writes for it (GPT-2)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_by_character()


def _decode_byte_level(piece: str) -> bytes:
    known = [_BYTE_OF.get(character) for character in piece]
    return piece.encode() if None in known else bytes(byte for byte in known if byte is not None)


def _decode_piece(piece: str) -> bytes:
    """A piece of SentencePiece: a byte by its number, or text with visible spaces."""
    return bytes([int(piece[3:5], 16)]) if _BYTE_PIECE.fullmatch(piece) else piece.replace("▁", " ").encode()


class Tokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, path: Path, bos_token_id: int | None = None, add_bos: bool = False) -> None:
        """Raises ManifestError: The file is not a tokenizer, or is malicious."""
        self.path = path  # the tokenizer.json that was read
        self._tokenizer = open_tokenizer(path, ManifestError, "export the model again")
        # The library's option by which special tokens in a text stay text.
        self._tokenizer.encode_special_tokens = True
        self._first = [bos_token_id] if add_bos and bos_token_id is not None else self._tokens_before()
        self._has_byte_tokens = self._tokenizer.token_to_id("<0x00>") is not None
        added = self._tokenizer.get_added_tokens_decoder()
        # Ids by spelling.
        self.special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        # Those that text becomes too, where it spells them, are among these.
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        self._special_ids = frozenset(self.special_tokens.values())

    def _tokens_before(self) -> list[int]:
        """What the tokenizer itself puts before a text, as GLM-4 does [gMASK]<sop>."""
        with translate_errors(self.path, ManifestError, "export the model again"):
            alone, whole = (self._tokenizer.encode("a", add_special_tokens=adds).ids for adds in (False, True))
        return whole[: whole.index(alone[0])] if {*alone[:1]} & {*whole} else []

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return special_pattern(self._tokenizer.get_added_tokens_decoder().values())

    @cached_property
    def channel_marks(self) -> dict[int, str]:
        """The marks around the messages of an answer by id; none where an answer is one message."""
        if not {*channels.MARKS} <= self.special_tokens.keys():
            return {}
        return {self.special_tokens[mark]: mark for mark in channels.MARKS}

    @cached_property
    def think_marks(self) -> tuple[str, str]:
        """The marks around reasoning as this tokenizer spells them; <think> and </think> where it has none."""
        known = (pair for pair in channels.THINK_MARKS if {*pair} <= self.added_tokens.keys())
        return next(known, channels.THINK_MARKS[0])

    @cached_property
    def think_texts(self) -> dict[int, str]:
        """The text of the tokens of these marks in an answer, where it would not be <think> or </think>."""
        texts = channels.THINK_MARKS[0]
        found = {self.added_tokens.get(mark, -1): text for mark, text in zip(self.think_marks, texts, strict=True)}
        is_text = self.think_marks == texts and not self._special_ids & found.keys()
        return {} if is_text or -1 in found else found

    @property
    def pieces(self) -> dict[int, str]:
        """The spelling of each token of the vocabulary, by id."""
        return {token: piece for piece, token in self._tokenizer.get_vocab(with_added_tokens=True).items()}

    @property
    def spellings(self) -> dict[int, bytes]:
        """The bytes of each token that stands for text, by id; special tokens are left out."""
        decoder = self._tokenizer.decoder
        is_byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
        return {
            token: _decode_byte_level(piece) if is_byte_level else _decode_piece(piece)
            for token, twin in self.pieces.items()
            for piece in [twin.rstrip(TWIN)]
            if token not in self._special_ids
        }

    def piece(self, token: int) -> str | None:
        """The spelling of a token; None where the vocabulary lacks it."""
        spelling = self._tokenizer.id_to_token(token)
        return None if spelling is None else str(spelling)

    def ends_in_bytes(self, tokens: Sequence[int]) -> bool:
        """True if the text ends in tokens of single bytes, with which SentencePiece spells rare characters."""
        if not self._has_byte_tokens:
            return False
        last = next((token for token in reversed(tokens) if token not in self._special_ids), None)
        return last is not None and _BYTE_PIECE.fullmatch(self.piece(last) or "") is not None

    @cached_property
    def _behind_text(self) -> _Tokenizer:
        """For what follows other text, which differs where only the beginning of a whole text is marked (▁)."""
        cutter = self._tokenizer.pre_tokenizer
        stated = b"" if cutter is None else bytes(cutter.__getstate__())
        if (first := b'"prepend_scheme":"first"') not in stated:
            return self._tokenizer
        state = json.loads(self._tokenizer.to_str())
        state["pre_tokenizer"] = json.loads(stated.replace(first, first.replace(b"first", b"never")))
        other = _Tokenizer.from_str(json.dumps(state))
        other.encode_special_tokens = True
        return other

    def encode(
        self, text: str, *, special: bool = False, ignore: str = "", is_behind_text: bool = False
    ) -> TokenIds:
        """Token ids of text, [num_tokens].

        Args:
            text: Any text; lone surrogates become U+FFFD.
            special: Treat special tokens spelled in text as such, as in a rendered template.
            ignore: A character that is dropped once special tokens have been found.
            is_behind_text: It follows other text, and does not begin a sequence.

        Raises ManifestError: The tokenizer fails on the text.
        """
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids: list[int] = []
        parts = self._special_pattern.split(text) if special and self.special_tokens else [text]
        for part, behind in zip(parts, [*parts[1:], ""], strict=True):
            token = part if part in self.special_tokens else part.strip()
            # A character alone can only have the dropped one behind it.
            is_text = ignore and len(token) == 1 and behind.startswith(ignore)
            if special and not is_text and token in self.special_tokens:
                ids.append(self.special_tokens[token])
            else:
                plain = part.replace(ignore, "") if ignore else part
                tokenizer = self._behind_text if ids or is_behind_text else self._tokenizer
                with translate_errors(self.path, ManifestError, "export the model again"):
                    found = _encode_plain(tokenizer, plain)
                    if not self._special_ids.isdisjoint(found):  # Unigram has special tokens among its pieces
                        found = [
                            token for cut in self._cut_special(plain) for token in _encode_plain(tokenizer, cut)
                        ]
                    ids += found
        if ids[: len(self._first)] != self._first and not is_behind_text:
            ids = [*self._first, *ids]
        return np.array(ids, np.int32)

    def _cut_special(self, text: str) -> Iterator[str]:
        """The parts of a text, cut within each special token that it spells."""
        start = 0
        for found in self._special_pattern.finditer(text):
            if len(found[0].strip()) > 1:
                cut = found.end() - len(found[0].lstrip()) + 1
                yield text[start:cut]
                start = cut
        yield text[start:]

    def least_tokens(self, text: str, enough: int) -> int:
        """A lower bound of the number of tokens of text, which is read only until the bound exceeds enough."""
        num_tokens = 0
        for start in range(0, len(text), _SLICE):
            num_tokens += max(0, len(self.encode(text[start : start + _SLICE])) - _JOINED_TOKENS)
            if num_tokens > enough:
                break
        return num_tokens

    def decode(self, tokens: Iterable[int], shown: Collection[int] = ()) -> str:
        """The text of tokens, without special tokens but for those that are to be shown."""
        if not shown:
            return self._decode([int(token) for token in tokens], skips_special=True)
        kept = [int(token) for token in tokens if int(token) in shown or int(token) not in self._special_ids]
        return self._decode(kept, skips_special=False)

    def _decode(self, tokens: list[int], skips_special: bool) -> str:
        """The text of tokens; of many without the interpreter, which the library keeps for a single text."""
        if len(tokens) < _MANY_TOKENS:
            return str(self._tokenizer.decode(tokens, skip_special_tokens=skips_special))
        return str(self._tokenizer.decode_batch([tokens], skip_special_tokens=skips_special)[0])

    def special_within(self, texts: Iterable[str]) -> frozenset[int]:
        whole = list(texts)
        return frozenset(
            token for spelling, token in self.special_tokens.items() if any(spelling in text for text in whole)
        )


class TextStream:
    """Tokens in, text out, cut only where a character is complete: joined, with flush last, the decoded whole."""

    # Tokens before the new ones, enough for a decoder that looks back (leading spaces, byte runs).
    _NUM_CONTEXT = 8

    def __init__(
        self, tokenizer: Tokenizer, shown: Collection[int] = (), before: Sequence[int] | TokenIds = ()
    ) -> None:
        """The text of tokens that are yet to come.

        Args:
            shown: Special tokens that are text here.
            before: Tokens that this text continues; it begins a text of its own where there are none, and an
                answer in a conversation, whose messages are made one text.
        """
        self._tokenizer = tokenizer
        self._shown_special = shown
        self._tokens = [int(token) for token in before[-self._NUM_CONTEXT :]]
        if self._decode(self._tokens).endswith(_REPLACEMENT):  # within a character
            self._tokens = []
        self._start = 0  # first token of the window that is decoded again
        self._shown = len(self._tokens)  # tokens whose text has been handed out
        self._channels = channels.ChannelText() if tokenizer.channel_marks and not len(before) else None
        self._think_texts = {} if len(before) else tokenizer.think_texts
        self._header = self._begun = ""  # behind the mark of reasoning, and as far as it is there

    def _decode(self, tokens: Iterable[int]) -> str:
        return self._tokenizer.decode(tokens, self._shown_special)

    def skip(self, tokens: Iterable[int]) -> None:
        """Take tokens whose text is known already; a character that they begin comes whole, with its last byte."""
        for token in tokens:
            self.push([token])
        if not self._rest().endswith(_REPLACEMENT):
            self._finish()

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete; empty while a character is incomplete."""
        if self._channels is None:
            return "".join(map(self._text_of, tokens)) if self._think_texts else self._push(tokens)
        text, marks = "", self._tokenizer.channel_marks
        for token in tokens:
            if (mark := marks.get(int(token))) is None:
                text += self._channels.text(self._push([token]))
            else:
                text += self._channels.text(self._finish()) + self._channels.mark(mark)
        return text

    def _text_of(self, token: int) -> str:
        mark = self._think_texts.get(int(token))
        if mark is None:
            return self._behind_header(self._push([token]))
        text = self._behind_header(self._finish(), is_last=True) + mark
        if mark == channels.THINK_MARKS[0][0]:
            self._header = channels.THINK_HEADERS.get(self._tokenizer.think_marks[0], "")
        return text

    def _behind_header(self, text: str, *, is_last: bool = False) -> str:
        """What is known to be no header; is_last: nothing follows that may be part of it."""
        if not self._header:
            return text
        begun, self._begun = self._begun + text, ""
        if not is_last and self._header.startswith(begun) and begun != self._header:
            self._begun = begun
            return ""
        header, self._header = self._header, ""
        return begun.removeprefix(header)

    def _push(self, tokens: Iterable[int]) -> str:
        self._tokens += [int(token) for token in tokens]
        if self._tokenizer.ends_in_bytes(self._tokens):
            return ""  # a run of bytes is decoded as a whole, and may continue
        before = self._decode(self._tokens[self._start : self._shown])
        after = self._decode(self._tokens[self._start :])
        if after.endswith(_REPLACEMENT) or not after.startswith(before):
            return ""
        self._shown = len(self._tokens)
        self._advance()
        return after[len(before) :]

    def _advance(self) -> None:
        """Move the window forward, to where its text does not depend on earlier tokens."""
        start = self._shown - self._NUM_CONTEXT
        if start <= self._start:
            return
        whole = self._decode(self._tokens[self._start :])
        if whole.endswith(self._decode(self._tokens[start:])):
            self._start = start

    @property
    def num_held(self) -> int:
        """Whole characters that are held back, as a run of bytes may go on behind them."""
        return len(self._rest().rstrip(_REPLACEMENT))

    def _rest(self) -> str:
        before = self._decode(self._tokens[self._start : self._shown])
        return self._decode(self._tokens[self._start :])[len(before) :]

    def flush(self) -> str:
        """The rest of the text, with incomplete characters as U+FFFD."""
        rest = self._finish()
        if self._channels:
            return self._channels.text(rest) + self._channels.end()
        return self._behind_header(rest, is_last=True) if self._header else rest

    def _finish(self) -> str:
        rest = self._rest()
        self._shown = len(self._tokens)
        return rest


def have_same_tokens(target: Tokenizer, drafter: Tokenizer) -> bool:
    """True if every id that both use is one piece in both; models pad their vocabularies differently."""
    in_target, in_drafter = target.pieces, drafter.pieces
    return all(in_target[token] == in_drafter[token] for token in in_target.keys() & in_drafter.keys())
