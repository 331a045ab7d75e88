"""A conversation as the tokens that a model was trained on; special tokens that a message spells stay text."""

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from edgespec.errors import ManifestError
from edgespec.tokenization.tokenizer import Tokenizer
from edgespec.types import TokenIds

ROLES = ("system", "user", "assistant")


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str  # one of ROLES
    content: str


def read_template(path: Path) -> str:
    """Raises ManifestError: the file cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path} cannot be read ({error}); export the model again") from None


class Render(Protocol):
    def __call__(self, template: str, **names: Any) -> str: ...


def encode_chat(
    template: str | None,
    render: Render,
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    special: dict[str, str],
) -> TokenIds:
    """Tokens of a conversation up to where the assistant speaks next.

    A model without a template is not a chat model: it continues the contents, joined by blank lines. special has
    special tokens by the names that templates use: bos_token, eos_token.

    Raises ModelError: the template does not render this conversation.
    """
    if template is None:
        return tokenizer.encode("\n\n".join(message.content for message in messages))
    mark = _unused_character(messages)
    spellings = tokenizer.special_tokens
    escaped = [{"role": role, "content": _escape(content, spellings, mark)} for role, content in messages]
    text = render(template, messages=escaped, add_generation_prompt=True, **special)
    # Cut at the template's own special tokens first; the marks in messages are dropped after that.
    return tokenizer.encode(text, special=True, ignore=mark)


def _unused_character(messages: Sequence[Message]) -> str:
    contents = "".join(message.content for message in messages)
    private_use = map(chr, chain(range(0xE000, 0xF8FF), range(0xF0000, 0xFFFFD)))
    return next(character for character in private_use if character not in contents)


def _escape(content: str, special_tokens: Iterable[str], mark: str) -> str:
    for token in special_tokens:
        content = content.replace(token, token[0] + mark + token[1:])
    return content
