"""A chat without a terminal: commands, what they change and what they say; and what it says of itself."""

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
from rich.console import Console

from edgespec import ModelError, SamplingParams, UsageError, load
from edgespec.answers import Chunk
from edgespec.chat import _kept
from edgespec.chat_actions import act, code_blocks
from edgespec.chat_commands import COMMANDS, as_message, is_command, taken_apart
from edgespec.chat_interrupt import Leave, stopped_by_ctrl_c
from edgespec.chat_plain import PlainPrinter, Waiting, is_plain
from edgespec.chat_printer import OriginPrinter, TokenTexts
from edgespec.chat_session import Answer, ChatSession
from edgespec.chat_status import Standing, after_answer, report_lines, standing_line, why_off
from edgespec.clipboard import osc52, tools
from edgespec.clock import VirtualClock
from edgespec.conversation import Conversation
from edgespec.errors import MemoryExhausted
from edgespec.stats import Stats, Tally
from edgespec.transcript import AutosaveFile, read_transcript

pytestmark = pytest.mark.usefixtures("one_template_process")


@pytest.fixture
def session(tiny_model: Path, tmp_path: Path) -> Iterator[ChatSession]:
    def opened(model: str, drafter: str) -> object:
        return load(model, drafter=drafter, deterministic=True, home=tmp_path)

    chat = ChatSession(
        conversation=opened(str(tiny_model), "suffix").chat(max_tokens=12),  # type: ignore[attr-defined]
        model=str(tiny_model),
        drafter="suffix",
        open_engine=opened,  # type: ignore[arg-type]
        plan=lambda model, drafter: f"plan of {Path(model).name} with {drafter}",
        say=[].append,
        autosave=AutosaveFile(tmp_path / "chats", pytest.fail),
    )
    told: list[str] = []
    chat.say = told.append
    yield chat
    chat.engine.close()


def told(session: ChatSession, command: str) -> str:
    lines: list[str] = []
    session.say = lines.append
    act(session, command)
    return "\n".join(lines)


def answer(session: ChatSession, text: str) -> str:
    reply = session.conversation.stream(text)
    chunks = tuple(reply)
    session.keep(Answer(chunks, chunks[-1]))
    return reply.text


def test_every_command_is_explained_and_does_something(session: ChatSession) -> None:
    listed = told(session, "/help")
    assert all(f"/{command.name}" in listed for command in COMMANDS)
    assert act(session, "/exit").leaves
    assert act(session, "/quit").leaves


@pytest.mark.parametrize(
    ("text", "command", "message"),
    [("/help", True, "/help"), ("//help", False, "/help"), ("a /help", False, "a /help"), ("/", True, "/")],
)
def test_commands_begin_with_a_slash_and_messages_with_two(text: str, command: bool, message: str) -> None:
    assert is_command(text) == command
    assert as_message(text) == message


def test_commands_are_taken_apart() -> None:
    assert taken_apart("/system  be\n brief ") == ("system", "be\n brief")
    assert taken_apart("/") == ("", "")


def test_unknown_commands_are_told_with_the_nearest(session: ChatSession) -> None:
    with pytest.raises(UsageError, match="did you mean /model"):
        act(session, "/modle x")
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
    assert told(session, f"/set {setting}") == f"{name} {value}"
    assert session.conversation.sampling == replace(SamplingParams(), **{name: value})


def test_set_changes_limits_and_shows_all(session: ChatSession) -> None:
    for setting in ("max_tokens 3", "stop a b", "overflow drop-oldest"):
        told(session, f"/set {setting}")
    conversation = session.conversation
    assert (conversation.max_tokens, conversation.stop, conversation.overflow) == (3, ("a b",), "drop-oldest")
    shown = told(session, "/set")
    assert "max_tokens 3\nstop 'a b'\noverflow drop-oldest" in shown
    told(session, "/set max_tokens -")
    told(session, "/set stop -")
    assert (conversation.max_tokens, conversation.stop) == (None, ())


