"""A chat without a terminal: what commands change and report, and the lines about drafting."""

import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from rich.console import Console
from rule_chat import RuleEngine
from scripted import scripted_engine

from edgespec import EdgeSpecError, Message, ModelError, Preset, SamplingParams, UsageError, load
from edgespec.chat import clipboard
from edgespec.chat.clipboard import code_blocks, find_commands, osc52, text_to_copy
from edgespec.chat.command import NOTHING, is_command, split_command, unescape_message
from edgespec.chat.commands import COMMANDS, run_command
from edgespec.chat.compacting import SUMMARY_REQUEST, begin_compacting, compacting
from edgespec.chat.files import AutosaveFile, add_files
from edgespec.chat.loop import _follow, _obey, _print_chunks, _prompt_progress, _run, _save_regularly
from edgespec.chat.past_rounds import last_lines, show_rounds
from edgespec.chat.plain import PlainPrinter, Waiting, is_plain
from edgespec.chat.printer import OriginPrinter, ThinkingPrinter, TokenTexts
from edgespec.chat.session import ChatSession
from edgespec.chat.settings import apply_setting
from edgespec.chat.status import Status, format_answer, format_report, format_status, reason_off
from edgespec.decoding.tree import NO_DRAFT
from edgespec.draft.costs import Gain
from edgespec.engine.answers import Chunk, Stats, Tally
from edgespec.engine.conversation import Conversation
from edgespec.engine.transcript import Round, Transcript
from edgespec.errors import MemoryExhausted
from edgespec.system.clock import VirtualClock
from edgespec.system.signals import Leave, catch_ctrl_c


@pytest.fixture
def session(tiny_model: Path, tmp_path: Path) -> Iterator[ChatSession]:
    def open_engine(model: str, drafter: str | None) -> object:
        return load(model, drafter=drafter, deterministic=True, home=tmp_path)

    chat = ChatSession(
        conversation=open_engine(str(tiny_model), "suffix").chat(max_tokens=12),  # type: ignore[attr-defined]
        model=str(tiny_model),
        drafter="suffix",
        open_engine=open_engine,  # type: ignore[arg-type]
        describe_plan=lambda model, drafter: f"plan of {Path(model).name} with {drafter}",
        info=lambda line: None,
        autosave=AutosaveFile(tmp_path / "chats", pytest.fail),
    )
    yield chat
    chat.engine.close()


def output(session: ChatSession, command: str) -> str:
    lines: list[str] = []
    session.info = lines.append
    run_command(session, command)
    return "\n".join(lines)


def answer(session: ChatSession, text: str) -> str:
    reply = session.conversation.stream(text)
    session.record(tuple(reply))
    return reply.text


def test_every_command_is_explained_and_does_something(session: ChatSession) -> None:
    listed = output(session, "/help all")
    assert all(f"/{command.name}" in listed for command in COMMANDS)
    assert run_command(session, "/exit").is_exit
    assert run_command(session, "/quit").is_exit


def test_the_first_page_of_help_stays_on_a_small_screen(session: ChatSession) -> None:
    lines = output(session, "/help").splitlines()
    assert len(lines) <= 18
    assert max(map(len, lines)) < 80
    named = re.findall(r"/([a-z]+)", "\n".join(lines))
    assert len(named) > 15
    assert {command.name for command in COMMANDS}.issuperset(named)
    assert "/help all" in lines[-1]


def test_help_explains_one_command(session: ChatSession) -> None:
    assert output(session, "/help retry") == "/retry  answer the last message again, with the next seed"
    assert output(session, "/help attach").splitlines()[-1] == "for example: /attach notes.md src/*.py"
    assert output(session, "/help /save").splitlines()[1].startswith("/save! FILE")
    assert output(session, "/help export").endswith("/export talk.md"), "which it takes"
    assert "/exit" in output(session, "/help bye")
    with pytest.raises(UsageError, match="there is no command /nope; /help all"):  # like /open in letters alone
        run_command(session, "/help nope")
    with pytest.raises(UsageError, match=r"no command /modle; did you mean /model\? /help all"):
        run_command(session, "/help modle")


def test_a_question_mark_alone_asks_for_help(session: ChatSession) -> None:
    lines: list[str] = []
    session.info = lines.append
    _obey(session, "?", NOTHING)
    assert "/help all" in lines[-1]
    assert session.conversation.messages == ()


def test_code_that_is_pasted_keeps_its_form(session: ChatSession) -> None:
    typed = ["    if x:\n        y()\n    z()\n"]
    user: Any = SimpleNamespace(ask=lambda *given: typed.pop(0) if typed else " /exit")
    assert _run(session, user) == 0
    assert session.conversation.messages[0].content == "if x:\n    y()\nz()"


def test_errors_of_a_chat_name_flags(session: ChatSession) -> None:
    def refuse(model: str, drafter: str | None) -> Any:
        raise UsageError("too long; give a smaller --context N")

    lines, typed = list[str](), ["/model other"]
    session.info, session.open_engine = lines.append, refuse
    user: Any = SimpleNamespace(ask=lambda *given: typed.pop(0) if typed else "/exit")
    assert _run(session, user) == 0
    assert "edgespec: too long; give a smaller --context N" in lines


