"""Parts of what endpoints answer, in OpenAI's shapes: identities, log-probabilities, and what an answer took."""

import secrets
from bisect import bisect_left, bisect_right
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import isnan
from time import time
from typing import Any, NamedTuple

from edgespec import Stats, TokenLogprob, main_reason

_LEAST = -9999.0  # JSON has no infinity


class Identity(NamedTuple):
    id: str
    created: int  # seconds of the epoch


def new_identity(kind: str) -> Identity:
    """An id that begins with a kind, such as chatcmpl-1f3c… or resp_1f3c…"""
    return Identity(f"{kind}{secrets.token_hex(12)}", int(time()))


class TokenWords:
    """How tokens are spelled for clients; piece gives the names of special ones."""

    def __init__(self, spellings: Mapping[int, bytes], piece: Callable[[int], str | None]) -> None:
        self._spellings = spellings
        self._piece = piece

    def text(self, token: int) -> str:
        """The text of a token; bytes that are no character by themselves become U+FFFD."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def name(self, token: int) -> str:
        r"""The text of a token; of a part of characters its bytes, such as bytes:\xe6\x97."""
        found = self.bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return _as_bytes(found)

    def in_text(self, token: int) -> bytes:
        """The bytes that a token adds to a text; a special one adds none."""
        return self._spellings.get(token, b"")

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; of a special one, its name's."""
        return self._spellings.get(token) or (self._piece(token) or "").encode()


def _as_bytes(found: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


class TextPlaces:
    """Where tokens begin in a text, in characters; one within a character has its place.

    echoed: The prompt that stands before an answer. Its special tokens count where it spells them, and so does the
        space before its first word, which some tokenizers add.
    """

    def __init__(self, words: TokenWords, echoed: str = "") -> None:
        self._words, self._echoed = words, echoed
        self._num_characters = 0  # of those that are complete
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> int:
        """The place of the next token."""
        added = self._words.in_text(token)
        if self._echoed and (name := self._words.text(token)):
            if not added and self._echoed.startswith(name, self._num_characters):
                added = name.encode()
            if not self._num_characters and added[:1] == b" " and self._echoed[0] != " ":
                added = added[1:]
        if added and added[0] & 0xC0 != 0x80:  # it goes on with no character that lacks bytes
            self._num_characters += len(self._decoder.decode(b"", final=True))
        place = self._num_characters
        self._num_characters += len(self._decoder.decode(added))
        return place

    def begin_answer(self) -> None:
        """Go on behind the prompt."""
        if self._echoed:
            self._num_characters, self._echoed = len(self._echoed), ""
            self._decoder.reset()


def chat_logprobs(found: Sequence[TokenLogprob], words: TokenWords) -> dict[str, Any]:
    """The logprobs object of a choice of /v1/chat/completions."""
    return {"content": token_entries(found, words), "refusal": None}


def token_entries(found: Sequence[TokenLogprob], words: TokenWords) -> list[dict[str, Any]]:
    """The list of tokens with their log-probabilities in an output text of /v1/responses."""
    return [
        {
            **_plain(each.token_id, each.logprob, words),
            "top_logprobs": [_plain(token, value, words) for token, value in each.top],
        }
        for each in found
    ]


def entries_of(
    text: str, entries: Sequence[dict[str, Any]], *, is_last: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split the log-probabilities of consecutive tokens by a text that these spell somewhere.

    Args:
        entries: As token_entries gives them.
        is_last: Of several places where they spell it the last one counts, else the first one.

    Returns:
        The entries of the tokens of the text, and those of the tokens behind it. What lies before is dropped.
        Where they do not spell the text, none, and all of them.
    """
    decoder, spelled, starts = getincrementaldecoder("utf-8")("replace"), "", list[int]()
    for each in entries:
        starts.append(len(spelled))
        spelled += decoder.decode(bytes(each["bytes"]))
    spelled += decoder.decode(b"", final=True)
    begin = (spelled.rfind if is_last else spelled.find)(text)
    if not text or begin < 0:
        return [], [*entries]
    # The first token may begin before the text, and several share a character.
    first = bisect_left(starts, starts[bisect_right(starts, begin) - 1])
    end = bisect_left(starts, begin + len(text))
    return [*entries[first:end]], [*entries[end:]]


def completion_logprobs(found: Sequence[TokenLogprob], words: TokenWords, places: TextPlaces) -> dict[str, Any]:
    """The logprobs object of a choice of /v1/completions: a list for each property of the tokens.

    places: Has been given the tokens before these.
    """
    return {
        "tokens": [words.name(each.token_id) for each in found],
        "token_logprobs": [None if isnan(each.logprob) else _finite(each.logprob) for each in found],
        "top_logprobs": [None if isnan(each.logprob) else _by_name(each.top, words) for each in found],
        "text_offset": [places.push(each.token_id) for each in found],
    }


def _by_name(top: Sequence[tuple[int, float]], words: TokenWords) -> dict[str, float]:
    """Log-probabilities by the names of tokens; the bytes stand for a name that another token has."""
    found: dict[str, float] = {}
    for token, value in top:
        name = words.name(token)
        found.setdefault(_as_bytes(words.bytes_of(token)) if name in found else name, _finite(value))
    return found


def _plain(token: int, logprob: float, words: TokenWords) -> dict[str, Any]:
    return {"token": words.text(token), "logprob": _finite(logprob), "bytes": list(words.bytes_of(token))}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)


def speculation_of(answers: Sequence[Stats]) -> dict[str, Any]:
    """Describe the drafting for answers: by whom, how much was accepted, what it gained or why there was none.

    gain is the speed over plain decoding; null where it could not be measured, as over several answers.
    """
    drafted = sum(stats.num_drafted for stats in answers)
    accepted = sum(stats.num_accepted for stats in answers)
    passes = sum(stats.passes for stats in answers)
    emitted = sum(stats.num_emitted for stats in answers)
    undrafted = sum((Counter(stats.undrafted) for stats in answers), Counter[str]())
    gain = answers[0].gain if len(answers) == 1 else None
    first = answers[0] if answers else None
    return {
        "drafter": first.drafter if first else "none",
        "draft_length": first.draft_length if first else "auto",
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        "tokens_per_pass": round(emitted / passes, 4) if passes else None,
        "by_drafter": _by_drafter(answers),
        "gain": round(gain.value, 4) if gain else None,
        "reason_off": None if drafted else main_reason(undrafted),
        "schedule": first.schedule if first else "serial",
        "device": first.target_device if first else None,
        "drafter_device": first.drafter_device if first else None,
        "waited_passes": sum(stats.waited_passes for stats in answers),
        "downgrades": [line for stats in answers for line in stats.downgrades],
    }


def notes_of(speculation: dict[str, Any]) -> list[str]:
    """Accepted drafts and the gain, as pieces of the request's line in the log; none where nothing was drafted."""
    if not speculation["drafted_tokens"]:
        return []
    notes = [f"{speculation['accepted_tokens']}/{speculation['drafted_tokens']} drafts accepted"]
    return [*notes, f"gain {speculation['gain']:.2f}"] if speculation["gain"] else notes


def _by_drafter(answers: Sequence[Stats]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for stats in answers:
        for name, counts in stats.sources.items():
            if counts["drafted"]:
                sums = found.setdefault(name, {"drafted": 0, "accepted": 0})
                sums["drafted"] += counts["drafted"]
                sums["accepted"] += counts["accepted"]
    return found
