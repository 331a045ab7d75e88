"""The files that wait for the next message of a chat: attached, listed, dropped, and sent with it."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from edgespec.chat.attachments import Attachment, find_paths, join_message, read_attachment
from edgespec.chat.session import ChatSession
from edgespec.errors import ContextOverflow, UsageError
from edgespec.system.printable import one_line

_NOTHING = "no file is attached; /attach FILE sends a file's text with your next message"


def read_files(paths: Iterable[Path]) -> list[Attachment]:
    """Raises UsageError: one of them cannot be attached."""
    return [read_attachment(path) for path in paths]


def add_files(session: ChatSession, files: Sequence[Attachment], report: Callable[[str], None]) -> None:
    """Attach files to the next message, in place of those of the same name; report takes a line for each.

    Raises ContextOverflow: they do not fit beside what the model is sent already; nothing was attached then.
    """
    names = {file.name for file in files}
    others = [file for file in session.attachments if file.name not in names]
    counts = [_count(session, file) for file in files]
    room = session.conversation.count_room(join_message(others, ""))
    if sum(counts) > room:
        found = ", ".join(f"{file.name} {count}" for file, count in zip(files, counts, strict=True))
        report(f"too long: {sum(counts)} tokens ({found}), and {max(0, room)} fit; nothing was attached")
        context = session.engine.context_length
        needed = sum(counts) + context - room
        raise ContextOverflow(needed, context, session.engine.manifest.context_length)
    session.attachments = [*others, *files]
    for file, count in zip(files, counts, strict=True):
        report(f"attached {file.name}: {count} tokens")
    if files:
        report(f"{room - sum(counts)} tokens are left for your message and the answer")


def attach(session: ChatSession, argument: str) -> None:
    """What /attach does: without an argument it lists."""
    if argument:
        add_files(session, read_files(find_paths(argument)), session.info)
        return
    lines = [
        f"{number}  {file.name}: {_count(session, file)} tokens"
        for number, file in enumerate(session.attachments, 1)
    ]
    if lines:
        lines.append("they go with your next message; /detach drops all, /detach NAME one")
    session.info("\n".join(lines) or _NOTHING)


def detach(session: ChatSession, argument: str) -> None:
    """What /detach does: drop the file of a name or number, or all files."""
    if not session.attachments:
        raise UsageError(_NOTHING)
    chosen = [
        file
        for number, file in enumerate(session.attachments, 1)
        if not argument or argument in (file.name, str(number))
    ]
    if not chosen:
        raise UsageError(f"no attached file is called {one_line(argument, 100)!r}; /attach lists them")
    session.attachments = [file for file in session.attachments if file not in chosen]
    session.info(f"no longer attached: {', '.join(file.name for file in chosen)}")


def _count(session: ChatSession, file: Attachment) -> int:
    return len(session.engine.tokenize(join_message([file], "")))