def test_an_edited_message_that_was_sent_is_no_edit_any_more_when_its_answer_fails(
    session: ChatSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(edit: str, what: str) -> str:
        edits.append(edit)
        return lines.pop(0) if lines else "/exit"

    def fail(*given: object) -> None:
        raise MemoryExhausted("no room")

    answer(session, "the in")
    monkeypatch.setattr("edgespec.chat.loop._print_reply", fail)
    edits, lines = list[str](), ["/edit", "an on"]
    user: Any = SimpleNamespace(ask=ask)
    assert _run(session, user) == 0
    assert edits == ["", "the in", ""]
    assert session.conversation.messages[0].content == "an on"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("/set system be brief", "/system TEXT"),
        ("/set format json", "--schema FILE"),
        ("/set parameter top_k 4", "/set NAME VALUE"),
        ("/set num-ctx 4096", "--context"),
        ("/set repeat-penalty 1.1", "/set repetition_penalty N"),
        ("/temperature 0.7", "/set temperature changes that"),
        ("/temp 0.7", "/set temperature changes that"),
        ("/num_ctx 4096", "--context"),
        ("/verbose", "/stats on"),
        ("/show info", "/model describes"),
        ("/show modelfile", "edgespec preset show"),
        ("/load smollm2-135m", "/model smollm2-135m"),
    ],
)
def test_words_of_other_programs_lead_to_those_here(session: ChatSession, typed: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        run_command(session, typed)
    assert hint in str(raised.value)


def test_load_of_a_model_of_this_machine_leads_to_model(
    session: ChatSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="there is no file mine; /model mine switches"):
        run_command(session, "/load mine")


def test_load_of_a_saved_chat_leads_to_open(session: ChatSession, tmp_path: Path) -> None:
    answer(session, "Hi")
    output(session, "/name plans")
    with pytest.raises(UsageError, match="there is no file plans; /open plans continues the saved chat 'plans'"):
        run_command(session, "/load plans")
    with pytest.raises(UsageError, match=r"cannot read .*other"):
        run_command(session, f"/load {tmp_path / 'other'}")


@pytest.mark.parametrize("command", ["/undo 2", "/retry in French", "/clear all"])
def test_what_a_command_does_not_take_is_refused(session: ChatSession, command: str) -> None:
    answer(session, "Hi")
    with pytest.raises(UsageError, match=r"takes nothing else, not '.*'; nothing was done"):
        run_command(session, command)
    assert len(session.conversation.rounds) == 1


@pytest.mark.parametrize("command", ["/save FILE\nfrom a text", "/clear\nmore", "/delete! 1\n2"])
def test_a_text_of_several_lines_is_no_command_that_takes_one(
    session: ChatSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    answer(session, "Hi")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match="takes one line, not 2; nothing was done"):
        run_command(session, command)
    assert sorted(tmp_path.iterdir()) == before
    assert len(session.conversation.rounds) == 1


def test_go_without_an_answer_says_what_to_do_here(session: ChatSession) -> None:
    with pytest.raises(UsageError, match="nothing to branch from yet"):
        run_command(session, "/branch 1")
    with pytest.raises(UsageError, match="no answer to continue; send a message"):
        run_command(session, "/go")


@pytest.mark.parametrize("name", ["12", "-x", "-", "a" * 61, "a\nb"])
def test_a_name_is_one_that_can_be_given_to_continue(session: ChatSession, name: str) -> None:
    answer(session, "Hi")
    with pytest.raises(UsageError, match="a name has one line"):
        run_command(session, f"/name {name}")
    assert "--continue 'it is' opens" in output(session, "/name it is")


def test_a_name_that_cannot_be_saved_is_no_promise(session: ChatSession, tmp_path: Path) -> None:
    answer(session, "Hi")
    (tmp_path / "file").touch()
    session.autosave = AutosaveFile(tmp_path / "file", lambda line: None)
    with pytest.raises(UsageError, match="this chat is called mine, but it is not saved"):
        run_command(session, "/name mine")


def test_of_chats_with_one_name_none_is_deleted_by_it(session: ChatSession) -> None:
    answer(session, "Hi")
    assert session.autosave
    folder = session.autosave.folder
    message = Message("user", "Hi")
    for stem in ("a", "b"):
        Transcript(messages=(message,), name="same").save(folder / f"{stem}.jsonl")
        os.utime(folder / f"{stem}.jsonl", (4e9, 4e9))
    with pytest.raises(UsageError, match=r"2 chats are called same; use a number from /chats instead: 1 \(2096"):
        run_command(session, "/delete! same")
    assert "deleted 'same'" in output(session, "/delete! 1")
    assert len([*folder.iterdir()]) == 2


@pytest.mark.parametrize("command", ["load", "save", "export"])
def test_a_file_that_nothing_can_have_as_a_name_does_not_end_the_chat(session: ChatSession, command: str) -> None:
    with pytest.raises(EdgeSpecError):
        run_command(session, f"/{command} {'x' * 300}.md")


def test_commands_have_the_names_that_other_programs_give_them(session: ChatSession) -> None:
    assert "a new conversation" in output(session, "/new")
    assert "/attach FILE" in output(session, "/file")


@pytest.mark.parametrize(
    ("text", "command", "message"),
    [("/help", True, "/help"), ("//help", False, "/help"), ("a /help", False, "a /help"), ("/", True, "/")],
)
def test_commands_begin_with_a_slash_and_messages_with_two(text: str, command: bool, message: str) -> None:
    assert is_command(text) == command
    assert unescape_message(text) == message


def test_commands_are_split() -> None:
    assert split_command("/system  be\n brief ") == ("system", "be\n brief")
    assert split_command("/") == ("", "")


def test_unknown_commands_are_reported_with_the_nearest(session: ChatSession) -> None:
    with pytest.raises(UsageError, match="did you mean /model"):
        run_command(session, "/modle x")
    assert session.conversation.messages == ()


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [
        ("temperature 0.8", "temperature", 0.8),
        ("temperature=0.8", "temperature", 0.8),
        ("top-k 40", "top_k", 40),
        ("seed 7", "seed", 7),
    ],
)
def test_set_changes_sampling(session: ChatSession, setting: str, name: str, value: float) -> None:
    assert output(session, f"/set {setting}") == f"{name} {value}"
    assert session.conversation.sampling == replace(SamplingParams(), **{name: value})


