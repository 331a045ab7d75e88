"""Files that the commands of a chat write: their paths, the conversation in them, and traces."""

from pathlib import Path

from edgespec.chat.saved_chats import export_text
from edgespec.chat.session import ChatSession
from edgespec.chat.trace_file import TraceFile
from edgespec.engine.transcript import save_transcript
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.system.disk import has_content, replace_file
from edgespec.system.printable import one_line


def parse_path(argument: str, name: str, example: str = "talk.jsonl") -> Path:
    """The path that follows a command. Raises UsageError: there is none, or it names no home folder."""
    if not argument:
        raise UsageError(f"/{name} needs a file name, for example /{name} {example}")
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{argument}: {error}") from None


def parse_new_path(session: ChatSession, argument: str, name: str, example: str = "talk.jsonl") -> Path:
    """The path of a file to write. Raises UsageError: a file is there already.

    Only a file that was written from this conversation is written again.
    """
    path = parse_path(argument, name, example)
    if path.absolute() not in session.written and has_content(path):
        shown = one_line(str(path), 200)
        raise UsageError(f"{shown} is there already, and stays as it is; /{name}! {shown} writes over it")
    return path


def save_to(session: ChatSession, path: Path) -> None:
    """Write the conversation as JSON Lines. Raises EdgeSpecError: it cannot be written."""
    save_transcript(path, session.transcript())
    session.written.add(path.absolute())
    session.info(f"{len(session.conversation.messages)} messages saved to {one_line(str(path), 200)}")


def export_to(session: ChatSession, path: Path) -> None:
    """Write the conversation to be read elsewhere. Raises EdgeSpecError: it cannot be written."""
    text = export_text(session.transcript(), path)
    try:
        replace_file(path, text.encode(errors="replace"), 0o666)
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise EdgeSpecError(f"cannot write {path}: {reason}") from None
    session.written.add(path.absolute())
    session.info(f"{len(session.conversation.messages)} messages written to {one_line(str(path), 200)}")


def trace_to(session: ChatSession, path: Path) -> None:
    """Write when target and drafter worked on the last answer. Raises UsageError: there is none."""
    if session.last is None or not session.last.timeline:
        raise UsageError("there is no answer to trace yet")
    TraceFile(path).add(session.last.timeline)
    session.written.add(path.absolute())
    session.info(f"saved to {one_line(str(path), 200)}; open it in chrome://tracing or Perfetto")
