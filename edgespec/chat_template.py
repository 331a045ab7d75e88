"""A conversation as the tokens that a model was trained on.

Templates come with models and are hostile text until shown otherwise: they run in Jinja's immutable
sandbox. Special tokens that a message spells out stay text.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

from edgespec.errors import ModelError
from edgespec.tokenizer import Tokenizer
from edgespec.types import TokenIds

ROLES = ("system", "user", "assistant")


class Message(NamedTuple):
    role: str  # one of ROLES
    content: str


def encode_chat(
    template: str | None, messages: Sequence[Message], tokenizer: Tokenizer, special: dict[str, str]
) -> TokenIds:
    """Tokens of a conversation up to where the assistant speaks next.

    A model without a template is no chat model: the contents are joined by blank lines and continued.

    Args:
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
    text = _render(template, broken, special)
    # Cut at the template's own special tokens first; what a message spelled out is mended after.
    return tokenizer.encode(text, special=True, ignore=mark)


def _unused_character(messages: Sequence[Message]) -> str:
    contents = "".join(message.content for message in messages)
    return next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in contents)


def _broken(content: str, special_tokens: Sequence[str], mark: str) -> str:
    for token in special_tokens:
        content = content.replace(token, token[0] + mark + token[1:])
    return content


def _render(template: str, messages: list[dict[str, str]], special: dict[str, str]) -> str:
    from jinja2 import TemplateError  # 25 ms, and only a chat needs it
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    names: dict[str, Any] = {
        **special,
        "raise_exception": refuse,
        "strftime_now": lambda format_: datetime.now().strftime(format_),
        "add_generation_prompt": True,
    }
    try:
        return environment.from_string(template).render(messages=messages, **names)
    except (TemplateError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"the chat template of this model does not take the conversation: {error}") from None