def test_set_changes_limits_and_shows_all(session: ChatSession) -> None:
    for setting in ("max_tokens 3", "stop a b", "overflow drop-oldest"):
        output(session, f"/set {setting}")
    conversation = session.conversation
    assert (conversation.max_tokens, conversation.stop, conversation.overflow) == (3, ("a b",), "drop-oldest")
    shown = output(session, "/set")
    assert "max_tokens 3\nstop 'a b'\noverflow drop-oldest" in shown
    output(session, "/set max_tokens -1")
    output(session, "/set stop -")
    assert (conversation.max_tokens, conversation.stop) == (None, ())


@pytest.mark.parametrize(
    ("typed", "stop"),
    [('"###"', "###"), (r'"\n\n"', "\n\n"), ("a=b", "a=b"), ("= x y", "x y"), ('"a" b', '"a" b'), ("'a'", "'a'")],
)
def test_a_stop_string_is_one_as_it_is_or_in_quotes(session: ChatSession, typed: str, stop: str) -> None:
    output(session, f"/set stop {typed}")
    assert session.conversation.stop == (stop,)


@pytest.mark.parametrize(
    "setting",
    [
        "temperature hot",
        'stop ""',
        "temperature -1",
        "top_p 2",
        "top_k 1.5",
        "max_tokens 0",
        "max_tokens none",
        "overflow ask",
        "x 1",
    ],
)
def test_set_refuses_what_cannot_be_meant_and_changes_nothing(session: ChatSession, setting: str) -> None:
    before = output(session, "/set")
    with pytest.raises(UsageError, match=setting.split()[0].split("_")[0]):
        run_command(session, f"/set {setting}")
    assert output(session, "/set") == before


def test_set_without_a_name_says_what_may_be_set(session: ChatSession) -> None:
    with pytest.raises(UsageError, match="there is no setting ''; known are temperature"):
        run_command(session, "/set =")


def test_undo_retry_and_edit(session: ChatSession) -> None:
    first = answer(session, "the in")
    assert run_command(session, "/edit").edit == "the in"
    reply = run_command(session, "/retry").reply
    assert reply is not None
    assert [*reply]
    assert reply.text == first  # greedy
    assert "removed: the in" in output(session, "/undo")
    for command in ("/undo", "/edit", "/retry"):
        with pytest.raises(UsageError, match="nothing"):
            run_command(session, command)


def test_save_and_load(session: ChatSession, tmp_path: Path) -> None:
    answer(session, "the in")
    messages = session.conversation.messages
    assert "2 messages saved" in output(session, f"/save {tmp_path / 'a talk.jsonl'}")
    output(session, "/clear")
    assert session.conversation.messages == ()
    assert "your last message: 'the in'" in output(session, f"/load {tmp_path / 'a talk.jsonl'}")
    assert session.conversation.messages == messages
    assert len([*(tmp_path / "chats").iterdir()]) == 2  # what was cleared stays
    (tmp_path / "bad").write_text("no talk")
    for command in (f"/load {tmp_path / 'bad'}", "/load", f"/load {tmp_path / 'missing'}"):
        with pytest.raises(UsageError):
            run_command(session, command)
    assert session.conversation.messages == messages


@pytest.mark.parametrize("command", ["save", "export"])
def test_only_a_file_of_this_conversation_is_written_again(
    session: ChatSession, tmp_path: Path, command: str
) -> None:
    path = tmp_path / "talk.md"
    answer(session, "the in")
    for _ in range(2):
        assert "2 messages" in output(session, f"/{command} {path}")
    written = path.read_bytes()
    output(session, "/clear")
    with pytest.raises(UsageError, match=rf"exists already and was not replaced; to replace it: /{command}! "):
        run_command(session, f"/{command} {path}")
    assert path.read_bytes() == written
    assert "0 messages" in output(session, f"/{command}! {path}")


def test_another_drafter_keeps_the_conversation_and_a_bad_one_the_engine(session: ChatSession) -> None:
    answer(session, "the in")
    messages = session.conversation.messages
    assert "drafter: none" in output(session, "/drafter none")
    assert session.conversation.messages == messages
    engine = session.engine
    for command in ("/drafter no-such-model", "/model no-such-model"):
        with pytest.raises(ModelError):
            run_command(session, command)
    assert session.engine is engine
    assert session.drafter == "none"
    assert answer(session, "an on")
    assert "a context of 700" in output(session, "/model")


def test_where_two_do_not_fit_the_present_one_goes_first_and_comes_back_if_need_be(session: ChatSession) -> None:
    open_engine = session.open_engine
    asked: list[str | None] = []

    def tight(model: str, drafter: str | None) -> object:
        asked.append(drafter)
        if len(asked) == 1 or drafter == "huge":
            raise MemoryExhausted("no room")
        return open_engine(model, drafter)

    session.open_engine = tight  # type: ignore[assignment]
    assert "drafter: none" in output(session, "/drafter none")
    assert asked == ["none", "none"]
    with pytest.raises(MemoryExhausted):
        run_command(session, "/drafter huge")
    assert asked[2:] == ["huge", "huge", "none"]
    assert answer(session, "the in")


def test_system_context_plan_trace_and_multi(session: ChatSession, tmp_path: Path) -> None:
    assert output(session, "/system") == "no system message"
    assert output(session, "/system the in") == "system message: the in"
    session.conversation.stream("an on").close()
    assert "sent to the model: 1 message\n" in output(session, "/context")
    assert "the first 1 of 1 message;" in output(session, "/branch")
    session.conversation.undo()
    answer(session, "an on")
    assert session.conversation.messages[0].content == "the in"
    context = output(session, "/context")
    assert f"{session.conversation.num_tokens} of {tiny.CONTEXT} tokens" in context
    assert "sent to the model: 2 messages" in context
    assert output(session, "/plan") == f"plan of {Path(session.model).name} with suffix"
    assert "saved to" in output(session, f"/trace {tmp_path / 'trace.json'}")
    assert (tmp_path / "trace.json").stat().st_size > 100
    assert output(session, "/multi") == "Alt-Enter sends, Enter starts a new line"
    assert session.is_multi_line
    assert output(session, "/multi") == "Enter sends, Ctrl-J starts a new line"  # Windows Terminal keeps Alt-Enter
    assert output(session, "/system -") == "no system message"


