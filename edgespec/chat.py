"""Answers on a terminal: one for a prompt, or a conversation."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from edgespec.answers import Chunk
from edgespec.chat_actions import NOTHING, Next, act, resumed
from edgespec.chat_commands import as_message, is_command
from edgespec.chat_interrupt import Leave, stopped_by_ctrl_c, unseen_keys
from edgespec.chat_plain import PlainPrinter, Printer, Waiting, is_plain
from edgespec.chat_session import Answer, ChatSession
from edgespec.chat_status import after_answer, context_of, origin_shares, why
from edgespec.conversation import Reply
from edgespec.errors import ContextOverflow, EdgeSpecError
from edgespec.talk import say_problem, say_stage

if TYPE_CHECKING:
    from edgespec.chat_input import ChatInput

_EVERY_S = 1.0  # an answer that is made is kept so often,
_MOST_SHARE = 0.01  # or as seldom as it takes no larger share of the time


def answer_once(session: ChatSession, prompt: str, *, as_json: bool = False) -> int:
    """Print one answer as it is made, or as one JSON document; returns the exit code.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the answer; what there was of it is printed.
    """
    reply = session.conversation.stream(prompt)
    session.save()
    with _stopped_by_ctrl_c(session, reply) as was_pressed:
        if as_json:
            answer = _seen(_kept(session, reply))
        else:
            _tell_dropped(say_problem, reply)
            answer = _shown(_kept(session, reply), _printer(session), _reading(session, reply))
        if not as_json and answer.last and (ended := why(answer.last.finish_reason)):
            say_stage(ended)
        session.keep(answer)
    if was_pressed():
        raise KeyboardInterrupt
    if as_json:
        done = reply.completion()
        document = {
            "text": done.text,
            "token_ids": done.token_ids,
            "finish_reason": done.finish_reason,
            "prompt_tokens": done.prompt_tokens,
            "stats": done.stats.as_dict(),
        }
        print(json.dumps(document))
    return 0


def converse(session: ChatSession, keeps_history: bool) -> int:
    """Read, answer, repeat, until the user leaves; returns the exit code.

    Raises:
        KeyboardInterrupt: Ctrl-C was typed twice.
    """
    from edgespec.chat_input import ChatInput
    from edgespec.chat_words import history, words

    if not session.is_quiet:
        session.say(_welcome(session))
    if session.conversation.rounds:
        session.say(f"resumed: {resumed(session)}")
    user = ChatInput(history(session.say) if keeps_history else None, words, session.standing)
    with unseen_keys():
        return _talk(session, user)


def _talk(session: ChatSession, user: "ChatInput") -> int:
    draft, is_leaving = "", False
    while True:
        try:
            user.is_multi_line = session.is_multi_line
            session.say("")
            typed = user.ask(draft).strip()
            is_edit, draft, is_leaving = bool(draft), "", False
            following = _followed(session, typed, is_edit)
            if following.leaves:
                return 0
            draft = following.draft
        except Leave:
            raise
        except KeyboardInterrupt:
            if is_leaving:
                raise
            draft, is_leaving = "", True
            session.say("(Ctrl-C once more or Ctrl-D leaves)")
        except EOFError:
            return 0
        except ContextOverflow as error:
            session.say(f"edgespec: {error}; or /set overflow drop-oldest, /undo, or begin anew with /clear")
        except EdgeSpecError as error:
            session.say(f"edgespec: {error}")


def _welcome(session: ChatSession) -> str:
    drafts = session.engine.speculation.name
    off = "without drafts" if drafts == "none" else f"drafts by {drafts}"
    return f"{session.engine.manifest.name} on {session.engine.device_names[0]}, {off}; /help lists what there is"


def _followed(session: ChatSession, typed: str, is_edit: bool) -> Next:
    """What comes of a line: an answer, most often."""
    if not typed:
        return NOTHING
    if is_command(typed):
        following = act(session, typed)
        if following.reply:
            _answer(session, following.reply)
        if following.shows_last and session.answer:
            _show_again(session, session.answer)
        return following
    before = session.conversation.undo() if is_edit else None
    try:
        reply = session.conversation.stream(as_message(typed))
    except EdgeSpecError:
        if before:
            session.conversation.redo(before)
        raise
    session.save()  # what was said is kept, whatever becomes of the answer
    _answer(session, reply)
    return NOTHING


def _answer(session: ChatSession, reply: Reply) -> None:
    """Show an answer as it is made, and what it took."""
    session.say("")
    _tell_dropped(session.say, reply)
    try:
        with _stopped_by_ctrl_c(session, reply):
            answer = _shown(_kept(session, reply), _printer(session), _reading(session, reply))
            session.keep(answer)
    finally:
        session.save()
    session.say("")
    if session.view == "drafted" and is_plain(sys.stdout):
        origins = Counter(origin for chunk in answer.chunks for origin in chunk.origins)
        session.say("tokens from: " + "  ".join(words for _, words in origin_shares(origins)))
    if answer.last and answer.last.stats and not session.is_quiet:
        parts = after_answer(answer.last.stats, answer.last.finish_reason)
        if is_plain(sys.stderr):  # which has no line below the input
            parts.append(context_of(session.standing()))
        session.say(" · ".join(parts))
    if not reply.text:
        session.say("nothing was answered; /retry asks again, the next message is sent without this one")


@contextmanager
def _stopped_by_ctrl_c(session: ChatSession, reply: Reply) -> Iterator[Callable[[], bool]]:
    """Yields whether it was pressed; what was made until it was pressed twice is kept too."""
    before = session.answer
    with closing(reply), stopped_by_ctrl_c(reply.cancel) as was_pressed:
        try:
            yield was_pressed
        except Leave:
            reply.close()
            if session.answer is before:
                session.keep(Answer((), reply.last))
            if session.trace and not reply.last:
                say_problem("the trace lacks the last answer, which was left before its end")
            raise


def _kept(session: ChatSession, reply: Reply) -> Iterator[Chunk]:
    """Its chunks; of what there is of it, a crash of this process costs the last second."""
    due_s = 0.0
    for chunk in reply:
        yield chunk
        if chunk.text and (begun := monotonic()) >= due_s:
            session.save()
            due_s = begun + max(_EVERY_S, (monotonic() - begun) / _MOST_SHARE)


def _tell_dropped(tell: Callable[[str], None], reply: Reply) -> None:
    if reply.dropped:
        tell(f"the context is full: the {len(reply.dropped)} oldest messages are not sent any more")


def _printer(session: ChatSession) -> Printer:
    if is_plain(sys.stdout) or session.view == "plain":
        return PlainPrinter(sys.stdout)
    from edgespec.chat_printer import (  # 0.1 s that a pipe can do without
        MarkdownPrinter,
        OriginPrinter,
        console_of,
    )

    console = console_of(sys.stdout)
    if session.view == "drafted":
        return OriginPrinter(console, session.engine.tokenizer)
    return MarkdownPrinter(console)


def _seen(chunks: Iterable[Chunk]) -> Answer:
    seen = tuple(chunks)
    return Answer(seen, seen[-1] if seen and seen[-1].finish_reason else None)


def _reading(session: ChatSession, reply: Reply) -> Callable[[], str]:
    """Tells how much of the prompt has been read."""
    target = session.engine.target
    before = target.num_fed

    def words() -> str:
        if target.num_fed == before:
            return ""
        held = getattr(target, "held", None)  # what was read earlier included, where a cache tells it
        done = target.num_fed - before if held is None else len(held)
        return f"reading the prompt, {min(done, reply.prompt_tokens)} of {reply.prompt_tokens} tokens"

    return words


def _shown(chunks: Iterable[Chunk], printer: Printer, progress: Callable[[], str] = str) -> Answer:
    """Print chunks as they come."""
    seen: list[Chunk] = []
    waiting = Waiting(sys.stdout, progress)
    waiting.begin()
    try:
        for chunk in chunks:
            waiting.end()
            seen.append(chunk)
            printer.push(chunk)
    finally:
        waiting.end()
        printer.end()
    return _seen(seen)


def _show_again(session: ChatSession, answer: Answer) -> None:
    session.say("")
    _shown(answer.chunks, _printer(session))
