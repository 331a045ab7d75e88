"""Shortens a long conversation: the model sums it up, and goes on with its summary and the last message."""

from collections.abc import Iterator
from dataclasses import replace

from edgespec import Message, Reply, Round, UsageError, split_reasoning
from edgespec.chat.session import ChatSession
from edgespec.chat.status import format_stop
from edgespec.system.context_managers import contextmanager

SUMMARY_REQUEST = (
    "Sum up our conversation so far for yourself, in at most 200 words: what I want, facts, names, numbers, "
    "decisions, and what is still open. Write nothing else."
)
_FEWEST = 2  # messages that are worth a summary


def begin_compacting(session: ChatSession) -> Reply:
    """Ask the model for its summary; the oldest messages make room for it where the context is full.

    Raises UsageError: There is too little to sum up; ContextOverflow: the request does not fit, even alone.
    """
    conversation, overflow = session.conversation, session.conversation.overflow
    if len(conversation.rounds) < _FEWEST:
        raise UsageError(f"there is nothing to shorten yet; /compact needs at least {_FEWEST} messages")
    session.info("(summing up the conversation; Ctrl-C leaves it as it is)")
    conversation.overflow = "drop-oldest"
    try:
        return conversation.stream(
            SUMMARY_REQUEST, response_format=None, stop=(), max_tokens=None, ends_loops=True
        )
    finally:
        conversation.overflow = overflow


@contextmanager
def compacting(session: ChatSession) -> Iterator[None]:
    """Within, the model writes its summary, of which nothing is saved; without a whole one nothing changes."""
    autosave, session.autosave = session.autosave, None
    answer = session.answer, session.has_looped, session.begun, session.opens_reasoning
    try:
        yield
    finally:
        session.autosave = autosave
        asked, last = session.conversation.undo(), session.last
        session.answer, session.has_looped, session.begun, session.opens_reasoning = answer
    _take_summary(session, asked, (last and last.finish_reason) or "cancelled")


def _take_summary(session: ChatSession, asked: Round | None, finish_reason: str) -> None:
    """Put the answer of a round that was taken back in the place of all messages but the last."""
    conversation = session.conversation
    summary = split_reasoning(asked.answer or "")[1].strip() if asked else ""
    if finish_reason != "stop" or not summary:
        why, _, _ = format_stop(finish_reason).partition(" (")  # which advises on answers
        session.info(f"{why or 'the model wrote no summary'}; nothing has changed")
        return
    before, num_before = conversation.transcript(session.model), conversation.num_tokens
    file = session.file, session.autosave.seen if session.autosave else None, session.name
    last = before.messages[max(i for i, each in enumerate(before.messages) if each.role == "user") :]
    system = [message for message in before.messages if message.role == "system"]
    folded = (*system, Message("user", SUMMARY_REQUEST), Message("assistant", summary), *last)
    tools = conversation.tools or None
    num_folded = conversation.engine.count(folded, thinking=conversation.thinking, tools=tools)
    if num_folded >= num_before:
        session.info(
            f"nothing has changed: the summary and your last message would take {num_folded} tokens, and the "
            f"whole conversation has {num_before}"
        )
        return
    conversation.restore(replace(before, messages=folded, num_dropped=0, cut_short=()))
    earlier = session.before_compacting
    session.start_new_file()
    session.before_compacting = (*earlier, (before, *file))
    session.save()
    session.info(
        f"{num_before} tokens became {num_folded}: the summary above, and your last message; "
        "/compact undo brings the rest back"
    )


def undo_compacting(session: ChatSession) -> None:
    """Bring the conversation back as it was before the last summary. Raises UsageError: it was not shortened."""
    if not session.before_compacting:
        raise UsageError("this conversation was not shortened; /chats lists earlier ones")
    *earlier, (before, path, seen, name) = session.before_compacting
    session.conversation.restore(before)
    session.start_new_file()
    if session.autosave and path:
        session.autosave.go_on_in(path, seen)
    session.name, session.before_compacting = name, tuple(earlier)
    session.save()
    what = "conversation before the last summary" if earlier else "whole conversation"
    further = "; /compact undo again removes the summary before it too" if earlier else ""
    session.info(f"the {what} is back: {len(session.conversation.messages)} messages{further}")