@pytest.mark.parametrize(
    "setting", ["temperature hot", "temperature -1", "top_p 2", "top_k 1.5", "max_tokens 0", "overflow ask", "x 1"]
)
def test_set_refuses_what_cannot_be_meant_and_changes_nothing(session: ChatSession, setting: str) -> None:
    before = told(session, "/set")
    with pytest.raises(UsageError, match=setting.split()[0].split("_")[0]):
        act(session, f"/set {setting}")
    assert told(session, "/set") == before


def test_undo_retry_and_edit(session: ChatSession) -> None:
    first = answer(session, "the in")
    assert act(session, "/edit").draft == "the in"
    reply = act(session, "/retry").reply
    assert reply is not None
    assert [*reply]
    assert reply.text == first  # greedy
    assert "taken back: the in" in told(session, "/undo")
    for command in ("/undo", "/edit", "/retry"):
        with pytest.raises(UsageError, match="nothing"):
            act(session, command)


def test_save_and_load(session: ChatSession, tmp_path: Path) -> None:
    answer(session, "the in")
    messages = session.conversation.messages
    assert "2 messages written" in told(session, f"/save {tmp_path / 'a talk.jsonl'}")
    told(session, "/clear")
    assert session.conversation.messages == ()
    assert "you said last: 'the in'" in told(session, f"/load {tmp_path / 'a talk.jsonl'}")
    assert session.conversation.messages == messages
    assert len([*(tmp_path / "chats").iterdir()]) == 2  # what was cleared stays
    (tmp_path / "bad").write_text("no talk")
    for command in (f"/load {tmp_path / 'bad'}", "/load", f"/load {tmp_path / 'missing'}"):
        with pytest.raises(UsageError):
            act(session, command)
    assert session.conversation.messages == messages


def test_another_drafter_keeps_the_conversation_and_a_bad_one_the_engine(session: ChatSession) -> None:
    answer(session, "the in")
    messages = session.conversation.messages
    assert "drafts by none" in told(session, "/drafter none")
    assert session.conversation.messages == messages
    engine = session.engine
    for command in ("/drafter no-such-model", "/model no-such-model"):
        with pytest.raises(ModelError):
            act(session, command)
    assert session.engine is engine
    assert session.drafter == "none"
    assert answer(session, "an on")
    assert "a context of 700" in told(session, "/model")


def test_where_two_do_not_fit_the_present_one_goes_first_and_comes_back_if_need_be(session: ChatSession) -> None:
    opened = session.open_engine
    asked: list[str] = []

    def tight(model: str, drafter: str) -> object:
        asked.append(drafter)
        if len(asked) == 1 or drafter == "huge":
            raise MemoryExhausted("no room")
        return opened(model, drafter)

    session.open_engine = tight  # type: ignore[assignment]
    assert "drafts by none" in told(session, "/drafter none")
    assert asked == ["none", "none"]
    with pytest.raises(MemoryExhausted):
        act(session, "/drafter huge")
    assert asked[2:] == ["huge", "huge", "none"]
    assert answer(session, "the in")


def test_system_context_plan_trace_and_multi(session: ChatSession, tmp_path: Path) -> None:
    assert told(session, "/system") == "no system message"
    assert told(session, "/system the in") == "system: the in"
    answer(session, "an on")
    assert session.conversation.messages[0].content == "the in"
    context = told(session, "/context")
    assert f"{session.conversation.num_tokens} of {tiny.CONTEXT} tokens" in context
    assert "2 messages of the conversation are sent" in context
    assert told(session, "/plan") == f"plan of {Path(session.model).name} with suffix"
    assert "written to" in told(session, f"/trace {tmp_path / 'trace.json'}")
    assert (tmp_path / "trace.json").stat().st_size > 100
    told(session, "/multi")
    assert session.is_multi_line
    assert told(session, "/system -") == "no system message"


def test_show_takes_its_views_alone(session: ChatSession) -> None:
    assert act(session, "/show drafted") == act(session, "/show plain")
    answer(session, "the in")
    assert act(session, "/show drafted").shows_last
    with pytest.raises(UsageError, match="markdown, plain, drafted"):
        act(session, "/show colours")


