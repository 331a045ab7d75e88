"""Arguments of the public functions that make no sense: each is refused in words, and by its own name."""

import copy
import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec import (
    Conversation,
    Drafting,
    EdgeSpecError,
    Engine,
    FormatError,
    McpServers,
    SamplingParams,
    SourceError,
    ToolError,
    UsageError,
    errors,
    load,
    models,
)

# What no argument can be: of no such type, or half of a character.
WRONG: list[Any] = [object(), b"x", {1: object()}, "\ud800"]
# In texts that a model reads it is the sign for what is no character; no model has such a name.
MAY_BE_HALF = {"prompt", "text", "system", "prefill", "begun", "prediction", "answer"}
MAY_BE_HALF |= {"model", "source", "name", "drafter", "allow"}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with load(tiny_model, drafter="suffix") as engine:
        yield engine


def answered(engine: Engine) -> Conversation:
    talk = engine.chat(max_tokens=1)
    talk.say("the in")
    return talk


Function = Callable[..., Any]
FUNCTIONS: dict[str, tuple[Callable[[Engine], Function], dict[str, Any]]] = {
    "generate": (lambda engine: engine.generate, {"prompt": "the in", "max_tokens": 1}),
    "stream": (lambda engine: engine.stream, {"prompt": "the in", "max_tokens": 1}),
    "chat": (lambda engine: engine.chat, {}),
    "encode": (lambda engine: engine.encode, {"prompt": "the in"}),
    "count": (lambda engine: engine.count, {"prompt": "the in"}),
    "tokenize": (lambda engine: engine.tokenize, {}),
    "detokenize": (lambda engine: engine.detokenize, {}),
    "save_prefix": (lambda engine: engine.save_prefix, {"path": "kept"}),
    "load_prefix": (lambda engine: engine.load_prefix, {"path": "kept"}),
    "Conversation": (lambda engine: Conversation, {}),
    "say": (lambda engine: engine.chat(max_tokens=1).say, {"text": "the in"}),
    "run": (lambda engine: engine.chat(max_tokens=1).run, {"text": "the in"}),
    "retry": (lambda engine: answered(engine).retry, {}),
    "go_on": (lambda engine: answered(engine).go_on, {}),
    "rewrite": (lambda engine: answered(engine).rewrite, {}),
    "redo": (lambda engine: answered(engine).redo, {}),
    "keep": (lambda engine: answered(engine).keep, {}),
    "give_results": (lambda engine: answered(engine).give_results, {"results": ()}),
    "save": (lambda engine: answered(engine).save, {}),
    "Conversation.load": (lambda engine: Conversation.load, {"path": "no-model"}),
    "Drafting": (lambda engine: Drafting, {}),
    "McpServers": (lambda engine: partial(McpServers, "no-such-program"), {}),
    "SamplingParams": (lambda engine: SamplingParams, {}),
    "load": (lambda engine: load, {"model": "no-model", "home": "home"}),
    "pull": (lambda engine: models.pull, {"model": "no-model", "home": "home", "offline": True}),
    "export": (lambda engine: models.export, {"source": "no-model", "home": "home", "name": "no-model"}),
    "rename": (lambda engine: models.rename, {"model": "no-model", "name": "other", "home": "home"}),
    **{
        name: (lambda engine, name=name: getattr(models, name), {"model": "no-model", "home": "home"})
        for name in ("show", "verify", "remove")
    },
    "list": (lambda engine: models.list, {}),
    "prune": (lambda engine: models.prune, {}),
}


@pytest.mark.parametrize("called", FUNCTIONS)
def test_every_argument_of_a_wrong_kind_is_refused_in_words(
    engine: Engine, called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, needed = FUNCTIONS[called]
    function = make(engine)
    stated = inspect.signature(function).parameters
    given = needed | ({"engine": engine} if "engine" in stated else {})
    for name, parameter in stated.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        for value in WRONG:
            if value == "\ud800" and name in MAY_BE_HALF:
                continue
            with pytest.raises(UsageError) as refused:
                function(**{**given, name: value})
            said = str(refused.value)
            assert said.encode()
            assert "wanted" in said or name.split("_")[-1] in said, (name, value, said)


@pytest.mark.parametrize(
    "name", ["engine", "system", "sampling", "max_tokens", "stop", "schema", "tools", "overflow"]
)
def test_a_setting_of_a_conversation_is_checked_when_it_is_set(engine: Engine, name: str) -> None:
    talk = engine.chat(max_tokens=1)
    kept = getattr(talk, name)
    for value in (object(), {1: object()}):
        with pytest.raises(UsageError, match=name):
            setattr(talk, name, value)
        assert getattr(talk, name) is kept
    assert talk.say("the in").finish_reason == "length"


def test_options_of_an_answer_are_checked_before_a_message_is_counted(engine: Engine) -> None:
    talk = engine.chat(overflow="drop-oldest", max_tokens=2)
    talk.say("the in")
    with pytest.raises(UsageError, match="max_tokens is '5'; wanted a whole number"):
        talk.say("the in", max_tokens="5")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="thinking is 'yes'; wanted True, False or None"):
        talk.say("the in", thinking="yes")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="max_tokens is 0; wanted a whole number from 1"):
        talk.max_tokens = 0
    assert (len(talk.rounds), talk.max_tokens) == (1, 2)


