"""What each command of a chat does."""

import difflib
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.chat_commands import find, help_lines, taken_apart, unknown
from edgespec.chat_session import VIEWS, ChatSession
from edgespec.chat_status import report_lines
from edgespec.clipboard import copy
from edgespec.conversation import Reply
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.printable import in_a_line
from edgespec.sampling import SamplingParams
from edgespec.trace_file import TraceFile
from edgespec.transcript import read_transcript, save_transcript

SAMPLING = tuple(each.name for each in fields(SamplingParams))
SETTINGS = (*SAMPLING, "max_tokens", "stop", "overflow")


class Next(NamedTuple):
    """What follows a command: an answer, a text to edit, a view of the last answer, or the end."""

    reply: Reply | None = None
    draft: str = ""
    shows_last: bool = False
    leaves: bool = False


NOTHING = Next()


def act(session: ChatSession, typed: str) -> Next:
    """Do what a line that is a command asks for.

    Raises:
        EdgeSpecError: It cannot be done; nothing has changed then.
    """
    name, argument = taken_apart(typed)
    command = find(name)
    if command is None:
        raise UsageError(unknown(in_a_line(name, 40)))
    return _ACTIONS[command.name](session, argument)


def _help(session: ChatSession, argument: str) -> Next:
    session.say("\n".join(help_lines()))
    return NOTHING


def _model(session: ChatSession, argument: str) -> Next:
    manifest = session.engine.manifest
    if not argument:
        session.say(
            f"{in_a_line(manifest.name)}: {in_a_line(manifest.architecture)}, {manifest.precision}, a context of "
            f"{session.engine.context_length} tokens, on {session.engine.device_names[0]}"
        )
        return NOTHING
    session.reload(argument, session.drafter)
    session.say(f"now {in_a_line(session.engine.manifest.name)}, drafts by {session.engine.speculation.name}")
    return NOTHING


def _drafter(session: ChatSession, argument: str) -> Next:
    if argument:
        session.reload(session.model, argument)
    session.say(f"drafts by {in_a_line(session.engine.speculation.name)} (--drafter {in_a_line(session.drafter)})")
    return NOTHING


def _system(session: ChatSession, argument: str) -> Next:
    conversation = session.conversation
    if argument:
        conversation.system = None if argument == "-" else argument
        session.save()
    session.say(f"system: {conversation.system}" if conversation.system is not None else "no system message")
    return NOTHING


def _set(session: ChatSession, argument: str) -> Next:
    if not argument:
        session.say("\n".join(f"{name} {value}" for name, value in _settings(session).items()))
        return NOTHING
    name, *rest = argument.replace("=", " ", 1).split(maxsplit=1)
    name = name.replace("-", "_")
    if name not in SETTINGS:
        near = difflib.get_close_matches(name, SETTINGS, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"there is no setting '{in_a_line(name, 40)}': {meant}known are {', '.join(SETTINGS)}")
    if not rest:
        session.say(f"{name} {_settings(session)[name]}")
        return NOTHING
    _change(session, name, rest[0])
    session.say(f"{name} {_settings(session)[name]}")
    return NOTHING


def _settings(session: ChatSession) -> dict[str, Any]:
    conversation = session.conversation
    sampling = {name: getattr(conversation.sampling, name) for name in SAMPLING}
    stop = conversation.stop or ()
    return sampling | {
        "max_tokens": conversation.max_tokens or "as many as the context has room for",
        "stop": " ".join(map(repr, [stop] if isinstance(stop, str) else stop)) or "-",
        "overflow": conversation.overflow,
    }


def _change(session: ChatSession, name: str, value: str) -> None:
    """Raises UsageError: The value is none that this setting can have."""
    conversation = session.conversation
    if name in SAMPLING:
        changed: dict[str, Any] = {name: _number(name, value)}
        conversation.sampling = replace(conversation.sampling, **changed)
    elif name == "overflow":
        conversation.overflow = value
    elif name == "stop":
        conversation.stop = () if value == "-" else (value,)
    elif value == "-":
        conversation.max_tokens = None
    else:
        number = _number(name, value)
        if not isinstance(number, int) or number < 1:
            raise UsageError(f"max_tokens is {value}; wanted a whole number from 1, or - for no limit")
        conversation.max_tokens = number


def _number(name: str, value: str) -> int | float:
    try:
        return int(value)
    except ValueError:
        pass
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"{name} is {in_a_line(value, 40)!r}; wanted a number") from None


def _retry(session: ChatSession, argument: str) -> Next:
    if session.conversation.sampling.is_greedy and session.answer and session.conversation.rounds[-1:]:
        session.say("(greedy decoding gives the same answer again; /set temperature 0.8 for others)")
    return Next(reply=session.conversation.retry())


def _undo(session: ChatSession, argument: str) -> Next:
    taken = session.conversation.undo()
    if taken is None:
        raise UsageError("there is nothing to take back")
    session.save()
    session.say(f"taken back: {in_a_line(taken.user, 60)}")
    return NOTHING


def _edit(session: ChatSession, argument: str) -> Next:
    rounds = session.conversation.rounds
    if not rounds:
        raise UsageError("there is nothing to edit yet; say something first")
    return Next(draft=rounds[-1].user)


def _save(session: ChatSession, argument: str) -> Next:
    path = _path(argument, "save")
    save_transcript(path, session.conversation.transcript(session.model))
    session.say(f"{len(session.conversation.messages)} messages written to {in_a_line(str(path), 200)}")
    return NOTHING


def _load(session: ChatSession, argument: str) -> Next:
    session.conversation.restore(read_transcript(_path(argument, "load")))
    if session.autosave:
        session.autosave.begin_anew()
    session.answer = None
    session.save()
    session.say(resumed(session))
    return NOTHING