def test_show_takes_its_views_alone(session: ChatSession) -> None:
    assert run_command(session, "/show drafted") == run_command(session, "/show plain")
    assert "from now on: plain" in output(session, "/show plain")
    answer(session, "the in")
    assert run_command(session, "/show drafted").shows_last
    with pytest.raises(UsageError, match="markdown, plain, drafted"):
        run_command(session, "/show colours")


def test_copy_finds_the_last_answer_its_code_or_all(session: ChatSession, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr("edgespec.chat.commands.copy", lambda text, is_terminal: taken.append(text) or "a test")
    with pytest.raises(UsageError, match="no answer"):
        run_command(session, "/copy")
    text = answer(session, "the in")
    assert output(session, "/copy") == f"{len(text)} characters copied with a test"
    with pytest.raises(UsageError, match="no code block"):
        run_command(session, "/copy code")
    run_command(session, "/copy all")
    assert taken == [text, f"user: the in\n\nassistant: {text}"]
    assert code_blocks("a\n```py\nx = 1\n\ny\n```\nb\n~~~\nz") == ["x = 1\n\ny\n", "z\n"]


def test_the_clipboard_is_the_desktops_own_and_over_ssh_the_terminals() -> None:
    assert [
        command.split()[0] for command in find_commands({"WAYLAND_DISPLAY": "w", "DISPLAY": ":0"}, "linux")
    ] == [*("wl-copy", "xclip", "xsel")]
    assert find_commands({}, "darwin") == ["pbcopy"]
    assert find_commands({"SSH_CONNECTION": "x", "DISPLAY": ":0"}, "linux") == find_commands({}, "linux") == []
    assert osc52("hé\x1b") == "\x1b]52;c;aMOpGw==\x07"


@pytest.mark.skipif(sys.platform == "win32", reason="the imitated PowerShell is a shell script")
def test_windows_copies_the_text_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the byte order mark by which its clip knows Unicode, and which clip copies too."""
    for name in ("powershell", "clip"):
        (tmp_path / name).write_text(f"#!/bin/sh\ncat > {tmp_path}/copied\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (command,) = find_commands({}, "win32")
    assert clipboard._run(command.split(), "é = 1")
    assert (tmp_path / "copied").read_text(encoding="utf-8") == "é = 1"


@pytest.mark.parametrize("fence", ["```", "````", "~~~"])
def test_the_end_of_a_long_answer_begins_in_the_code_that_it_is_from(fence: str) -> None:
    text = f"a\n{fence}python\nx = 1\n```not the end\n\ty = 2\n{fence}\nend"
    assert last_lines(text, 3) == f"…\n\n{fence}python\n\ty = 2\n{fence}\nend"
    assert last_lines(text, 1) == "…\n\nend"
    assert last_lines(text, 7) == text


def test_a_message_of_before_has_the_styles_that_the_console_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one of Windows prints the codes of terminals as characters."""
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("edgespec.chat.printer.console_of", lambda file: Console(file=file, color_system=None))
    show_rounds([Round("Hi\n\x1b[2J", None)], lambda line: None)
    assert stderr.getvalue() == "\n1 > Hi\n    \\x1b[2J\n\n"


def test_stats_report_what_drafts_and_why_not(session: ChatSession) -> None:
    assert output(session, "/stats") == "no answer yet; drafter: suffix"
    answer(session, "the in")
    report = output(session, "/stats")
    assert "tokens per pass" in report
    assert "model on cpu" in report
    assert "suffix" in report


def stats(**changed: object) -> Stats:
    tallied = Tally().stats(drafter="suffix", draft_length="auto", target_device="cpu", drafter_device=None)
    return replace(tallied, **changed)  # type: ignore[arg-type]


SOURCES = {
    "none": {"rounds": 3, "drafted": 0, "verified": 0, "accepted": 0},
    "suffix": {"rounds": 2, "drafted": 8, "verified": 8, "accepted": 6},
}
DRAFTED = stats(
    num_drafted=8,
    num_decoded=8,
    acceptance_rate=0.75,
    sources=SOURCES,
    gain=Gain(1.5),
    decode_tokens_per_second=20.0,
)
STATUS = Status(model="m", devices=("cpu", "cpu"), drafter="suffix", num_context=9, context_length=90)


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (stats(drafter="none"), "--drafter none"),
        (stats(undrafted={"no drafter had a guess": 5, "other": 2}), "no drafter had a guess"),
        (stats(undrafted={"other": 2}, downgrades=("steps down",)), "steps down"),
        (stats(num_emitted=2), "too short"),
        (stats(), "nothing was written"),
    ],
)
def test_why_drafting_is_off(of: Stats, reason: str) -> None:
    assert reason in reason_off(of)
    assert reason in format_report(of, [], ("cpu", "cpu"))[0]
    assert reason in format_status(replace(STATUS, stats=of), 200)


def test_lines_of_an_answer_that_was_drafted() -> None:
    assert format_answer(DRAFTED, "length") == [
        "20.0 tokens/s",
        "drafting saved 0.2 s",
        "stopped at the token limit (max-tokens); /go continues",
    ]
    lost, alike, unknown = (replace(DRAFTED, gain=gain) for gain in (Gain(0.7), Gain(1.05), None))
    assert [format_answer(each, "stop")[1] for each in (lost, alike, unknown)] == [
        "drafting lost 0.1 s",
        "drafting made little difference",
        "drafting is on (more: /stats)",
    ]
    lines = format_report(DRAFTED, ["given\x1b up"], ("cpu", "cpu"))
    assert lines[0].startswith(
        "drafting helped: about 1.50 times the speed of plain decoding in this answer (another"
    )
    assert "suffix: 8 tokens drafted in 2 passes, 6 accepted (75%)" in lines
    assert lines[-1] == "changed in this chat: given\\x1b up"


