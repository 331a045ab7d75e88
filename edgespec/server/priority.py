"""Whose passes go first: a person waits for most answers, and nobody for some, such as the title of a chat."""

from edgespec.server.protocol import ChatRequest, SamplingFields, within

LEAST = -10
_BACKGROUND = -1

# What Open WebUI asks for behind each answer, by the template that its questions have unless somebody edits them.
_TASK, _HISTORY = "### Task:", "<chat_history>"
_OUTPUTS = ('"title"', '"tags"', '"follow_ups"')


def priority_of(asked: SamplingFields) -> int:
    """The priority that a request states, else a low one if it is known that no person waits for it.

    Raises ApiError: 400, it is out of range; no request goes before those of persons, who have 0.
    """
    stated = within("priority", asked.priority, LEAST, 0)
    if stated is not None:
        return stated
    return _BACKGROUND if isinstance(asked, ChatRequest) and _is_background(asked) else 0


def _is_background(asked: ChatRequest) -> bool:
    if asked.stream or len(asked.messages) != 1 or not isinstance(text := asked.messages[0].content, str):
        return False
    return text.startswith(_TASK) and _HISTORY in text and any(name in text for name in _OUTPUTS)
