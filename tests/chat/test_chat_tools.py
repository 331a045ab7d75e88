"""Calls of tools in a chat without a terminal: what is asked, shown, run, and told to the model."""

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rule_chat import RuleEngine

from edgespec import MemoryExhausted, Message, ModelError, ToolCall, Transcript, UsageError
from edgespec.chat.call_text import brief_result, describe_steps, format_call
from edgespec.chat.commands import run_command
from edgespec.chat.loop import _follow, answer_once
from edgespec.chat.past_rounds import describe_resumed
from edgespec.chat.saved_chats import export_text
from edgespec.chat.session import ChatSession
from edgespec.chat.tool_box import (
    QUESTION,
    Permission,
    ToolBox,
    ask_at_terminal,
    ask_permission,
    open_tools,
    require_tools,
)
from edgespec.chat.tool_calls import MOST_ROUNDS, replies_to_results
from edgespec.engine.conversation import Conversation

TOOLS = '''
import time
from pathlib import Path


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


def note(text: str, file: str) -> str:
    """Write a note."""
    Path(file).write_text(text)
    print("written")
    return "done"


def hang(file: str) -> None:
    Path(file).touch()
    while True:
        time.sleep(600)


def long() -> str:
    return "word " * 1_000
'''
ENOUGH = "This call was not run: there were too many for one message. Answer with what you know by now."
CALL = {"call": "weather", "arguments": {"city": "Rome"}}
Make = Callable[..., ChatSession]


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolBox]:
    path = tmp_path_factory.mktemp("tools") / "tools.py"
    path.write_text(TOOLS)
    box = open_tools(path, (), ())
    yield box
    box.close()


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def make(box: ToolBox, lines: list[str]) -> Make:
    """A chat that answers by a script; whoever is asked gives the answers that are listed."""

    def make(script: dict[str, Any], answers: list[Permission | None] | None = None, **more: Any) -> ChatSession:
        engine: Any = RuleEngine(script)
        engine.context_length = more.pop("context_length", engine.context_length)
        box.allowed.clear()
        waiting = iter(answers or [])

        def permit(name: str) -> Permission | None:
            lines.append(QUESTION)
            return next(waiting)

        return ChatSession(
            conversation=Conversation(engine, tools=box.tools),
            model="rule",
            drafter="none",
            open_engine=lambda model, drafter: engine,
            describe_plan=lambda model, drafter: "",
            info=lines.append,
            tools=box,
            permit=permit if answers is not None else None,
            **more,
        )

    return make


def results(session: ChatSession) -> list[str]:
    """What the model was told of its calls."""
    return [step.content for step in session.conversation.rounds[-1].steps if step.role == "tool"]


