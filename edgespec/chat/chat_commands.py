"""What the commands on whole conversations do: name, list, open, delete, export, branch, and edit an answer."""

import shutil
from datetime import datetime
from pathlib import Path

from edgespec.chat.past_rounds import show_last
from edgespec.chat.saved_chats import SavedChat, delete_chat, describe_chats, find_chat, list_chats
from edgespec.chat.session import ChatSession
from edgespec.errors import UsageError
from edgespec.models.catalog import CATALOG
from edgespec.system.command_line import join_words
from edgespec.system.printable import one_line

_MOST_LISTED = 20


def name_chat(session: ChatSession, name: str) -> None:
    folder = require_folder(session)
    if not name:
        session.info(f"this chat is called {session.name}" if session.name else "this chat has no name yet")
        return
    if name.isdigit() or name.startswith("-") or one_line(name, 60) != name:
        raise UsageError("a name is one line of at most 60 characters, no number, and does not begin with -")
    others = [each for each in list_chats(folder) if each.transcript.name == name]
    if any(each.path != session.file for each in others):
        raise UsageError(f"another chat is called {name}; take another name, or /delete {name}")
    session.name = name
    session.save()
    if session.autosave and session.autosave.has_failed:
        raise UsageError(f"this chat is called {name}, but it is not saved; /save FILE saves it elsewhere")
    again = join_words(["edgespec", "chat", "--continue", name])
    session.info(f"this chat is called {name}; {again} opens it again")


def show_chats(session: ChatSession, words: str) -> None:
    chats = list_chats(require_folder(session))
    found = [(i, each) for i, each in enumerate(chats, 1) if each.contains(words.split())]
    if not found:
        session.info(f"no chat has '{one_line(words, 40)}'" if words else "there are no saved chats yet")
        return
    shown = found[:_MOST_LISTED]
    session.listed = tuple(each.path for each in chats)
    columns = shutil.get_terminal_size().columns - 1
    numbers, listed = [i for i, _ in shown], [each for _, each in shown]
    lines = describe_chats(listed, numbers, datetime.now(), session.file, columns)
    if len(found) > len(shown):
        lines.append(f"and {len(found) - len(shown)} older ones; /chats WORDS searches them")
    session.info("\n".join([*lines, "/open NAME or NUMBER continues one"]))


def open_chat(session: ChatSession, wanted: str) -> SavedChat:
    """Continue another conversation in its own file. Raises UsageError: there is none of that name."""
    if not wanted:
        raise UsageError("/open needs the name of a chat or its number; /chats lists them")
    chat = find_chat(require_folder(session), wanted, session.listed)
    session.conversation.restore(chat.transcript)
    session.open_file(chat.path, chat.transcript)
    show_last(session.conversation.rounds, session.info)
    return chat


def suggest_instead(session: ChatSession, wanted: str) -> None:
    """Raises UsageError: What is no file for /load is a saved chat, or a model of the catalogue."""
    shown = one_line(wanted, 60)
    if wanted in CATALOG:
        raise UsageError(f"there is no file {shown}; /model {shown} switches to the model of that name")
    if session.autosave is None:
        return
    try:
        chat = find_chat(session.autosave.folder, wanted, session.listed)
    except UsageError:  # there is no such chat either, which is for read_transcript to say of the file
        return
    raise UsageError(
        f"there is no file {shown}; /open {shown} continues the saved chat '{one_line(chat.title, 60)}'"
    )


def delete_saved(session: ChatSession, wanted: str, *, is_sure: bool) -> None:
    if not wanted:
        raise UsageError("/delete needs the name of a chat or its number; /chats lists them")
    folder = require_folder(session)
    chat = find_chat(folder, wanted, session.listed)
    num_named = sum(each.transcript.name == wanted for each in list_chats(folder))
    if num_named > 1:
        raise UsageError(f"{num_named} chats are called {wanted}; /delete one by its number in /chats")
    title = one_line(chat.title, 60)
    if chat.path == session.file:
        raise UsageError("this chat is open; /clear begins another one, and /delete can remove this one then")
    if not is_sure:
        num = len(chat.transcript.messages)
        session.info(f"/delete! {wanted} deletes '{title}' with {num} messages for good")
        return
    delete_chat(chat)
    session.info(f"deleted '{title}'")


def branch(session: ChatSession, argument: str) -> None:
    """Go on in a new file with the first messages and their answers; the present file stays as it is."""
    conversation = session.conversation
    num = len(conversation.rounds)
    if argument and not (argument.isascii() and argument.isdigit() and 0 < int(argument[:9]) <= num):
        raise UsageError(f"/branch takes a number of a message from 1 to {num}, as /history has them")
    if not num:
        raise UsageError("there is nothing to branch from yet")
    kept = int(argument) if argument else num
    conversation.keep(kept)
    session.start_new_file()
    session.save()
    session.info(f"a branch with the first {kept} of {num} messages; the other chat stays as it is (/chats)")


def require_folder(session: ChatSession) -> Path:
    """The folder of saved chats. Raises UsageError: this chat saves nothing."""
    if session.autosave is None:
        raise UsageError("this chat saves nothing (--no-history), so it has no list of chats")
    return session.autosave.folder