@pytest.mark.parametrize("columns", [1, 10, 20, 40, 80, 200])
def test_the_line_below_the_input_fits(columns: int) -> None:
    line = format_status(replace(STATUS, stats=DRAFTED), columns)
    assert len(line) <= columns
    assert line.startswith(("m on cpu" if columns > 23 else "context 9/90")[: columns - 1])
    if columns == 200:
        assert line == "m on cpu · context 9/90 · suffix: 75% of guesses right · 1.50 times as fast · 20 tokens/s"


def test_figures_come_before_a_long_name_where_columns_are_few() -> None:
    status = replace(STATUS, model="smollm2-135m-instruct", stats=DRAFTED)
    assert format_status(status, 30) == "context 9/90 · 20 tokens/s"
    assert format_status(status, 60).startswith("smollm2-135m-instruct on cpu · context 9/90")


def test_a_full_context_is_said_to_be_full() -> None:
    line = format_status(replace(STATUS, num_context=97), 80)
    assert "context 90/90, full" in line
    assert "97" not in line


def test_what_is_set_already_is_not_advised() -> None:
    assert "/set overflow drop-oldest" in format_answer(DRAFTED, "context")[-1]
    assert "/set overflow" not in format_answer(DRAFTED, "context", drops_oldest=True)[-1]


def test_texts_of_tokens_join_to_the_answer_with_their_origins(tiny_model: Path) -> None:
    with load(tiny_model, drafter="suffix", draft_length=4, deterministic=True) as engine:
        sampling = SamplingParams(temperature=0.9, seed=3)
        whole = engine.generate("the in the an", sampling=sampling, max_tokens=60).text
        stop = whole[25:28]
        chunks = [*engine.stream("the in the an", sampling=sampling, max_tokens=60, stop=stop)]
        texts = TokenTexts(engine.tokenizer)
        pieces = [piece for chunk in chunks for piece in texts.push(chunk)]
        assert "".join(text for text, _ in pieces) == "".join(chunk.text for chunk in chunks)
        assert {origin for _, origin in pieces} <= {"target", "suffix"}


class _Stream(io.StringIO):
    def __init__(self, is_terminal: bool = True) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def test_tokens_are_coloured_by_origin_with_a_legend() -> None:
    stream = _Stream()
    console = Console(file=stream, force_terminal=True, color_system="standard", width=80)
    pieces = ["a", " b", " c", "\n世界 "]
    tokenizer = SimpleNamespace(
        decode=lambda tokens, shown: "".join(pieces[token] for token in tokens),
        channel_marks=(),
        think_texts={},
        ends_in_bytes=lambda tokens: False,
    )
    printer = OriginPrinter(console, tokenizer)  # type: ignore[arg-type]
    origins = ("target", "suffix", "suffix", "my-model")
    printer.push(Chunk(text="".join(pieces), token_ids=(0, 1, 2, 3), origins=origins))
    printer.end()
    assert "\x1b[32m b\x1b[0m\x1b[32m c\x1b[0m" in stream.getvalue()
    assert "target 25%" in stream.getvalue()
    assert "suffix 50%" in stream.getvalue()
    assert "my-model 25%" in stream.getvalue()


@pytest.mark.parametrize(
    ("is_terminal", "environment", "plain"),
    [
        (True, {"TERM": "xterm"}, False),
        (False, {"TERM": "xterm"}, True),
        (True, {"TERM": "dumb"}, True),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, True),
        (True, {"TERM": "xterm", "NO_COLOR": ""}, False),
        (False, {"FORCE_COLOR": "1"}, False),
    ],
)
def test_who_gets_text_alone(is_terminal: bool, environment: dict[str, str], plain: bool) -> None:
    assert is_plain(_Stream(is_terminal), environment) == plain


def test_a_pipe_gets_bytes_as_they_are_and_a_terminal_escapes() -> None:
    for is_terminal, shown in [(True, "a\\x1b[1m\n"), (False, "a\x1b[1m\n")]:
        stream = _Stream(is_terminal)
        printer = PlainPrinter(stream)
        printer.push(Chunk(text="a\x1b[1m", token_ids=()))
        printer.push(Chunk(text="", token_ids=()))
        printer.end()
        assert stream.getvalue() == shown


@pytest.mark.skipif(
    sys.platform == "win32", reason="os.kill ends the process on Windows instead of sending SIGINT"
)
def test_ctrl_c_stops_once_and_leaves_twice() -> None:
    stopped: list[bool] = []
    clock = VirtualClock()
    before = signal.getsignal(signal.SIGINT)
    with catch_ctrl_c(lambda: stopped.append(True), clock) as was_pressed:
        assert not was_pressed()
        os.kill(os.getpid(), signal.SIGINT)
        assert was_pressed()
        clock.now = 0.2  # the same once more, as passed on by another process
        os.kill(os.getpid(), signal.SIGINT)
        clock.now = 0.4
        with pytest.raises(Leave):
            os.kill(os.getpid(), signal.SIGINT)
    assert stopped == [True]
    assert signal.getsignal(signal.SIGINT) == before


