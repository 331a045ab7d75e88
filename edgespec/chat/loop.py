"""Answers on a terminal: one for a prompt, or a conversation."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from functools import partial
from textwrap import dedent
from time import monotonic
from typing import TYPE_CHECKING, TextIO

from edgespec import Chunk, ContextOverflow, EdgeSpecError, Reply, in_flags, split_reasoning
from edgespec.chat.call_text import describe_calls
from edgespec.chat.command import NOTHING, Next, block_text, is_command, unescape_message
from edgespec.chat.commands import run_command
from edgespec.chat.compacting import compacting
from edgespec.chat.live_line import live_line
from edgespec.chat.past_rounds import describe_resumed, show_last
from edgespec.chat.plain import PlainPrinter, Printer, Waiting, is_plain
from edgespec.chat.saved_chats import keep_prefix
from edgespec.chat.session import ChatSession
from edgespec.chat.settings import format_sampling
from edgespec.chat.status import format_answer, format_origin_shares, format_stop
from edgespec.chat.tool_calls import replies_to_results
from edgespec.config.config_file import default_home
from edgespec.system.command_line import join_words
from edgespec.system.console import info, lines_wait, print_result, warn
from edgespec.system.context_managers import contextmanager
from edgespec.system.printable import printable
from edgespec.system.signals import Leave, catch_ctrl_c, release_ctrl_c
from edgespec.system.terminal import unseen_keys as hide_typed_keys

if TYPE_CHECKING:
    from edgespec.chat.input import ChatInput

# An unfinished answer is saved this often, or less often if saving would take a larger share of the time.
_SAVE_S = 1.0
_MAX_SAVE_SHARE = 0.01


def answer_once(session: ChatSession, prompt: str, *, as_json: bool = False) -> int:
    """Print one answer, as text or JSON; return the exit code.

    Raises KeyboardInterrupt: Ctrl-C ended it; what was made until then is printed.
    """
    reply = session.send(prompt)
    session.save()
    was_pressed = _answer_once(session, reply, as_json=as_json)
    for reply in () if was_pressed else replies_to_results(session):
        if was_pressed := _answer_once(session, reply, as_json=as_json):
            break
    if session.tools and not (reply.text or as_json or was_pressed):
        info("the model ends without an answer")
    if as_json and reply.last:
        done = reply.completion()
        names = ("text", "token_ids", "finish_reason", "prompt_tokens")
        document = {name: getattr(done, name) for name in names} | {"stats": done.stats.as_dict()}
        if done.reasoning:
            document |= {"reasoning": done.reasoning, "answer": done.answer}
        if calls := describe_calls(session.conversation.rounds[-1].steps):
            document["tool_calls"] = calls
        print_result(json.dumps(document))
    if was_pressed:
        raise KeyboardInterrupt
    preset = session.engine.preset
    is_json = session.conversation.response_format or (preset and "response_format" in preset.answer_options)
    return _report_cut_json(reply) if is_json else 0


def _report_cut_json(reply: Reply) -> int:
    """Warn where an answer that has to be JSON ended before it was whole; the exit code."""
    done = reply.completion()
    with suppress(ValueError):
        if done.finish_reason != "tool_calls":
            json.loads(done.answer)
        return 0
    reason = format_stop(done.finish_reason, is_once=True) or "a stop string (--stop) ended it"
    warn(f"the answer is not complete JSON: {reason}")
    return EdgeSpecError.exit_code


def _answer_once(session: ChatSession, reply: Reply, *, as_json: bool) -> bool:
    """Print an answer, or with as_json nothing yet; return whether Ctrl-C was pressed."""
    session.begin_answer(reply)
    with _stop_on_ctrl_c(session, reply) as was_pressed:
        if as_json:
            answer = tuple(_save_regularly(session, reply))
        else:
            answer = _print_reply(session, reply, warn)
            reason = format_stop(reply.last.finish_reason, is_once=True) if reply.last else ""
            if reason and not was_pressed():
                info(reason)
        session.record(answer)
    return was_pressed()


def converse(session: ChatSession, keeps_history: bool) -> int:
    """Read, answer, repeat, until the user leaves. Raises KeyboardInterrupt: Ctrl-C was typed twice."""
    from edgespec.chat.input import ChatInput, HistoryFile

    rounds, preset = session.conversation.rounds, session.engine.preset
    if not session.is_quiet:
        session.info(
            f"{session.shown_name} on {session.engine.device_names[0]}, {session.status().drafting}"
            f"{format_sampling(session.conversation.sampling)}; /help lists the commands"
        )
    if rounds:
        show_last(rounds, session.info)
        session.info("")
        is_new = preset is not None and 2 * len(rounds) == len(preset.messages)
        session.info("the preset begins with this" if is_new else f"continued: {describe_resumed(session)}")
    history = HistoryFile(default_home() / "history", warn) if keeps_history else None
    with hide_typed_keys() as hide_keys, ChatInput(history, session.status, hide_keys) as user:
        session.permit = partial(user.permit, show=session.info)
        try:
            code = _run(session, user)
        except KeyboardInterrupt:
            _tell_how_to_go_on(session)
            raise
    keep_prefix(session)
    _tell_how_to_go_on(session)
    return code


def _tell_how_to_go_on(session: ChatSession) -> None:
    if session.file and session.conversation.rounds and not session.is_quiet:
        again = join_words(["edgespec", "chat", "--continue", *([session.name] if session.name else [])])
        with suppress(OSError):  # the terminal is gone
            if session.autosave and session.autosave.has_failed:
                session.info("the end of this chat was not saved")
            else:
                session.info(f"{again} continues this chat")


def _run(session: ChatSession, user: "ChatInput") -> int:
    before = asked = NOTHING
    line, is_leaving = "", False
    while True:
        try:
            user.is_multi_line = session.is_multi_line
            session.info("")
            typed = user.ask(before.edit, "the answer" if before.edits_answer else "your last message")
            line = dedent(typed).strip()  # lines of code that begins indented stay one below the other
            asked, before, is_leaving = before, NOTHING, False
            before = _obey(session, line, asked)
            asked = NOTHING  # it was taken; what fails from here on is no edit
            _follow(session, before)
            if before.is_exit:
                return 0
        except Leave:
            raise
        except KeyboardInterrupt:
            if before.edit:
                if not before.edits_answer:
                    session.attachments = list(before.attached)
                before = NOTHING
                session.info("(nothing has changed)")
                continue
            if is_leaving:
                raise
            before, is_leaving = NOTHING, True
            session.info("(press Ctrl-C again or Ctrl-D to leave)")
        except EOFError:
            return 0
        except ContextOverflow as error:
            before = _edit_again(asked, line)
            drop = "/detach, " if session.attachments else ""
            ways = (
                "/compact or /clear" if _drops_oldest(session) else "/compact, /clear or /set overflow drop-oldest"
            )
            # From there on it names one of these ways in Python.
            said, _, _ = in_flags(str(error)).partition("; overflow=")
            session.info(f"edgespec: {said}; or use {drop}/undo, {ways}; Up brings back what you typed")
        except EdgeSpecError as error:
            before = _edit_again(asked, line)
            session.info(f"edgespec: {in_flags(str(error))}")
        finally:
            release_ctrl_c()


def _edit_again(edited: Next, line: str) -> Next:
    """The text that was edited comes back where it was refused, unless a command was typed in its place."""
    return edited._replace(edit=line) if edited.edit and not is_command(line) else NOTHING


def _drops_oldest(session: ChatSession) -> bool:
    return session.conversation.overflow == "drop-oldest"


def _obey(session: ChatSession, line: str, before: Next) -> Next:
    """Do what a line says, which may be a text that the command before it has put into the input."""
    if before.edits_answer:
        if line:
            session.rewrite(line)
            session.info("the answer is edited; /go continues it, or send your next message")
        return NOTHING
    if line == "?":
        line = "/help"
    block = block_text(line)
    is_message = bool(line) and not is_command(line) if block is None else block != ""
    if before.edit and not is_message:
        session.attachments = list(before.attached)
        session.info("(nothing has changed)")
    if not line or block == "":
        return NOTHING
    if not is_message:
        if release_ctrl_c():
            raise KeyboardInterrupt
        return run_command(session, line)
    removed = session.conversation.undo() if before.edit else None
    try:
        reply = session.send(unescape_message(line) if block is None else block)
    except EdgeSpecError:
        if removed:
            session.conversation.redo(removed)
        raise
    session.save()  # the message is saved even if its answer fails
    return Next(reply=reply, shows_begun=True)


def _follow(session: ChatSession, following: Next) -> None:
    """Print an answer, run the tools it calls, and print what the model says then; or the last answer again."""
    if following.reply and following.compacts:
        with compacting(session):
            _write_answer(session, following.reply)
    elif following.reply:
        _answer(session, following.reply, shows_begun=following.shows_begun)
        for reply in replies_to_results(session):
            _answer(session, reply)
    if following.shows_last:
        session.info("")
        _print_chunks(session, session.answer, begun=session.begun)


def _write_answer(session: ChatSession, reply: Reply, *, shows_begun: bool = False) -> None:
    """Print an answer; what it was given to begin with is on the screen already where it goes on."""
    session.info("")
    session.begin_answer(reply)
    try:
        with _stop_on_ctrl_c(session, reply):
            session.record(_print_reply(session, reply, session.info, reply.begun if shows_begun else ""))
    finally:
        session.save()
    if reply.text or not reply.calls:
        session.info("")


def _answer(session: ChatSession, reply: Reply, *, shows_begun: bool = False) -> None:
    """Print an answer, how fast it came and why it ended, and what to do then."""
    _write_answer(session, reply, shows_begun=shows_begun)
    if session.has_spent_budget:
        session.info(f"(it thought for {session.conversation.thinking_budget} tokens, the limit that /think set)")
    if reply.calls:
        return
    if session.view == "drafted" and is_plain(sys.stdout):
        origins = Counter(origin for chunk in session.answer for origin in chunk.origins)
        session.info("tokens from: " + "  ".join(share for _, share in format_origin_shares(origins)))
    if reply.text and session.last and session.last.stats and not session.is_quiet:
        parts = format_answer(
            session.last.stats,
            session.last.finish_reason,
            has_looped=session.has_looped,
            drops_oldest=_drops_oldest(session),
        )
        if is_plain(sys.stderr):  # which has no line below the input
            parts.append(session.status().context)
        session.info(" · ".join(parts))
    ended = session.last is not None and session.last.finish_reason == "stop"
    if ended and reply.begun and not shows_begun and not "".join(chunk.text for chunk in session.answer):
        session.info("the model ended the answer here and added nothing")
    if not reply.text:
        reason = session.last.finish_reason if session.last else None
        why = (
            "stopped before the first word"
            if reason == "cancelled"
            else format_stop(reason) or "there is no answer"
        )
        what = "/retry asks again, or send another message instead of this one"
        if session.conversation.rounds[-1].answer or session.conversation.calls:
            what = "the earlier answer stays"
        session.info(f"{why}; {what}")


@contextmanager
def _stop_on_ctrl_c(session: ChatSession, reply: Reply) -> Iterator[Callable[[], bool]]:
    """Yields whether Ctrl-C was pressed. Pressed twice, it leaves; the answer so far is recorded."""
    before = session.answer
    with closing(reply), catch_ctrl_c(reply.cancel) as was_pressed:
        try:
            yield was_pressed
        except Leave:
            reply.close()
            if session.answer is before:
                session.record((reply.last,) if reply.last else ())
            if session.trace and not reply.last:
                warn("the trace lacks the last answer, which was interrupted twice")
            raise


def _print_reply(
    session: ChatSession, reply: Reply, report: Callable[[str], None], begun: str = ""
) -> tuple[Chunk, ...]:
    if reply.dropped:
        report(f"the context is full: the {len(reply.dropped)} oldest messages are no longer sent to the model")
    with lines_wait(), live_line(session, sys.stdout, _save_regularly(session, reply)) as (stream, chunks):
        return _print_chunks(session, chunks, partial(_prompt_progress, reply), stream, begun)


def _print_chunks(
    session: ChatSession,
    chunks: Iterable[Chunk],
    progress: Callable[[], str] = str,
    stream: TextIO | None = None,
    begun: str = "",
) -> tuple[Chunk, ...]:
    """Print chunks behind the text that an answer was given to begin with; return them."""
    # What was given may hold the mark that opens the reasoning, which a text behind it shows, or only its end.
    shown = f"{begun}…"
    has_mark = split_reasoning(shown, is_open=False)[1] != shown
    is_open = not has_mark and (session.opens_reasoning or split_reasoning(shown)[1] != shown)
    printer = _make_printer(session, stream or sys.stdout, is_open=is_open)
    seen: list[Chunk] = []
    try:
        with Waiting(sys.stdout, progress) as waiting:
            for chunk in chunks:
                waiting.end()
                if begun and not seen:
                    _print_begun(printer, begun, stream or sys.stdout)
                seen.append(chunk)
                printer.push(chunk)
    finally:
        printer.end()
    return tuple(seen)


def _print_begun(printer: Printer, begun: str, stream: TextIO) -> None:
    from edgespec.chat.printer import OriginPrinter

    if isinstance(printer, OriginPrinter):  # which shows tokens, and this text has none
        stream.write(printable(begun))
    else:
        printer.push(Chunk(text=begun, token_ids=()))


def _make_printer(session: ChatSession, stream: TextIO, *, is_open: bool) -> Printer:
    if is_plain(sys.stdout) or session.view == "plain":
        return PlainPrinter(stream)
    # 0.1 s that a pipe can do without.
    from edgespec.chat.printer import MarkdownPrinter, OriginPrinter, ThinkingPrinter, console_of

    console = console_of(stream)
    if session.view == "drafted":
        return OriginPrinter(console, session.engine.tokenizer)
    return ThinkingPrinter(MarkdownPrinter(console), console, session.thinking_view, is_open=is_open)


def _save_regularly(session: ChatSession, reply: Reply) -> Iterator[Chunk]:
    """Pass the chunks on; a crash of this process loses the last second of the answer."""
    due_s = 0.0
    for chunk in reply:
        yield chunk
        if chunk.text and (begun := monotonic()) >= due_s:
            session.save()
            due_s = begun + max(_SAVE_S, (monotonic() - begun) / _MAX_SAVE_SHARE)


def _prompt_progress(reply: Reply) -> str:
    if not (num_read := reply.num_read):
        return ""
    return f"reading the prompt, {num_read} of {reply.prompt_tokens} tokens"
