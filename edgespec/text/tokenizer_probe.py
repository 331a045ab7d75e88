"""Try a tokenizer that may be made to harm, in a process of its own: tokenizer.py ends it in time.

It is given the path of the file. It reads a line and writes one: what is wrong with the tokenizer, or nothing. The
words of the library say where a rule gives up or panics.
"""

import base64
import json
import re
import sys
from collections.abc import Iterator
from math import prod
from time import process_time
from typing import Any

from tokenizers import Tokenizer

from edgespec.text.special_tokens import special_pattern

# Prose, code, numbers, scripts, emoji, marks, controls and broken characters: what rules tell apart.
_TEXT = (
    "The quick brown fox can't jump over 12,345.67 lazy dogs; e-mail a.b@c.de or https://x.y/z?q=1&r=2!\n\n"
    "    def area(width: float, height=2.5e-3):\t# TODO\n        return {'w': width * height} or None\r\n"
    "Größe, naïve, œuvre, ﬃ, ﷺ, ½, Ⅷ, e\u0301, 日本語のテキスト、한국어 문장, русский текст, नमस्ते, العربية, ไทย, "
    "🙂👩‍👩‍👧‍👦🇩🇪 \u200b\u00a0\u3000\ufeff\ufffd\x00\x07 ___---===***~~~ $$$ «»“”…—"
)
_RUN = 64  # of a character: what takes twice as long for each never ends
_WORD = 4096  # characters of one word
_MOST_CHARACTERS = 256  # of the rules, of which runs are made
_MAX_S = 2.0  # for some 30,000 characters; real ones take 0.05 s
# Bounds of replacements: what one character becomes, and their number. 22 doublings make 4 MB and 2 s of an "a".
_MAX_GROWTH, _MAX_REPLACEMENTS = 64, 16
_MAX_ADDED = 64  # tokens around each text


def _growths(part: Any) -> Iterator[int]:
    """How many characters each replacement makes of one, at most."""
    if isinstance(part, list):
        for one in part:
            yield from _growths(one)
    elif isinstance(part, dict):
        if part.get("type") == "Precompiled":
            # A trie by its size, and the texts that it names, each with an end.
            blob = base64.b64decode(part.get("precompiled_charsmap") or "")
            texts = blob[4 + int.from_bytes(blob[:4], "little") :].split(b"\0")
            yield max(1, *(len(text.decode(errors="replace")) for text in texts))
        if part.get("type") in ("Replace", "Prepend"):
            length = len(part.get("content") or part.get("prepend") or "")
            # An expression may match nothing, between any two characters, which stay.
            may_insert = isinstance(pattern := part.get("pattern"), dict) and "Regex" in pattern
            yield max(1, length + may_insert)
        for one in part.values():
            yield from _growths(one)


def _stated_fault(tokenizer: Tokenizer) -> str:
    """The fault of the rules of a tokenizer as they are written."""
    for part in (tokenizer.normalizer, tokenizer.decoder):
        growths = [*_growths(json.loads(part.__getstate__()))] if part else []
        if len(growths) > _MAX_REPLACEMENTS or prod(growths) > _MAX_GROWTH:
            return "it replaces text by ever more text, as no tokenizer in use does"
    if (num_added := tokenizer.num_special_tokens_to_add(is_pair=False)) > _MAX_ADDED:
        return f"it adds {num_added} tokens to each text, at most {_MAX_ADDED} are used"
    return ""


def _spelled(tokenizer: Tokenizer) -> list[str]:
    """The characters that the rules of a tokenizer name, which they may treat in a way of their own."""
    rules = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder)
    stated = "".join(part.__getstate__().decode("utf-8", "replace") for part in rules if part is not None)
    names = re.sub(r'"(precompiled_charsmap|type)":"[^"]*"', "", stated)
    return sorted(set(names + "aZ09 \n.é日"))[:_MOST_CHARACTERS]


def _fault(path: str) -> str:
    """The fault of a tokenizer in words; empty for one that can be used."""
    with open(path, "rb") as file:
        data = file.read()
    is_wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    tokenizer = Tokenizer.from_str(data.decode("utf-16" if is_wide else "utf-8-sig"))
    pattern = special_pattern(tokenizer.get_added_tokens_decoder().values())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if said := _stated_fault(tokenizer):
        return said
    runs = [character * _RUN + "!" for character in _spelled(tokenizer)]
    started, num_read = process_time(), 0
    for text in (_TEXT, "x" * _WORD, " " * _WORD, *runs, " ".join(runs)):
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        if len(tokens) > _MAX_GROWTH * (len(text) + 1):
            return f"it makes {len(tokens)} tokens of {len(text)} characters"
        decoded = tokenizer.decode(tokens)
        if len(decoded) > _MAX_GROWTH * (len(text) + 1):
            return f"it makes {len(decoded)} characters of {len(tokens)} tokens"
        pattern.split(text)
        num_read += len(text)
        if (taken_s := process_time() - started) > _MAX_S:
            return f"it takes {taken_s:.1f} s to read {num_read} characters"
    return ""


def main() -> None:
    sys.stdin.readline()
    try:
        said = _fault(sys.argv[1])
    except BaseException as error:  # the library's panics are no Exceptions
        said = " ".join(str(error).split()) or type(error).__name__
    print(said[:300].encode("ascii", "backslashreplace").decode(), flush=True)


if __name__ == "__main__":
    main()