def test_in_another_thread_ctrl_c_is_left_alone() -> None:
    seen: list[bool] = []

    def work() -> None:
        with catch_ctrl_c(pytest.fail) as was_pressed:
            seen.append(was_pressed())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_what_is_shown_of_an_answer_is_on_the_disk_each_second(
    session: ChatSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(1000))
    monkeypatch.setattr("edgespec.chat.loop.monotonic", lambda: next(seconds) / 4)
    monkeypatch.setattr("edgespec.chat.loop._MAX_SAVE_SHARE", 1.0)
    session.conversation.max_tokens = 150
    assert session.autosave is not None
    shown, saved = "", []
    for chunk in _save_regularly(session, session.conversation.stream("the in")):
        if session.autosave.path:
            saved.append(Transcript.read(session.autosave.path))
            assert shown.startswith(saved[-1].messages[1].content)
            assert saved[-1].cut_short == ((1, "cancelled"),)
        shown += chunk.text
    texts = [each.messages[1].content for each in saved]
    assert len(texts) > len(set(texts)) >= 3
    session.save()
    assert Transcript.read(session.autosave.path or Path()) == session.conversation.transcript(session.model)
    assert len([*session.autosave.path.parent.iterdir()] if session.autosave.path else []) == 1


def test_progress_counts_what_the_cache_held_before(session: ChatSession) -> None:
    answer(session, "the in the an " * 8)
    # So long that its passes are not over before the question, when its cache is another's.
    with session.conversation.stream("the in", max_tokens=None) as reply:
        assert _prompt_progress(reply) == ""
        next(reply)
        num = reply.prompt_tokens
        assert num > 32
        assert _prompt_progress(reply) == f"reading the prompt, {num} of {num} tokens"