def test_copy_finds_the_last_answer_its_code_or_all(session: ChatSession, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr("edgespec.chat_actions.copy", lambda text, is_terminal: taken.append(text) or "a test")
    with pytest.raises(UsageError, match="no answer"):
        act(session, "/copy")
    text = answer(session, "the in")
    assert told(session, "/copy") == f"{len(text)} characters copied by a test"
    with pytest.raises(UsageError, match="no code block"):
        act(session, "/copy code")
    act(session, "/copy all")
    assert taken == [text, f"user: the in\n\nassistant: {text}"]
    assert code_blocks("a\n```py\nx = 1\n\ny\n```\nb\n~~~\nz") == ["x = 1\n\ny\n", "z\n"]


def test_the_clipboard_is_the_desktops_own_and_over_ssh_the_terminals() -> None:
    assert [tool.command[0] for tool in tools({"WAYLAND_DISPLAY": "w", "DISPLAY": ":0"}, "linux")] == [
        *("wl-copy", "xclip", "xsel")
    ]
    assert [tool.command[0] for tool in tools({}, "darwin")] == ["pbcopy"]
    assert list(tools({"SSH_CONNECTION": "x", "DISPLAY": ":0"}, "linux")) == list(tools({}, "linux")) == []
    assert osc52("hé\x1b") == "\x1b]52;c;aMOpGw==\x07"


def test_stats_say_what_drafts_and_why_not(session: ChatSession) -> None:
    assert told(session, "/stats") == "no answer yet; drafting is by suffix"
    answer(session, "the in")
    report = told(session, "/stats")
    assert "tokens a pass" in report
    assert "target on cpu" in report
    assert "suffix" in report


def stats(**changed: object) -> Stats:
    tallied = Tally().stats(drafter="suffix", draft_length="auto", target_device="cpu", drafter_device=None)
    return replace(tallied, **changed)  # type: ignore[arg-type]


SOURCES = {
    "none": {"rounds": 3, "drafted": 0, "verified": 0, "accepted": 0},
    "suffix": {"rounds": 2, "drafted": 8, "verified": 8, "accepted": 6},
}
DRAFTED = stats(
    num_drafted=8, acceptance_rate=0.75, sources=SOURCES, estimated_gain=1.5, decode_tokens_per_second=20.0
)
STANDING = Standing(
    model="m", devices=("cpu", "cpu"), drafter="suffix", num_context=9, context_length=90, overflow="error"
)


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (stats(drafter="none"), "--drafter none"),
        (stats(undrafted={"no source had a guess": 5, "other": 2}), "no source had a guess"),
        (stats(undrafted={"other": 2}, downgrades=("steps down",)), "steps down"),
        (stats(), "over before"),
    ],
)
def test_why_drafting_is_off(of: Stats, reason: str) -> None:
    assert reason in why_off(of)
    assert reason in report_lines(of, [], ("cpu", "cpu"))[0]
    assert reason in standing_line(replace(STANDING, stats=of), 200)


def test_lines_of_an_answer_that_was_drafted() -> None:
    assert after_answer(DRAFTED, "length") == [
        "20.0 tokens/s",
        "1.50x plain (estimated)",
        "75% of drafts kept (suffix 6/8)",
        "stopped at the token limit (--max-tokens, /set max_tokens)",
    ]
    lines = report_lines(DRAFTED, ["given\x1b up"], ("cpu", "cpu"))
    assert lines[0].startswith("drafting helps: 1.50 times plain decoding (estimated")
    assert "suffix: 2 passes, 8 drafted, 6 kept (75%)" in lines
    assert lines[-1] == "given up: given\\x1b up"


@pytest.mark.parametrize("columns", [1, 10, 20, 40, 80, 200])
def test_the_line_below_the_input_fits(columns: int) -> None:
    line = standing_line(replace(STANDING, stats=DRAFTED), columns)
    assert len(line) <= columns
    assert line.startswith("m on cpu"[: columns - 1])
    if columns == 200:
        assert line == "m on cpu · context 9/90 · suffix 75% kept · 1.50x plain (est.) · 20 tokens/s"


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


