"""The table of the chat's commands, and what each does."""

import difflib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from edgespec import EdgeSpecError, ModelHome, Transcript, UsageError, begin_anew, in_flags
from edgespec.chat.attachments import brief_message, split_message
from edgespec.chat.clipboard import copy, text_to_copy
from edgespec.chat.command import (
    NOTHING,
    Action,
    Command,
    Next,
    escape_message,
    explain,
    first_page,
    full_help,
    split_command,
    whole_number,
)
from edgespec.chat.compacting import begin_compacting, undo_compacting
from edgespec.chat.files import attach, detach, export_to, parse_new_path, parse_path, save_to, trace_to
from edgespec.chat.live_line import switch_figures
from edgespec.chat.past_rounds import describe_resumed, show_last, show_rounds
from edgespec.chat.saved_chats import (
    branch,
    delete_saved,
    name_chat,
    offer_deletion,
    open_chat,
    show_chats,
    suggest_instead,
)
from edgespec.chat.session import THINKING_VIEWS, VIEWS, ChatSession
from edgespec.chat.settings import apply_setting, find_setting, format_settings
from edgespec.chat.status import format_report
from edgespec.config.config_file import default_home
from edgespec.config.drafter_names import TEXT
from edgespec.system.printable import one_line
from edgespec.system.tables import read_table
from edgespec.system.units import format_count

COMMANDS: list[Command] = []  # filled once, below
_TEXTS = read_table(__file__, "commands.toml")
_OTHER_NAMES = read_table(__file__, "other_names.toml")
_BAR_COLUMNS = 40  # of /context, in a window that has as many
_MANY_LINES = ("[TEXT]", "[NAME VALUE]")  # arguments that may have them


def find_command(name: str) -> Command | None:
    name = _OTHER_NAMES["commands"].get(name.lower(), name.lower())
    return next((command for command in COMMANDS if command.name == name), None)


def run_command(session: ChatSession, line: str) -> Next:
    """Do what a command asks for. Raises EdgeSpecError: it cannot be done; nothing has changed then."""
    name, argument = split_command(line)
    if command := find_command(name):
        num_lines = len(line.strip().splitlines())
        if num_lines > 1 and command.argument not in _MANY_LINES:
            raise UsageError(
                f"/{name} takes one line, not {num_lines}; nothing was done. To send a text that begins with /, "
                "type //"
            )
        if argument and not command.argument:
            raise UsageError(f"/{name} takes nothing else, not '{one_line(argument, 40)}'; nothing was done")
        return command.action(session, argument) or NOTHING
    raise _unknown_command(name)


def _unknown_command(name: str) -> UsageError:
    name = one_line(name, 40)
    near = difflib.get_close_matches(name, [command.name for command in COMMANDS], n=1, cutoff=0.77)
    hint = f"did you mean /{near[0]}? " if near else ""
    if said := find_setting(name):
        hint = f"{said}; "
    return UsageError(
        f"there is no command /{name}; {hint}/help all lists all; to send a text that begins with /, type //"
    )


def _command(name: str) -> Callable[[Action], Action]:
    """Add a command of the table, and what it does."""
    stated = _TEXTS[name]
    meaning = stated["meaning"].replace("TEXT_DRAFTERS", ", ".join(TEXT))

    def add(action: Action) -> Action:
        COMMANDS.append(Command(name, stated.get("argument", ""), meaning, stated.get("example", ""), action))
        return action

    return add


def _file_command(name: str, write: Callable[[ChatSession, Path], None]) -> None:
    """Add a command that writes a new file, and the one that also writes over a file."""
    example = _TEXTS[name]["example"]

    @_command(name)
    def write_new(session: ChatSession, argument: str) -> None:
        write(session, parse_new_path(session, argument, name, example))

    @_command(f"{name}!")
    def write_over(session: ChatSession, argument: str) -> None:
        write(session, parse_path(argument, f"{name}!", example))


@_command("help")
def _help(session: ChatSession, argument: str) -> None:
    name = argument.removeprefix("/")
    if not name or name == "all":
        session.info(full_help(COMMANDS) if name else first_page())
    elif command := find_command(name):
        session.info(explain(command, COMMANDS))
    else:
        raise _unknown_command(name)


@_command("model")
def _model(session: ChatSession, argument: str) -> None:
    if argument:
        session.switch_engine(argument, session.drafter)
    manifest = session.engine.manifest
    session.info(
        f"{one_line(session.shown_name)}: {one_line(manifest.architecture)}, {manifest.precision} precision, "
        f"a context of {session.engine.context_length} tokens, on {session.engine.device_names[0]}, "
        f"drafter: {one_line(session.engine.speculation.name)}"
    )