def test_a_call_is_shown_asked_run_and_answered(
    make: Make, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    session = make({"Rain?": ["I look.", CALL], "sunny in Rome": ["No rain."]}, [Permission.YES])
    assert answer_once(session, "Rain?") == 0
    assert lines == ['the model calls weather(city="Rome")', QUESTION, "result: sunny in Rome"]
    assert capsys.readouterr().out == "I look.\nNo rain.\n"
    assert session.conversation.rounds[-1].answer == "No rain."


def test_a_refused_call_is_not_run_and_the_model_is_told(make: Make, lines: list[str], tmp_path: Path) -> None:
    call = {"call": "note", "arguments": {"text": "x", "file": str(tmp_path / "note")}}
    session = make({"write": [call], "The user refused this call.": ["?"]}, [Permission.NO])
    answer_once(session, "write")
    assert results(session)[0].startswith("The user refused this call")
    assert not (tmp_path / "note").exists()
    assert lines[-1] == "not run; the model is told that you refused"


def test_always_asks_once_for_that_tool_alone(make: Make, lines: list[str], tmp_path: Path) -> None:
    note = {"call": "note", "arguments": {"text": "x", "file": str(tmp_path / "note")}}
    session = make({"go": [CALL, CALL, note], "done": [CALL], "sunny in Rome": ["End."]}, [Permission.ALWAYS] * 2)
    answer_once(session, "go")
    assert lines.count(QUESTION) == 2
    assert results(session) == ["sunny in Rome", "sunny in Rome", "done", "sunny in Rome"]
    assert "note printed: written" in lines
    run_command(session, "/tools")
    assert "weather(city): Tell the weather of a city. (runs without asking)" in lines[-1]
    run_command(session, "/tools ask")
    assert lines[-1].count("(asks before each call)") == 4
    with pytest.raises(UsageError, match="/tools takes ask or no argument"):
        run_command(session, "/tools all")


def test_where_nobody_can_be_asked_nothing_runs_but_what_is_allowed(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    script = {"Rain?": [CALL], "sunny in Rome": ["No rain."]}
    session = make(script)
    answer_once(session, "Rain?")
    assert results(session)[0].startswith("This call was not run")
    assert "weather was not run: there is no terminal to ask in; --allow weather allows it" in caplog.text
    session = make(script)
    assert session.tools is not None
    session.tools.allowed.add("weather")
    answer_once(session, "Rain?")
    assert results(session) == ["sunny in Rome"]


def test_ctrl_c_at_the_question_ends_the_answer(make: Make, lines: list[str]) -> None:
    session = make({"Rain?": [CALL]}, [None])
    answer_once(session, "Rain?")
    assert lines[-1] == "(the answer ends here; /retry asks again)"
    assert session.conversation.rounds[-1].answer is None
    assert session.conversation.rounds[-1].steps == ()


def test_calls_that_were_run_before_are_recorded(make: Make, lines: list[str]) -> None:
    session = make({"Rain?": [CALL, CALL, CALL], "sunny in Rome": ["No."]}, [Permission.YES, None])
    answer_once(session, "Rain?")
    assert lines[-1] == "(the answer ends here; /retry asks again)"
    left = "This call was not run, because the user ended the answer before it."
    assert results(session) == ["sunny in Rome", left, left]
    assert session.conversation.rounds[-1].answer is None
    assert not session.conversation.calls
    assert describe_resumed(session).endswith("It has no answer yet; /retry asks for one.")


def test_ctrl_c_at_the_question_keeps_what_the_model_wrote_before_the_call(make: Make) -> None:
    session = make({"Rain?": ["I look.", CALL]}, [None])
    answer_once(session, "Rain?")
    assert session.conversation.rounds[-1].answer == "I look."
    assert describe_resumed(session).endswith(
        "Its answer was cut off; /go continues it, /retry asks for a new one."
    )


@pytest.mark.parametrize(
    ("reason", "end"),
    [("length", "/go continues it, /retry asks for a new one."), ("loop", "'Hi'."), (None, "'Hi'.")],
)
def test_a_resumed_chat_names_go_where_its_answer_can_go_on(make: Make, reason: str | None, end: str) -> None:
    session = make({})
    cut_short = ((1, reason),) if reason else ()
    messages = Message("user", "Hi"), Message("assistant", "Well")
    session.conversation.restore(Transcript(messages=messages, cut_short=cut_short))
    assert describe_resumed(session).endswith(end)


def test_calls_that_come_back_where_another_answer_has_no_word_are_not_run(make: Make, lines: list[str]) -> None:
    session = make({"Rain?": [CALL]}, [None, Permission.YES])
    answer_once(session, "Rain?")
    with session.conversation.retry() as reply:
        pass
    session.record((reply.last,) if reply.last else ())
    assert len(session.conversation.calls) == 1
    assert list(replies_to_results(session)) == []
    assert lines.count(QUESTION) == 1


def test_an_answer_stays_until_the_calls_of_another_one_have_results(make: Make) -> None:
    script = {"Rain?": [CALL], "sunny in Rome": ["No."]}
    session = make(script, [Permission.YES, None, Permission.YES])
    answer_once(session, "Rain?")
    script["sunny in Rome"] = ["Sun."]
    for wanted in ("No.", "Sun."):
        _follow(session, run_command(session, "/retry"))
        assert session.conversation.rounds[-1].answer == wanted
        assert [each.content for each in session.transcript().messages] == ["Rain?", "", "sunny in Rome", wanted]
    assert session.conversation.rounds[-1].cut_short is None


def test_ctrl_c_ends_a_call_that_hangs(make: Make, lines: list[str], tmp_path: Path) -> None:
    file = tmp_path / "begun"

    def press() -> None:
        while not file.exists():
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    hang = {"call": "hang", "arguments": {"file": str(file)}}
    told = "error: the user ended this call while it ran"
    session = make({"go": [hang], told: [CALL], "sunny in Rome": ["Done."]}, [Permission.YES] * 2)
    thread = threading.Thread(target=press)
    thread.start()
    answer_once(session, "go")
    thread.join()
    assert "hang was ended; the model is told so" in lines
    assert results(session) == [told, "sunny in Rome"]


def test_a_tool_that_is_gone_after_a_new_start_is_an_error(
    make: Make, box: ToolBox, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "error: there is no tool weather any more"
    session = make({"Rain?": [CALL], told: ["Oh."]}, [Permission.YES])
    monkeypatch.setattr(box.processes[0], "tools", ())
    answer_once(session, "Rain?")
    assert results(session) == [told]
    assert lines[-1] == "there is no tool weather any more"


def test_calls_without_end_are_bounded(make: Make, lines: list[str]) -> None:
    session = make({"go": [CALL], "sunny in Rome": [CALL], ENOUGH: [CALL]}, [Permission.ALWAYS])
    answer_once(session, "go")
    assert results(session) == ["sunny in Rome"] * MOST_ROUNDS + [ENOUGH]
    assert lines[-1] == "stopped: the model still calls tools after 8 rounds of calls"


def test_a_result_that_does_not_fit_is_told_as_such(make: Make, lines: list[str]) -> None:
    told = "error: the result of this call is too long for the context"
    script = {"go": [{"call": "long", "arguments": {}}], told: ["Oh."]}
    session = make(script, [Permission.YES], context_length=100)
    answer_once(session, "go")
    assert session.conversation.rounds[-1].answer == "Oh."
    assert "the results of the tools are too long for the context; the model is told so" in lines


def test_an_answer_without_a_word_is_said_to_be_one(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "edgespec")
    session = make({"Rain?": [CALL], "sunny in Rome": [""]}, [Permission.YES])
    answer_once(session, "Rain?")
    assert "the model ends without an answer" in caplog.text


def test_calls_of_an_answer_that_was_cut_are_said_to_be_lost(make: Make, lines: list[str]) -> None:
    session = make({"Rain?": [CALL, CALL, None]}, [])
    answer_once(session, "Rain?")
    assert lines == ["the answer was cut off, so its 2 tool calls were not run"]


def test_json_has_the_calls(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    session = make({"Rain?": [CALL], "sunny in Rome": ["No rain."]}, [Permission.YES])
    answer_once(session, "Rain?", as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["text"] == "No rain."
    assert document["tool_calls"] == [
        {"name": "weather", "arguments": '{"city": "Rome"}', "result": "sunny in Rome"}
    ]


def test_quiet_shows_what_is_asked_alone(make: Make, lines: list[str]) -> None:
    script = {"Rain?": [CALL, CALL], "sunny in Rome": ["No rain."]}
    session = make(script, [Permission.ALWAYS], is_quiet=True)
    answer_once(session, "Rain?")
    assert lines == ['the model calls weather(city="Rome")', QUESTION]


def test_calls_are_exported_and_described(make: Make, tmp_path: Path) -> None:
    session = make({"Rain?": ["I look.", CALL], "sunny in Rome": ["No rain."]}, [Permission.YES])
    answer_once(session, "Rain?")
    markdown = export_text(session.transcript(), tmp_path / "a.md")
    assert '\ncalls weather(city="Rome")\n' in markdown
    assert "## Result of a call\n\n```\nsunny in Rome\n```\n" in markdown
    messages = json.loads(export_text(session.transcript(), tmp_path / "a.json"))["messages"]
    assert [each["role"] for each in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]
    steps = describe_steps(session.conversation.rounds[0].steps)
    assert steps == ["I look.", 'called weather(city="Rome")', "weather gave: sunny in Rome"]


def test_another_model_without_tools_is_refused(make: Make) -> None:
    session = make({})
    other: Any = RuleEngine({})
    other.takes_tools = False
    session.open_engine = lambda model, drafter: other
    with pytest.raises(
        ModelError, match="cannot call tools: its chat template has no place for them; use a model"
    ):
        session.switch_engine("other", "none")
    assert session.model == "rule"
    with pytest.raises(ModelError):
        require_tools(other)


def test_ctrl_c_while_another_model_is_opened_in_place_of_this_one_leaves_the_chat_with_a_model(
    make: Make,
) -> None:
    session, again = make({}), RuleEngine({})
    opened: list[Any] = [MemoryExhausted("too large"), KeyboardInterrupt(), again]

    def open_engine(model: str, drafter: str) -> Any:
        if isinstance(found := opened.pop(0), BaseException):
            raise found
        return found

    session.open_engine = open_engine
    with pytest.raises(KeyboardInterrupt):
        session.switch_engine("other", "none")
    assert session.engine is again  # type: ignore[comparison-overlap]
    assert (session.model, opened) == ("rule", [])


@pytest.mark.parametrize(
    ("typed", "is_typing", "expected"),
    [
        (["y"], False, Permission.YES),
        (["YES "], False, Permission.YES),
        (["a"], False, Permission.ALWAYS),
        (["always"], True, Permission.ALWAYS),
        ([""], False, Permission.NO),
        (["n"], False, Permission.NO),
        (["what", "y"], False, Permission.YES),
        (["y", "a", "yes"], True, Permission.YES),
        (["y", "n", ""], True, Permission.NO),
        (["yy", "ye", "no"], False, Permission.NO),
    ],
)
def test_only_a_clear_yes_is_one(typed: list[str], is_typing: bool, expected: Permission) -> None:
    questions, shown = [], []

    def read(question: str) -> str:
        questions.append(question)
        return typed[len(questions) - 1]

    assert ask_permission("weather", read, shown.append, is_typing=is_typing) is expected
    assert len(questions) == len(typed)
    assert len(shown) == len(typed) - 1


def test_what_was_typed_before_a_question_on_windows_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = [*"yes\r"]
    console = SimpleNamespace(kbhit=lambda: bool(typed), getwch=lambda: typed.pop(0))
    monkeypatch.setitem(sys.modules, "msvcrt", console)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(readline=lambda: "".join(typed)))
    assert ask_at_terminal("weather", pytest.fail) is Permission.NO


def test_the_end_of_the_input_is_no(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "empty").open("w+") as file:
        monkeypatch.setattr("sys.stdin", file)
        assert ask_at_terminal("weather", pytest.fail) is Permission.NO


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("{}", "f()"),
        ('{"a": 1, "b": [true, null]}', "f(a=1, b=[true, null])"),
        ('{"a": "é\\u202e"}', 'f(a="é\u202e")'),
        ("[1]", "f([1])"),
        ('{"a": "one\\ntwo\\n)"}', 'f(\n    a="""one\n        two\n        )""",\n)'),
        (json.dumps({"a": "x" * 70, "b": 1}), f'f(\n    a="{"x" * 70}",\n    b=1,\n)'),
    ],
)
def test_calls_are_shown_whole(arguments: str, shown: str) -> None:
    call = ToolCall(id="1", name="f", arguments=arguments)
    assert format_call(call) == shown


def test_results_are_shown_in_short() -> None:
    assert brief_result("one\ntwo\n") == "one\ntwo"
    assert brief_result("1\n2\n3\n4") == "1\n2\n3 … (7 characters)"
    assert brief_result("x" * 1000) == "x" * 300 + " … (1000 characters)"


def test_tools_that_are_allowed_have_to_be_there(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text("def f(): pass\ndef g(): pass\n")
    with pytest.raises(UsageError, match=r"'h' is allowed, but there is no such tool; there are f, g \(or all\)"):
        open_tools(path, (), ["f", "h"])
    box = open_tools(path, (), ["all"])
    assert box.allowed == {"f", "g"}
    box.close()


def test_a_chat_without_tools_says_how_to_give_some(make: Make) -> None:
    session = make({})
    session.tools = None
    with pytest.raises(UsageError, match=r"edgespec chat --tools FILE\.py"):
        run_command(session, "/tools")