class _Stream:
    def __init__(self, is_terminal: bool = True) -> None:
        self.text = ""
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_tokens_are_coloured_by_origin_with_a_legend() -> None:
    stream = _Stream()
    console = Console(file=stream, force_terminal=True, color_system="standard", width=80)  # type: ignore[arg-type]
    pieces = ["a", " b", " c", "\n世界 "]
    tokenizer = SimpleNamespace(
        decode=lambda tokens: "".join(pieces[token] for token in tokens), ends_in_bytes=lambda tokens: False
    )
    printer = OriginPrinter(console, tokenizer)  # type: ignore[arg-type]
    origins = ("target", "suffix", "suffix", "my-model")
    printer.push(Chunk(text="".join(pieces), token_ids=(0, 1, 2, 3), origins=origins))
    printer.end()
    assert "\x1b[32m b\x1b[0m\x1b[32m c\x1b[0m" in stream.text
    assert "target 25%" in stream.text
    assert "suffix 50%" in stream.text
    assert "my-model 25%" in stream.text


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
    assert is_plain(_Stream(is_terminal), environment) == plain  # type: ignore[arg-type]


def test_a_pipe_gets_bytes_as_they_are_and_a_terminal_escapes() -> None:
    for is_terminal, shown in [(True, "a\\x1b[1m\n"), (False, "a\x1b[1m\n")]:
        stream = _Stream(is_terminal)
        printer = PlainPrinter(stream)  # type: ignore[arg-type]
        printer.push(Chunk(text="a\x1b[1m", token_ids=()))
        printer.push(Chunk(text="", token_ids=()))
        printer.end()
        assert stream.text == shown


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill ends the process on Windows")
def test_ctrl_c_stops_once_and_leaves_twice() -> None:
    stopped: list[bool] = []
    clock = VirtualClock()
    before = signal.getsignal(signal.SIGINT)
    with stopped_by_ctrl_c(lambda: stopped.append(True), clock) as was_pressed:
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
        with stopped_by_ctrl_c(pytest.fail) as was_pressed:
            seen.append(was_pressed())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_what_is_shown_of_an_answer_is_on_the_disk_each_second(
    session: ChatSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(1000))
    monkeypatch.setattr("edgespec.chat.monotonic", lambda: next(seconds) / 4)
    monkeypatch.setattr("edgespec.chat._MOST_SHARE", 1.0)
    session.conversation.max_tokens = 60
    assert session.autosave is not None
    shown, kept = "", []
    for chunk in _kept(session, session.conversation.stream("the in")):
        if session.autosave.path:
            kept.append(read_transcript(session.autosave.path))
            assert shown.startswith(kept[-1].messages[1].content)
            assert kept[-1].cut_short == ((1, "cancelled"),)
        shown += chunk.text
    texts = [each.messages[1].content for each in kept]
    assert len(texts) > len(set(texts)) >= 3
    session.save()
    assert read_transcript(session.autosave.path or Path()) == session.conversation.transcript(session.model)
    assert len([*session.autosave.path.parent.iterdir()] if session.autosave.path else []) == 1


def test_engine_chat_is_a_conversation(session: ChatSession) -> None:
    assert isinstance(session.engine.chat(), Conversation)


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_waited_for_is_told_on_a_terminal_and_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("edgespec.chat_plain._TELL_S", 0.01)
    screen, was_asked = _Screen(), threading.Event()

    def progress() -> str:
        was_asked.set()
        return "reading"

    waiting = Waiting(screen, progress)
    waiting.begin()
    assert was_asked.wait(10)
    waiting.end()
    written = screen.getvalue()
    assert written.startswith("…\r \r… reading")
    assert written.endswith("… reading\r         \r")
    pipe = io.StringIO()
    waiting = Waiting(pipe, progress)
    waiting.begin()
    waiting.end()
    assert pipe.getvalue() == ""
