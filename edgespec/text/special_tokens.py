"""Where a text spells special tokens, also for the process that tries tokenizers."""

import re
from collections.abc import Collection

from tokenizers import AddedToken


def special_pattern(added: Collection[AddedToken]) -> re.Pattern[str]:
    """Matches special tokens, and tokens that hold a special one, which become a token before it does."""
    special = {each.content for each in added if each.special}
    sizes = {len(content) for content in special}
    found = [each for each in added if each.special or _holds(each.content, special, sizes)]
    longest_first = sorted(found, key=lambda token: len(token.content), reverse=True)
    return re.compile("(" + "|".join(map(_pattern, longest_first)) + ")")


def _holds(text: str, words: set[str], sizes: set[int]) -> bool:
    return any(text[at : at + size] in words for size in sizes for at in range(len(text) - size + 1))


def _pattern(token: AddedToken) -> str:
    """Matches a token with the white space that it absorbs: phi3's absorb the space after them."""
    # White space from its beginning, and once: from each of its places it took a minute of 100,000 spaces.
    before, after = r"(?:(?<!\s)\s++)?" * token.lstrip, r"\s*" * token.rstrip
    first, last = (r"(?<!\w)", r"(?!\w)") if token.single_word else ("", "")
    return before + first + re.escape(token.content) + last + after