def test_a_setting_that_is_none_says_where_it_goes(engine: Engine) -> None:
    talk, name = engine.chat(), "messages"
    with pytest.raises(AttributeError, match=r"no setting 'temperature'; .* give it to say or stream"):
        talk.temperature = 0.7  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"no setting 'messages'; Engine\.generate answers messages"):
        setattr(talk, name, [])
    with pytest.raises(AttributeError, match=r"no setting 'max_new_tokens'; did you mean max_tokens\?"):
        talk.max_new_tokens = 7  # type: ignore[attr-defined]
    talk.max_tokens, talk.sampling, talk.tools = -1, None, None  # type: ignore[assignment]
    assert (talk.max_tokens, talk.sampling, talk.tools) == (None, SamplingParams(), ())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda engine: SamplingParams(repeat_penalty=1), "SamplingParams() … did you mean repetition_penalty?"),
        (
            lambda engine: SamplingParams(max_tokens=1),
            "max_tokens is an option of an answer; give it",
        ),
        (lambda engine: Drafting(num_speculative_tokens=1), "Drafting() … did you mean draft_length?"),
        (lambda engine: load(model_path="x"), "load() … did you mean model?"),
        (lambda engine: load("x", dtype="int8"), "precision is an argument of models.export"),
        (lambda engine: models.export("x", quantization="int8"), "export() … did you mean precision?"),
        (lambda engine: engine.generate(messages=[]), "Engine.generate() … did you mean prompt?"),
        (lambda engine: engine.generate("x", stream=True), "Engine.stream gives an answer as it is made"),
        (
            lambda engine: engine.chat().say("x", system="y"),
            "an option of an answer; give it to Engine.chat",
        ),
        (
            lambda engine: engine.chat().run("x", tools=[]),
            "tools … give it to Engine.chat",
        ),
        (lambda engine: engine.chat().retry(temprature=1), "Conversation.retry() … did you mean temperature?"),
    ],
)
def test_the_name_of_another_library_is_refused_with_what_was_meant(
    engine: Engine, call: Callable[[Engine], object], said: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(said).replace("…", ".*")):
        call(engine)


def test_wrong_tools_are_one_kind_of_error(engine: Engine) -> None:
    for tools in (3, [3], [{"type": "function"}]):
        with pytest.raises(ToolError):
            engine.generate("the in", tools=tools)  # type: ignore[arg-type]
    with pytest.raises(ToolError):
        engine.chat(tools=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_steps": 0}, "max_steps is 0; wanted a whole number from 1"),
        ({"may_call": 3}, "may_call is 3; wanted a function"),
    ],
)
def test_run_refuses_what_it_cannot_do(engine: Engine, options: dict[str, Any], said: str) -> None:
    talk = engine.chat(max_tokens=1)
    with pytest.raises(UsageError, match=said):
        talk.run("the in", **options)
    assert not talk.messages


def test_numbers_of_numpy_are_numbers(tiny_model: Path, tmp_path: Path) -> None:
    opening: dict[str, Any] = {"num_threads": np.int64(1), "context": np.int32(64), "draft_length": np.int8(2)}
    asked: dict[str, Any] = {"max_tokens": np.int64(2), "timeout_s": np.float32(60)}
    with load(tiny_model, home=tmp_path, **opening) as engine:
        assert len(engine.generate("the in", **asked).token_ids) == 2
        with pytest.raises(UsageError, match=r"max_tokens is 2\.5; wanted a whole number"):
            engine.generate("the in", **{**asked, "max_tokens": np.float32(2.5)})
        talk = engine.chat()
        talk.max_tokens = asked["max_tokens"]
        assert len(talk.say("the in").token_ids) == 2


def test_what_is_open_has_no_copies(engine: Engine) -> None:
    for made in (engine, engine.chat(), engine.stream("the in", max_tokens=1)):
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled; "):
                copied(made)  # type: ignore[operator]


def test_errors_reach_another_process_whole() -> None:
    made: list[EdgeSpecError] = [errors.DiskFull("full", 2, 1), ToolError("wrong", field="tools[0]")]
    made += [errors.ContextOverflow(10, 5), errors.PrecisionLoss("lost", "int4")]
    made += [errors.DeviceUnavailable("use --device cpu", device="gpu")]
    made += [errors.MemoryExhausted("give --memory 2G", needed_bytes=2, free_bytes=1)]
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, EdgeSpecError)]
    made += [kind("wrong") for kind in kinds if kind not in {*map(type, made)}]
    for error in made:
        for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert (type(copied), str(copied), vars(copied)) == (type(error), str(error), vars(error))


def test_streams_say_briefly_what_they_are(engine: Engine) -> None:
    with engine.stream("the in", max_tokens=1) as stream:
        assert repr(stream) == f"<AnswerStream to {stream.prompt_tokens} tokens, open>"
    assert repr(stream).endswith(", over>")
    reply = engine.chat(max_tokens=40).stream("the in")
    assert repr(reply) == "<Reply '', open>"
    reply.completion()
    assert re.fullmatch(r"<Reply '.{,40}', over>", repr(reply))


def test_a_model_that_is_prepared_is_not_exported_again(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is prepared already, and can be used as it is"):
        models.export(tiny_model, name="again", home=tmp_path)


def test_a_format_without_a_type_says_so(engine: Engine) -> None:
    with pytest.raises(FormatError, match="response_format has no type; wanted text, json_object"):
        engine.generate("the in", response_format={})


def test_an_error_can_be_printed_whatever_was_given(tmp_path: Path) -> None:
    with pytest.raises(EdgeSpecError) as refused:
        load("\ud800", home=tmp_path, offline=True)
    assert r"no model '\ud800'" in str(refused.value)
    with pytest.raises(UsageError, match="home is ''; wanted a folder"):
        load("tiny", home="")


def test_an_mcp_server_is_a_text_or_a_path() -> None:
    with pytest.raises(UsageError, match="an MCP server is 3; wanted a command"):
        McpServers(3)  # type: ignore[arg-type]