def resumed(session: ChatSession) -> str:
    """What was taken up, in words."""
    rounds = session.conversation.rounds
    if not rounds:
        return "an empty conversation"
    num, said = len(session.conversation.messages), in_a_line(rounds[-1].user, 60)
    pending = ""
    if rounds[-1].answer is None:
        pending = " It has no answer yet; /retry asks for one."
    elif (num - 1, "cancelled") in session.conversation.transcript().cut_short:
        pending = " Its answer was cut off and is kept as far as it came; /retry asks for a whole one."
    return f"{num} messages; you said last: {said!r}.{pending}"


def _path(argument: str, name: str) -> Path:
    if not argument:
        raise UsageError(f"/{name} wants a file, as in /{name} talk.jsonl")
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{argument}: {error}") from None


def _clear(session: ChatSession, argument: str) -> Next:
    session.conversation.clear()
    if session.autosave:
        session.autosave.begin_anew()  # what was said stays where it is
    session.answer = None
    session.say("a new conversation")
    return NOTHING


def _copy(session: ChatSession, argument: str) -> Next:
    text = _to_copy(session, argument)
    way = copy(text, is_terminal=sys.stdout.isatty())
    if way is None:
        raise EdgeSpecError(
            f"no clipboard takes {len(text)} characters here; install wl-copy or xclip, or use /save FILE"
        )
    session.say(f"{len(text)} characters copied by {way}")
    return NOTHING


def _to_copy(session: ChatSession, part: str) -> str:
    """Raises UsageError: There is none."""
    conversation = session.conversation
    if part == "all":
        return "\n\n".join(f"{message.role}: {message.content}" for message in conversation.messages)
    answers = [each.answer for each in conversation.rounds if each.answer]
    if not answers:
        raise UsageError("there is no answer to copy yet")
    if part == "code":
        blocks = code_blocks(answers[-1])
        if not blocks:
            raise UsageError("the last answer has no code block; /copy takes all of it")
        return blocks[-1]
    if part:
        raise UsageError(f"/copy takes nothing, code or all, not '{in_a_line(part, 40)}'")
    return answers[-1]


def code_blocks(text: str) -> list[str]:
    """What stands between fences, in order."""
    blocks: list[list[str]] = []
    fence = None
    for line in text.split("\n"):
        stripped = line.strip()
        if fence is None and stripped[:3] in ("```", "~~~"):
            fence = stripped[:3]
            blocks.append([])
        elif fence and stripped.startswith(fence):
            fence = None
        elif fence:
            blocks[-1].append(line)
    return ["\n".join(block) + "\n" for block in blocks]


def _context(session: ChatSession, argument: str) -> Next:
    conversation, engine = session.conversation, session.engine
    used, whole = conversation.num_tokens, engine.context_length
    bar = round(40 * min(1.0, used / whole))
    lines = [f"{'█' * bar}{'·' * (40 - bar)} {used} of {whole} tokens ({used / whole:.0%})"]
    if conversation.system is not None:
        lines.append(f"system message: {len(engine.tokenizer.encode(conversation.system))} tokens")
    sent = len(conversation.sent) - (conversation.system is not None)
    lines.append(f"{sent} messages of the conversation are sent")
    if conversation.num_dropped:
        lines.append(f"{conversation.num_dropped} older ones are not sent any more, and stay in the transcript")
    policy = {
        "error": "refuse what does not fit (/set overflow drop-oldest lets the oldest go)",
        "drop-oldest": "let the oldest rounds go, and say so",
    }[conversation.overflow]
    session.say("\n".join([*lines, f"when it is full: {policy}"]))
    return NOTHING


def _stats(session: ChatSession, argument: str) -> Next:
    if session.stats is None:
        name = session.engine.speculation.name
        off = "off: --drafter none, or nothing is there that could draft"
        session.say(f"no answer yet; drafting is {off if name == 'none' else f'by {in_a_line(name)}'}")
        return NOTHING
    devices = (session.engine.device_names[0], session.engine.device_names[1])
    session.say("\n".join(report_lines(session.stats, session.downgrades, devices)))
    return NOTHING


def _plan(session: ChatSession, argument: str) -> Next:
    session.say(session.plan(session.model, session.drafter))
    return NOTHING


def _trace(session: ChatSession, argument: str) -> Next:
    path = _path(argument, "trace")
    if session.answer is None or session.answer.last is None or not session.answer.last.timeline:
        raise UsageError("there is no answer to trace yet")
    TraceFile(path).add(session.answer.last.timeline)
    session.say(f"written to {in_a_line(str(path), 200)}, for chrome://tracing or Perfetto")
    return NOTHING


def _multi(session: ChatSession, argument: str) -> Next:
    session.is_multi_line = not session.is_multi_line
    session.say(
        "Enter makes a new line, Alt-Enter sends"
        if session.is_multi_line
        else "Enter sends, Alt-Enter makes a new line"
    )
    return NOTHING


def _show(session: ChatSession, argument: str) -> Next:
    if argument not in VIEWS:
        raise UsageError(f"/show takes {', '.join(VIEWS)}; answers are shown as {session.view}")
    session.view = argument
    return Next(shows_last=session.answer is not None)


def _exit(session: ChatSession, argument: str) -> Next:
    return Next(leaves=True)


_ACTIONS: dict[str, Callable[[ChatSession, str], Next]] = {
    "help": _help,
    "model": _model,
    "drafter": _drafter,
    "system": _system,
    "set": _set,
    "retry": _retry,
    "undo": _undo,
    "edit": _edit,
    "save": _save,
    "load": _load,
    "clear": _clear,
    "copy": _copy,
    "context": _context,
    "stats": _stats,
    "plan": _plan,
    "trace": _trace,
    "multi": _multi,
    "show": _show,
    "exit": _exit,
}