@_command("drafter")
def _drafter(session: ChatSession, argument: str) -> None:
    if argument:
        session.switch_engine(session.model, argument)
    named = f" (--drafter {one_line(session.drafter)})" if session.drafter else ""
    session.info(f"drafter: {one_line(session.engine.speculation.name)}{named}")


@_command("system")
def _system(session: ChatSession, argument: str) -> None:
    conversation = session.conversation
    if argument:
        conversation.system = None if argument == "-" else argument
        session.save()
    session.info(f"system message: {conversation.system}" if conversation.system else "no system message")


@_command("set")
def _set(session: ChatSession, argument: str) -> None:
    conversation = session.conversation
    if argument:
        session.info(apply_setting(conversation, argument))
        return
    kept = "these hold for this chat; `edgespec config set NAME VALUE` sets one for all chats"
    session.info("\n".join([*format_settings(conversation), kept]))


@_command("retry")
def _retry(session: ChatSession, argument: str) -> Next:
    if session.conversation.sampling.is_greedy and session.answer and session.conversation.rounds:
        session.info("(without sampling the answer hardly changes; for another: /set temperature 0.8)")
    return Next(reply=session.conversation.retry())


@_command("undo")
def _undo(session: ChatSession, argument: str) -> None:
    if (removed := session.conversation.undo()) is None:
        raise UsageError("there is nothing to undo")
    session.save()
    session.info(f"removed: {one_line(brief_message(removed.user), 60)}")


@_command("edit")
def _edit(session: ChatSession, argument: str) -> Next:
    if not (rounds := session.conversation.rounds):
        raise UsageError("there is nothing to edit yet")
    files, text = split_message(rounds[-1].user)
    before = tuple(session.attachments)
    names = {file.name for file in before}
    session.attachments = [*(file for file in files if file.name not in names), *before]
    return Next(edit=escape_message(text), attached=before)


_command("attach")(attach)
_command("detach")(detach)


_file_command("save", save_to)


@_command("load")
def _load(session: ChatSession, argument: str) -> None:
    path = parse_path(argument, "load")
    if not os.path.exists(path):  # or it cannot be looked for, which read() explains
        suggest_instead(session, argument)
    session.conversation.restore(Transcript.read(path))
    session.start_new_file()
    session.save()
    show_last(session.conversation.rounds, session.info)
    session.info("")
    session.info(describe_resumed(session))


@_command("history")
def _history(session: ChatSession, argument: str) -> None:
    rounds = session.conversation.rounds
    if argument and not whole_number(argument):
        raise UsageError(f"/history takes the number of messages to show, not '{one_line(argument, 40)}'")
    if session.conversation.system:
        session.info(f"system message: {session.conversation.system}")
    show_rounds(rounds[-whole_number(argument) :] if argument else rounds, session.info)
    if not rounds:
        session.info("the conversation is empty")


@_command("answer")
def _answer(session: ChatSession, argument: str) -> Next:
    if not (rounds := session.conversation.rounds) or not rounds[-1].answer:
        raise UsageError("there is no answer to edit yet")
    return Next(edit=rounds[-1].answer, edits_answer=True)


@_command("go")
def _go(session: ChatSession, argument: str) -> Next:
    if not (rounds := session.conversation.rounds) or not rounds[-1].answer:
        raise UsageError(
            f"there is no answer to continue; {'/retry asks for one' if rounds else 'send a message'}"
        )
    return Next(reply=session.conversation.go_on())


@_command("prefill")
def _prefill(session: ChatSession, argument: str) -> None:
    session.prefill = argument
    session.info(
        f"the next answer begins with: {argument}" if argument else "the model begins the next answer itself"
    )


_command("branch")(branch)
_command("name")(name_chat)
_command("chats")(show_chats)


@_command("open")
def _open(session: ChatSession, argument: str) -> None:
    home, model = ModelHome(default_home()), open_chat(session, argument).transcript.model
    model = model and home.current_name(model)
    session.info("")
    hint = (
        f" Its model was {one_line(model, 60)}; /model switches to it."
        if model not in (None, session.model)
        else ""
    )
    session.info(describe_resumed(session) + hint)


_command("delete")(offer_deletion)
_command("delete!")(delete_saved)


_file_command("export", export_to)


