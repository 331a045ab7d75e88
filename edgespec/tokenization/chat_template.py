"""A conversation as the tokens that a model was trained on; special tokens that a message spells stay text."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.errors import ManifestError
from edgespec.tokenization.tokenizer import Tokenizer
from edgespec.tokenization.tool_messages import names_for
from edgespec.tokenization.tool_template import Render, ToolTemplate
from edgespec.tools.messages import CallMessage, ResultMessage
from edgespec.tools.tool import Tool, ToolCall
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


Turn = Message | CallMessage | ResultMessage


def encode_chat(
    template: str | None,
    render: Render,
    messages: Sequence[Turn],
    tokenizer: Tokenizer,
    special: dict[str, str],
    switches: dict[str, bool] | None = None,
    tools: Sequence[Tool] = (),
    find_tool_template: Callable[[], ToolTemplate] = ToolTemplate,
) -> TokenIds:
    """Tokens of a conversation up to where the assistant speaks next.

    A model without a template is not a chat model: it continues the contents, joined by blank lines. special has
    special tokens by the names that templates use: bos_token, eos_token.

    Args:
        switches: Further names that the template reads, such as enable_thinking.
        find_tool_template: How the template takes tools; asked where the conversation has some.

    Raises:
        ConversationError: The template refuses this conversation.
        ModelError: The template cannot be rendered.
    """
    mark = _unused_character([messages, [tool.as_dict() for tool in tools]])
    spellings = tokenizer.special_tokens
    names: dict[str, Any]
    if tools or any(not isinstance(message, Message) for message in messages):
        names = names_for(find_tool_template(), messages, tools, lambda text: _escape(text, spellings, mark))
    else:
        names = {
            "messages": [
                {"role": each.role, "content": _escape(each.content, spellings, mark)} for each in messages
            ]
        }
    if template is None:
        text = "\n\n".join(str(message["content"]) for message in names["messages"])
        return tokenizer.encode(text.replace(mark, ""))
    text = render(template, **names, add_generation_prompt=True, **special, **(switches or {}))
    # Cut at the template's own special tokens first; the marks in messages are dropped after that.
    return tokenizer.encode(text, special=True, ignore=mark)


def _unused_character(value: Any) -> str:
    contents = "".join(_texts(value))
    private_use = map(chr, chain(range(0xE000, 0xF8FF), range(0xF0000, 0xFFFFD)))
    return next(character for character in private_use if character not in contents)


def _texts(value: Any) -> Iterable[str]:
    """All texts within lists, tuples and dicts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, ToolCall):
        yield value.name + value.arguments
    elif isinstance(value, dict):
        yield from chain.from_iterable(map(_texts, [*value, *value.values()]))
    elif isinstance(value, (list, tuple)):
        yield from chain.from_iterable(map(_texts, value))


def _escape(content: str, special_tokens: Iterable[str], mark: str) -> str:
    for token in special_tokens:
        content = content.replace(token, token[0] + mark + token[1:])
    return content
