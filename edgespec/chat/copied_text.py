"""What of a conversation is copied: the last answer, its last code block, or everything."""

from edgespec.chat.call_text import format_turn
from edgespec.chat.session import ChatSession
from edgespec.engine.reasoning import split_reasoning
from edgespec.errors import UsageError
from edgespec.system.printable import one_line


def text_to_copy(session: ChatSession, part: str) -> str:
    """The text that "all", "code" or an empty part stands for. Raises UsageError: there is none of it."""
    if part == "all":
        return "\n\n".join(f"{message.role}: {format_turn(message)}" for message in session.conversation.messages)
    if part not in ("", "code"):
        raise UsageError(f"/copy takes code, all or nothing, not '{one_line(part, 40)}'")
    answers = [each.answer for each in session.conversation.rounds if each.answer]
    if not answers:
        raise UsageError("there is no answer to copy yet")
    answer = split_reasoning(answers[-1])[1] or answers[-1]
    if not part:
        return answer
    if not (blocks := code_blocks(answer)):
        raise UsageError("the last answer has no code block; /copy copies the whole answer")
    return blocks[-1]


def code_blocks(text: str) -> list[str]:
    """The contents of the fenced code blocks, in order."""
    from markdown_it import MarkdownIt  # a pipe can do without it

    return [token.content for token in MarkdownIt().parse(f"{text}\n") if token.type == "fence"]