def test_progress_counts_what_was_run_where_the_cache_does_not_say_what_it_holds(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of a target in a static form does not say it."""
    monkeypatch.setattr("edgespec.engine.target_caches._held_tokens", lambda decoder: NO_DRAFT.tokens)
    with load(tiny_model, drafter="lookahead", deterministic=False) as engine:
        engine.generate("the in the an", max_tokens=20)
        with engine.chat().stream("the in the an " * 8) as reply:
            assert _prompt_progress(reply) == ""
            next(reply)
            num = reply.prompt_tokens
            assert _prompt_progress(reply) == f"reading the prompt, {num} of {num} tokens"


def test_engine_chat_is_a_conversation(session: ChatSession) -> None:
    assert isinstance(session.engine.chat(), Conversation)


def test_progress_is_shown_on_a_terminal_and_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("edgespec.chat.plain._PROGRESS_S", 0.01)
    screen, was_asked = _Stream(), threading.Event()

    def progress() -> str:
        was_asked.set()
        return "reading"

    with Waiting(screen, progress):
        assert was_asked.wait(60)
    written = screen.getvalue()
    assert written.startswith("…\r \r… reading")
    assert written.endswith("… reading\r         \r")
    pipe = _Stream(is_terminal=False)
    with Waiting(pipe, progress):
        pass
    assert pipe.getvalue() == ""


def test_a_summary_that_is_longer_than_the_conversation_changes_nothing(session: ChatSession) -> None:
    said: list[str] = []
    session.info = said.append
    for text in ("the", "in"):
        answer(session, text)
    session.conversation.retry().completion()
    before = session.conversation.messages
    session.conversation.max_tokens = 120
    chunks = [*begin_compacting(session)]
    with compacting(session):
        session.record((*chunks[:-1], replace(chunks[-1], finish_reason="stop")))
    assert "nothing has changed: the summary and your last message would take" in said[-1]
    assert (session.conversation.messages, session.conversation._now.num_tries) == (before, 1)


def ruled(folder: Path, script: dict[str, Any]) -> ChatSession:
    """A chat that answers by a script and is saved in a folder, with two long messages in it."""
    engine: Any = RuleEngine({"long " * 50: ["Well."], **script})
    session = ChatSession(
        conversation=Conversation(engine),
        model="rule",
        drafter="none",
        open_engine=lambda model, drafter: engine,
        describe_plan=lambda model, drafter: "",
        info=lambda line: None,
        autosave=AutosaveFile(folder, lambda line: None),
    )
    for _ in range(2):
        answer(session, "long " * 50)
    return session


@pytest.mark.parametrize(("command", "name"), [("export", "talk.md"), ("save", "talk.jsonl")])
def test_a_file_that_was_changed_since_it_was_written_stays_as_it_is(
    tmp_path: Path, command: str, name: str
) -> None:
    session, path = ruled(tmp_path / "chats", {}), tmp_path / name
    output(session, f"/{command} {path}")
    written = path.read_bytes()
    output(session, f"/{command} {path}")
    assert path.read_bytes() == written
    path.write_bytes(written + b"my own notes")
    with pytest.raises(
        UsageError, match=f"{name} was changed by another program and was not replaced; .* /{command}! "
    ):
        run_command(session, f"/{command} {path}")
    assert path.read_bytes() == written + b"my own notes"
    output(session, f"/{command}! {path}")
    assert path.read_bytes() == written


def test_messages_that_the_model_cannot_be_sent_leave_a_status(tiny_model: Path, tmp_path: Path) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + tiny.TEMPLATE
    with scripted_engine(tiny_model, tmp_path / "model", lambda prompt: "Hello.", refuses) as engine:
        session = ruled(tmp_path / "chats", {})
        session.conversation = engine.chat()
        assert session.status().context == "context 0/4000"
        output(session, "/system Be brief.")
        assert session.status().context == "context ?/4000"
        with pytest.raises(UsageError, match="refuses the conversation"):
            _obey(session, "hi", NOTHING)
        output(session, "/system -")
        assert answer(session, "hi") == "Hello."


def test_the_switch_of_reasoning_is_left_with_a_model_that_has_none(tiny_model: Path, tmp_path: Path) -> None:
    thinks = tiny.TEMPLATE + "{% if enable_thinking %}{% endif %}"
    with scripted_engine(tiny_model, tmp_path / "model", lambda prompt: "Hello.", thinks) as engine:
        session = ruled(tmp_path / "chats", {})
        session.conversation = engine.chat()
        output(session, "/think on")
        session.open_engine = lambda model, drafter: scripted_engine(
            tiny_model, tmp_path / "other", lambda prompt: "Hello.", tiny.TEMPLATE
        )
        assert "tiny has no switch for its reasoning" in output(session, "/model other")
        assert answer(session, "hi") == "Hello."
        session.engine.close()


def test_an_answer_is_shown_again_with_what_it_was_given_to_begin_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = ruled(tmp_path, {"why|It": [" is", None], "why|It is": [" so."], "why|Or": [" not."]})

    def shown(*lines: str) -> str:
        for line in lines:
            _follow(session, _obey(session, line, NOTHING))
        capsys.readouterr()
        _follow(session, run_command(session, "/show plain"))
        return capsys.readouterr().out

    assert shown("/prefill It", "why") == "It is\n"
    assert shown("/go") == "It is so.\n"
    _obey(session, "Or", run_command(session, "/answer"))
    assert shown() == "Or\n"
    assert shown("/go") == "Or not.\n"


def test_reasoning_that_was_given_is_shown_apart_from_the_answer() -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=60)
    printer = ThinkingPrinter(PlainPrinter(screen), console, "show", is_open=True)
    printer.push(Chunk(text="it is so\n</think>\n\nFour", token_ids=()))
    printer.end()
    assert screen.getvalue() == "it is so\n\nFour\n"


def test_an_end_mark_that_an_answer_is_given_to_begin_with_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, were_open = ruled(tmp_path, {}), list[bool]()

    def printer(*given: object, is_open: bool) -> PlainPrinter:
        were_open.append(is_open)
        return PlainPrinter(io.StringIO())

    monkeypatch.setattr("edgespec.chat.loop._make_printer", printer)
    open_texts = ("</think>\n\nFour", "\n</think>\n\nFour", "so\n</think>\n\nFour")
    for begun in (*open_texts, "<think>\n</think>\n\nFour", "<think>so", "Four", "\n", "<"):
        _print_chunks(session, [Chunk(text=".", token_ids=())], begun=begun)
    assert were_open == [True, True, True, *[False] * 5]


def test_a_new_conversation_begins_with_the_examples_of_the_preset(tmp_path: Path) -> None:
    session, example = ruled(tmp_path, {"hi": ["Ho."]}), ({"role": "user", "content": "a"},)
    examples = (*example, {"role": "assistant", "content": "b"})
    session.engine.preset = Preset(name="poet", model="rule", options={"system": "In verse."}, messages=examples)
    output(session, "/system In prose.")
    output(session, "/clear")
    assert answer(session, "hi") == "Ho."
    said = [message.content for message in session.conversation.messages]
    assert said == ["In prose.", "a", "b", "hi", "Ho."]
    output(session, "/system -")
    output(session, "/clear")
    assert [message.content for message in session.conversation.messages] == ["a", "b"]


def test_one_message_is_counted_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = ruled(tmp_path, {})
    for _ in range(2):
        output(session, "/clear")
        session.conversation.stream("why").close()
        session.save()
    assert "1 message saved to" in output(session, f"/save {tmp_path / 'talk'}")
    monkeypatch.setattr("edgespec.chat.saved_chats._MOST_LISTED", 2)
    listed = output(session, "/chats").splitlines()
    assert [" 1 message " in each for each in listed[:2]] == [True, True]
    assert listed[2] == "and 1 older one; /chats WORDS searches them"
    assert "with 1 message for good" in output(session, "/delete 2")
    assert "1 message; your last message: 'why'." in output(session, f"/load {tmp_path / 'talk'}")


def test_nothing_is_too_long_where_nothing_is_attached(tmp_path: Path) -> None:
    session = ruled(tmp_path, {})
    engine: Any = session.engine
    engine.context_length = 10
    reported: list[str] = []
    add_files(session, [], reported.append)
    assert (reported, session.attachments) == ([], [])


def test_compact_undo_leaves_what_another_chat_has_added_to_the_file_meanwhile(tmp_path: Path) -> None:
    session = ruled(tmp_path, {SUMMARY_REQUEST: ["In short."]})
    path, whole = session.file, session.conversation.messages
    assert path is not None
    output(session, "/name plans")
    _follow(session, run_command(session, "/compact"))
    assert session.conversation.messages != whole
    more = (Message("user", "new"), Message("assistant", "Yes."))
    other = replace(Transcript.read(path), messages=(*whole, *more))
    other.write(path)
    output(session, "/compact undo")
    assert Transcript.read(path) == other
    assert session.conversation.messages == whole
    assert session.file != path
    assert session.name == "plans (2)"
    assert Transcript.read(session.file or Path()).messages == whole


def test_each_summary_can_be_taken_back(tmp_path: Path) -> None:
    session, states = ruled(tmp_path, {SUMMARY_REQUEST: ["In short."], "short": ["Yes."]}), list[Any]()
    for _ in range(2):
        states.append((session.conversation.messages, session.file))
        _follow(session, run_command(session, "/compact"))
        answer(session, "long " * 50)
    assert "the conversation before the last summary is back: 6 messages; /compact undo" in output(
        session, "/compact undo"
    )
    assert (session.conversation.messages, session.file) == states[1]
    assert "the whole conversation is back: 4 messages" in output(session, "/compact undo")
    assert (session.conversation.messages, session.file) == states[0]
    with pytest.raises(UsageError, match="was not shortened"):
        run_command(session, "/compact undo")


def test_a_full_context_is_summed_up_without_the_oldest_messages(tmp_path: Path) -> None:
    session, lines = ruled(tmp_path, {SUMMARY_REQUEST: ["In short."]}), list[str]()
    session.engine.context_length = 120  # type: ignore[misc]
    session.info, num_before = lines.append, session.conversation.num_tokens
    _follow(session, run_command(session, "/compact"))
    assert "the context is full: the 2 oldest messages are no longer sent to the model" in lines
    assert session.conversation.rounds[0].answer == "In short."
    assert session.conversation.num_tokens < num_before < 120
    assert (session.conversation.overflow, session.conversation.num_dropped) == ("error", 0)
    output(session, "/compact undo")
    assert (session.conversation.num_tokens, session.conversation.num_dropped) == (num_before, 0)


def test_a_summary_that_saves_no_token_changes_nothing(tmp_path: Path) -> None:
    session = ruled(tmp_path, {SUMMARY_REQUEST: ["In short."], "short": ["Yes."]})
    answer(session, "short")
    _follow(session, run_command(session, "/compact"))
    before = session.conversation.messages, session.file
    _follow(session, run_command(session, "/compact"))
    assert (session.conversation.messages, session.file) == before


def test_reasoning_that_the_prompt_has_opened_is_no_part_of_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = ruled(
        tmp_path, {"why": ["thought\n</think>\n\nword"], SUMMARY_REQUEST: ["so\n</think>\n\nIn short."]}
    )
    answer(session, "why")
    assert text_to_copy(session, "") == "word"
    output(session, "/history 1")
    assert capsys.readouterr().err.endswith("why\n\nword\n")
    _follow(session, run_command(session, "/compact"))
    assert session.conversation.rounds[0].answer == "In short."


def test_reasoning_that_goes_on_is_printed_as_reasoning(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ruled(tmp_path, {})
    were_open: list[bool] = []

    def printer(answer: PlainPrinter, console: Console, view: str, *, is_open: bool) -> PlainPrinter:
        were_open.append(is_open)
        return PlainPrinter(io.StringIO())

    monkeypatch.setattr("edgespec.chat.loop.is_plain", lambda stream: False)
    monkeypatch.setattr("edgespec.chat.printer.ThinkingPrinter", printer)
    said = "<think>\nLet me see. It is so.\n</think>\n\nFour."
    for opening in ("", "<think>\n"):
        template = f"{{{{ messages[-1].content }}}}<|im_start|>assistant\n{opening}{{% if 1 %}}{{% endif %}}"
        with scripted_engine(tiny_model, tmp_path, lambda prompt: said, template) as engine:
            session.conversation = engine.chat(max_tokens=6)
            for line in ("2 + 2?", "/go", "/show markdown", "/prefill It is", "2 + 2?", "/retry"):
                _follow(session, _obey(session, line, NOTHING))
            session.conversation.rewrite(f"{said[:-1]} is")
            _follow(session, run_command(session, "/go"))
    assert were_open == [False, True, False, False, False, False, *(True, True, True, False, True, False)]


@pytest.mark.parametrize("error", [MemoryExhausted("no room"), Leave()])
def test_a_summary_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    session = ruled(tmp_path, {})
    path, rounds = session.file, session.conversation.rounds
    assert path is not None
    saved = path.read_bytes()

    def chunks(*given: object) -> Iterator[Chunk]:
        yield Chunk(text="so far", token_ids=())
        assert path.read_bytes() == saved
        raise error

    monkeypatch.setattr(session.engine, "_chunks", chunks)
    with pytest.raises(type(error)):
        _follow(session, run_command(session, "/compact"))
    assert session.conversation.rounds == rounds
    session.save()
    assert (session.file, path.read_bytes()) == (path, saved)


@pytest.mark.parametrize(
    ("pieces", "is_stopped", "said"),
    [
        (["so"], True, "stopped"),
        (["so", None], False, "stopped at the token limit"),
        (["so", "on"] * 1000, False, "stopped: it repeated itself"),
        ([], False, "the model wrote no summary"),
    ],
)
def test_a_summary_that_is_not_finished_advises_on_no_answer_and_leaves_the_last_one(
    tmp_path: Path, pieces: list[Any], is_stopped: bool, said: str
) -> None:
    session, lines = ruled(tmp_path, {SUMMARY_REQUEST: pieces}), list[str]()
    before = session.conversation.rounds, session.answer, session.status()
    following = run_command(session, "/compact")
    session.info = lines.append
    if is_stopped:
        assert following.reply
        following.reply.cancel()
    _follow(session, following)
    assert [line for line in lines if line] == [f"{said}; nothing has changed"]
    assert (session.conversation.rounds, session.answer, session.status()) == before


def test_a_summary_is_free_text_of_any_length_whatever_answers_have_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, stated = ruled(tmp_path, {SUMMARY_REQUEST: ["In short."]}), dict[str, Any]()
    conversation, stream = session.conversation, session.engine.stream
    conversation.schema, conversation.stop, conversation.max_tokens = {"type": "integer"}, ["short"], 1
    monkeypatch.setattr(
        session.engine, "stream", lambda sent, **limits: stated.update(limits) or stream(sent, **limits)
    )
    _follow(session, run_command(session, "/compact"))
    names = ("schema", "response_format", "stop", "max_tokens", "ends_loops")
    assert [stated[name] for name in names] == [None, None, (), None, True]
    assert conversation.rounds[0].answer == "In short."
    assert (conversation.stop, conversation.max_tokens) == (["short"], 1)


def test_loops_are_ended_where_no_length_bounds_an_answer(tmp_path: Path) -> None:
    conversation = ruled(tmp_path, {}).conversation
    assert apply_setting(conversation, "loops") == "loops stop"
    assert apply_setting(conversation, "max_tokens 40")
    assert apply_setting(conversation, "loops") == "loops keep"
    assert apply_setting(conversation, "max_tokens -1")
    assert apply_setting(conversation, "loops") == "loops stop"
    assert apply_setting(conversation, "loops keep")
    assert apply_setting(conversation, "loops") == "loops keep"
