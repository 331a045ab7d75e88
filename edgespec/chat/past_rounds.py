"""Shows messages and answers of before on stderr, as they were typed and made; says how a chat stands."""

import sys
from collections.abc import Callable, Sequence

from edgespec import Chunk, Round, split_reasoning
from edgespec.chat.attachments import brief_message
from edgespec.chat.call_text import describe_steps
from edgespec.chat.plain import PlainPrinter, Printer, is_plain
from edgespec.chat.session import ChatSession
from edgespec.chat.status import CUT
from edgespec.system.printable import one_line, printable
from edgespec.system.units import format_count

_NUM_LAST, _MAX_LINES = 2, 24  # what a chat that goes on begins with: rounds, and lines of each answer


def show_last(rounds: Sequence[Round], info: Callable[[str], None]) -> None:
    """Show the last two rounds; of a long answer its end, and the line that tells how to see the rest."""
    last = rounds[-_NUM_LAST:]
    short = [each._replace(answer=each.answer and last_lines(each.answer, _MAX_LINES)) for each in last]
    if len(rounds) > len(last) or short != [*last]:
        info("(earlier text: /history)")
    show_rounds(short, info, 1 + len(rounds) - len(last))


def show_rounds(rounds: Sequence[Round], info: Callable[[str], None], first: int = 1) -> None:
    """Show rounds, of which the first has a number."""
    for number, each in enumerate(rounds, first):
        _show_message(number, brief_message(each.user))
        if each.steps:
            info("\n".join(describe_steps(each.steps)))
            info("")
        if each.answer is None:
            info("(no answer)")
            continue
        printer = _printer()
        reasoning, answer = split_reasoning(each.answer)
        if reasoning:
            info("(its reasoning is not shown here)")
        printer.push(Chunk(text=answer, token_ids=()))
        printer.end()


def last_lines(text: str, num: int) -> str:
    """The last lines of a Markdown text, behind "…" where some are missing; a block of code stays one."""
    lines = text.split("\n")
    if len(lines) <= num:
        return text
    from markdown_it import MarkdownIt  # a pipe can do without it

    cut = len(lines) - num
    blocks = ((each, each.map or (0, 0)) for each in MarkdownIt().parse(text) if each.type == "fence")
    opened = [each.markup + each.info for each, (begin, end) in blocks if begin < cut < end]
    return "\n".join(["…", "", *opened, *lines[cut:]])


def _show_message(number: int, text: str) -> None:
    mark = f"{number} > "
    shown = text.replace("\n", f"\n{' ' * len(mark)}")
    if is_plain(sys.stderr):
        sys.stderr.write(f"\n{mark}{printable(shown)}\n\n")
        sys.stderr.flush()
        return
    from edgespec.chat.markdown.inline import Span
    from edgespec.chat.printer import console_of, print_spans

    spans = [Span("\n"), Span(mark, "dim"), Span(shown, "bold"), Span("\n\n")]
    print_spans(console_of(sys.stderr), spans)


def _printer() -> Printer:
    if is_plain(sys.stderr):
        return PlainPrinter(sys.stderr)
    from edgespec.chat.printer import MarkdownPrinter, console_of

    return MarkdownPrinter(console_of(sys.stderr))


def describe_resumed(session: ChatSession) -> str:
    """A line about the conversation that a file held."""
    if not (rounds := session.conversation.rounds):
        return "the conversation is empty"
    num, hint = format_count(len(session.conversation.messages), "message"), ""
    if rounds[-1].answer is None:
        hint = " It has no answer yet; /retry asks for one."
    elif rounds[-1].cut_short in (*CUT, "tool_calls"):
        hint = " Its answer was cut off; /go continues it, /retry asks for a new one."
    return f"{num}; your last message: {one_line(brief_message(rounds[-1].user), 60)!r}.{hint}"
