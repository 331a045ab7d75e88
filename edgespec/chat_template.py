"""A conversation as the tokens that a model was trained on.

Special tokens that a message spells out stay text; only the template places real ones.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from edgespec.errors import ManifestError
from edgespec.tokenizer import Tokenizer
from edgespec.types import TokenIds

ROLES = ("system", "user", "assistant")


class Message(NamedTuple):
    """What one side of a conversation says."""

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

    A model without a template is no chat model: the contents are joined by blank lines and continued.

    Args:
        template: The model's own, in Jinja.
        render: Gives the text of a template for some names.
        special: Names that templates use for special tokens: bos_token, eos_token.

    Raises:
        ModelError: The template does not render this conversation.
    """
    if template is None:
        return tokenizer.encode("\n\n".join(message.content for message in messages))
    mark = _unused_character(messages)
    broken = [
        {"role": message.role, "content": _broken(message.content, tokenizer.special_tokens, mark)}
        for message in messages
    ]
    text = render(template, messages=broken, add_generation_prompt=True, **special)
    # Cut at the template's own special tokens first; what a message spelled out is mended after.
    return tokenizer.encode(text, special=True, ignore=mark)


def _unused_character(messages: Sequence[Message]) -> str:
    contents = "".join(message.content for message in messages)
    return next(
        chr(code) for code in chain(range(0xE000, 0xF8FF), range(0xF0000, 0xFFFFD)) if chr(code) not in contents
    )


def _broken(content: str, special_tokens: Iterable[str], mark: str) -> str:
    for token in special_tokens:
        content = content.replace(token, token[0] + mark + token[1:])
    return content
