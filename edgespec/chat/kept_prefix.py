"""What the model has read of a chat, kept on the disk when the chat is left, so that it need not be read again."""

from pathlib import Path

from edgespec.chat.saved_chats import PREFIX_SUFFIX
from edgespec.chat.session import ChatSession
from edgespec.config.byte_size import format_bytes
from edgespec.engine.stats import Stats
from edgespec.errors import EdgeSpecError
from edgespec.system.printable import one_line

_FEWEST_READ = 100  # tokens; fewer take longer for each


def kept_path(file: Path) -> Path:
    """The file beside that of a conversation."""
    return file.with_suffix(PREFIX_SUFFIX)


def keep_prefix(session: ChatSession) -> None:
    """Write the file, if the user wants one and the conversation has a file; what goes wrong is said."""
    if not session.keeps_prefix or session.file is None or not session.answer:
        return
    path = kept_path(session.file)
    try:
        num_tokens = session.engine.save_prefix(path)
    except EdgeSpecError as error:
        session.info(f"what the model has read is not kept: {error}")
        return
    speed = _reading_speed(session.stats)
    saved = f", which takes about {num_tokens / speed:.1f} s" if speed else ""
    size, place = format_bytes(path.stat().st_size), one_line(str(path), 200)
    session.info(f"{num_tokens} tokens need not be read again{saved}; they are kept in {size} at {place}")


def _reading_speed(stats: Stats | None) -> float | None:
    """Tokens that the last answer has read in a second, if they were enough to tell."""
    if stats is None or not stats.prefill_tokens_per_second or not stats.time_to_first_token_s:
        return None
    num_read = stats.prefill_tokens_per_second * stats.time_to_first_token_s
    return stats.prefill_tokens_per_second if num_read >= _FEWEST_READ else None


def take_prefix(session: ChatSession) -> None:
    """Read the file, if there is one; where it cannot be used the model reads the conversation again."""
    if session.file is None or not (path := kept_path(session.file)).exists():
        return
    try:
        num_tokens = session.engine.load_prefix(path)
    except EdgeSpecError as error:
        session.info(f"the model reads the conversation again: {error}")
        return
    if not session.is_quiet:
        session.info(f"{num_tokens} tokens were kept on the disk and are not read again")
