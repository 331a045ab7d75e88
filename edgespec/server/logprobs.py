"""Log-probabilities of tokens in the shapes that OpenAI's endpoints have."""

from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.decoding.logprobs import TokenLogprob
from edgespec.tokenization.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity


class TokenWords:
    """How tokens are spelled for clients."""

    def __init__(self, spellings: Mapping[int, bytes], tokenizer: Tokenizer) -> None:
        self._spellings = spellings
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """The text of a token; bytes that are no character by themselves become U+FFFD."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; of a special one, its name's."""
        return self._spellings.get(token) or (self._tokenizer.piece(token) or "").encode()


def chat_logprobs(found: Sequence[TokenLogprob], words: TokenWords) -> dict[str, Any]:
    """The logprobs object of a choice of /v1/chat/completions."""
    return {"content": [_entry(each, words) for each in found], "refusal": None}


def token_entries(found: Sequence[TokenLogprob], words: TokenWords) -> list[dict[str, Any]]:
    """The list of tokens with their log-probabilities in an output text of /v1/responses."""
    return [_entry(each, words) for each in found]


def entries_of(
    text: str, entries: Sequence[dict[str, Any]], *, is_last: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split the log-probabilities of consecutive tokens by a text that these spell somewhere.

    Args:
        entries: As token_entries gives them.
        is_last: Of several places where they spell it the last one counts, else the first one.

    Returns:
        The entries of the tokens of the text, and those of the tokens behind it. What lies before is dropped.
    """
    joined, wanted = b"".join(bytes(each["bytes"]) for each in entries), text.encode("utf-8", "replace")
    begin = (joined.rfind if is_last else joined.find)(wanted)
    if not wanted or begin < 0:
        # Bytes that are no character have other ones in the text.
        return ([*entries], []) if "\ufffd" in text else ([], [*entries])
    taken, at, num = [], 0, 0
    for each in entries:
        if at >= begin + len(wanted):
            break
        at, num = at + len(each["bytes"]), num + 1
        if at > begin:
            taken.append(each)
    return taken, [*entries[num:]]


def completion_logprobs(found: Sequence[TokenLogprob], words: TokenWords, offset: int = 0) -> dict[str, Any]:
    """The logprobs object of a choice of /v1/completions: a list for each property of the tokens.

    offset: Where the first token begins in the text, in characters.
    """
    offsets = []
    for each in found:
        offsets.append(offset)
        offset += len(words.text(each.token_id))
    return {
        "tokens": [words.text(each.token_id) for each in found],
        "token_logprobs": [_finite(each.logprob) for each in found],
        "top_logprobs": [{words.text(token): _finite(value) for token, value in each.top} for each in found],
        "text_offset": offsets,
    }


def _entry(each: TokenLogprob, words: TokenWords) -> dict[str, Any]:
    return {
        **_plain(each.token_id, each.logprob, words),
        "top_logprobs": [_plain(token, value, words) for token, value in each.top],
    }


def _plain(token: int, logprob: float, words: TokenWords) -> dict[str, Any]:
    return {"token": words.text(token), "logprob": _finite(logprob), "bytes": list(words.bytes_of(token))}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