@_command("think")
def _think(session: ChatSession, argument: str) -> None:
    conversation = session.conversation
    if argument in ("on", "off"):
        if not session.engine.can_switch_thinking:
            raise UsageError(f"{one_line(session.engine.manifest.name)} has no switch for thinking")
        conversation.thinking = argument == "on"
    elif argument == "auto":
        conversation.thinking = None
    elif argument in THINKING_VIEWS:
        session.thinking_view = argument
    elif argument == "-1":
        conversation.thinking_budget = None
    elif argument.isascii() and argument.isdigit():
        if not session.engine.can_think:
            raise UsageError(f"{one_line(session.engine.manifest.name)} does not think before it answers")
        conversation.thinking_budget = whole_number(argument)
    elif argument:
        raise UsageError(
            f"/think takes on, off, auto, {', '.join(THINKING_VIEWS)}, a number of tokens, or -1 for no limit"
        )
    switch = {None: "as its chat template says", True: "on", False: "off"}[conversation.thinking]
    if not session.engine.can_switch_thinking:
        switch = "its chat template has no switch for it"
    most = conversation.thinking_budget
    budget = "no limit" if most is None else f"at most {most} tokens"
    session.info(f"thinking: {switch}; length: {budget}; view: {session.thinking_view}")


@_command("tools")
def _tools(session: ChatSession, argument: str) -> None:
    if session.tools is None:
        raise UsageError(
            "there are no tools; edgespec chat --tools FILE.py makes tools of the functions in a file"
        )
    if argument not in ("", "ask"):
        raise UsageError(f"/tools takes ask or no argument, not '{one_line(argument, 40)}'")
    if argument:
        session.tools.allowed.clear()
    session.info("\n".join(session.tools.lines()))


@_command("clear")
def _clear(session: ChatSession, argument: str) -> None:
    begin_anew(session.conversation)
    session.start_new_file()
    session.info("a new conversation begins")


@_command("copy")
def _copy(session: ChatSession, argument: str) -> None:
    text = text_to_copy(session, argument)
    if (way := copy(text, is_terminal=sys.stdout.isatty())) is None:
        raise EdgeSpecError(
            f"found no clipboard for {len(text)} characters; install wl-copy or xclip, or use /save FILE"
        )
    session.info(f"{len(text)} characters copied with {way}")


@_command("context")
def _context(session: ChatSession, argument: str) -> None:
    conversation, engine = session.conversation, session.engine
    whole = engine.context_length
    used = min(conversation.num_tokens, whole)  # what a further message takes beside its text is counted too
    width = min(_BAR_COLUMNS, shutil.get_terminal_size().columns - 1)
    bar = round(width * used / whole)
    lines = [f"{'█' * bar}{'·' * (width - bar)} {used} of {whole} tokens ({used / whole:.0%})"]
    num_sent = len(conversation.sent)
    if conversation.system:
        lines.append(f"system message: {len(engine.tokenizer.encode(conversation.system))} tokens")
        num_sent -= 1
    lines.append(f"sent to the model: {format_count(num_sent, 'message')}")
    if num := conversation.num_dropped:
        lines.append(f"no longer sent: {format_count(num, 'older one')}; the saved conversation keeps all")
    policy = {
        "error": "new messages are refused (/set overflow drop-oldest leaves out the oldest instead)",
        "drop-oldest": "the oldest messages are left out",
    }[conversation.overflow]
    session.info("\n".join([*lines, f"when it is full: {policy}"]))


@_command("compact")
def _compact(session: ChatSession, argument: str) -> Next | None:
    if argument == "undo":
        undo_compacting(session)
        return None
    if argument:
        raise UsageError(f"/compact takes undo or no argument, not '{one_line(argument, 40)}'")
    return Next(reply=begin_compacting(session), compacts=True)


@_command("stats")
def _stats(session: ChatSession, argument: str) -> None:
    if argument:
        session.info(switch_figures(session, argument))
        return
    if session.stats is None:
        name = one_line(session.engine.speculation.name)
        why = ", as --drafter none was given or no drafter could be loaded" if name == "none" else ""
        session.info(f"no answer yet; drafter: {name}{why}")
        return
    devices = session.engine.device_names
    report = format_report(session.stats, session.downgrades, devices, has_looped=session.has_looped)
    session.info(in_flags("\n".join(report)))


@_command("plan")
def _plan(session: ChatSession, argument: str) -> None:
    session.info(session.describe_plan(session.model, session.drafter))


_file_command("trace", trace_to)


@_command("multi")
def _multi(session: ChatSession, argument: str) -> None:
    session.is_multi_line = not session.is_multi_line
    send, line = ("Alt-Enter", "Enter") if session.is_multi_line else ("Enter", "Ctrl-J")
    session.info(f"{send} sends, {line} starts a new line")


@_command("show")
def _show(session: ChatSession, argument: str) -> Next:
    if here := _OTHER_NAMES["views"].get(argument):
        raise UsageError(f"/show changes how answers are shown; {here}")
    if argument not in VIEWS:
        raise UsageError(f"/show takes one of {', '.join(VIEWS)}; now it is {session.view}")
    session.view = argument
    if not session.answer:
        session.info(f"answers are shown like this from now on: {argument}")
    return Next(shows_last=bool(session.answer))


@_command("exit")
def _exit(session: ChatSession, argument: str) -> Next:
    return Next(is_exit=True)
