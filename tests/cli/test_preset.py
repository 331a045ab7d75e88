"""Presets through the command line, load and the server."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from commands import run
from served import serving

from edgespec import Engine, Message, ModelError, SamplingParams, UsageError, follow_preset, load
from edgespec.cli.arguments import load_engine, model_home
from edgespec.cli.main import command_parser, main
from edgespec.cli.serve import _open_engine
from edgespec.config.modelfile import read_modelfile
from edgespec.config.presets import Preset, PresetFolder, parse_preset
from edgespec.server.limits import Limits
from edgespec.server.model_names import ModelNames
from edgespec.setup.wish import Wish
from edgespec.system.file_hashes import file_record

MODELFILE = """FROM tiny
PARAMETER temperature 0.7
PARAMETER seed 5
PARAMETER num_predict 9
SYSTEM in the
MESSAGE user an
MESSAGE assistant the in
"""
SAMPLING = SamplingParams(temperature=0.7, seed=5)
EXAMPLES = [Message("user", "an"), Message("assistant", "the in")]


@pytest.fixture
def home(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Path:
    """A model home with the tiny model and a preset of it."""
    folder = tmp_path / "home"
    (folder / "models").mkdir(parents=True)
    (folder / "models" / "tiny").symlink_to(tiny_model, target_is_directory=True)
    monkeypatch.setenv("EDGESPEC_HOME", str(folder))
    (tmp_path / "Modelfile").write_text(MODELFILE)
    (tmp_path / "NoModel").write_text("SYSTEM the")
    assert main(["preset", "create", "poet", "--file", str(tmp_path / "Modelfile")]) == 0
    capsys.readouterr()
    return folder


@pytest.fixture
def plain(home: Path) -> Iterator[Engine]:
    with load("tiny") as engine:
        yield engine


def test_presets_are_listed_shown_and_removed(
    capsys: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(
        capsys, "preset", "create", "short", "--from", "poet", "--max-tokens", 3, "--drafter", "none"
    )
    assert (code, out.splitlines()[-1]) == (0, str(home / "presets" / "short.toml"))
    code, out, _ = run(capsys, "preset", "ls", "--json")
    assert {name: each["max-tokens"] for name, each in json.loads(out).items()} == {"poet": 9, "short": 3}
    (home / "presets" / "bad.toml").write_text("model = 3")
    _, out, _ = run(capsys, "preset")
    assert "short  tiny, system in the" in out
    assert "bad    PROBLEM: " in out
    (home / "presets" / "bad.toml").unlink()
    assert "(edgespec preset ls): poet, short" in run(capsys, "models", "ls")[1]
    assert run(capsys, "models", "path", "poet")[1].strip() == str(home / "models" / "tiny")
    _, _, err = run(capsys, "preset", "create", "wide", "--from", "tiny", "--context", 64)
    assert "wide sets context, so a server loads a separate copy of the model for it" in err
    monkeypatch.chdir(home / "models")
    run(capsys, "preset", "create", "wide", "--from", "tiny", "--overwrite", "--drafter", "ngram+./tiny")
    assert PresetFolder(home).read("wide").options == {"drafter": f"ngram+{home / 'models' / 'tiny'}"}
    assert "no preset 'none'" in run(capsys, "preset", "rm", "wide", "none")[2]
    assert (home / "presets" / "wide.toml").exists(), "all or none"
    assert run(capsys, "preset", "create", "third", "--from", "tiny")[0] == 0
    assert run(capsys, "preset", "rm", "wide", "third")[0] == 0
    _, out, _ = run(capsys, "preset", "show", "short")
    assert 'system = "in the"' in out
    file = home / "presets" / "short.toml"
    file.write_bytes(file.read_text().encode("utf-16"))  # as PowerShell 5 writes it
    assert run(capsys, "preset", "show", "short") == (0, out, "")
    assert run(capsys, "preset", "rm", "short")[0] == 0
    assert json.loads(run(capsys, "preset", "list", "--json")[1]).keys() == {"poet"}


def test_a_modelfile_names_the_model_beside_it_where_there_is_one(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "tiny").mkdir()  # which is no model
    (tmp_path / "near").symlink_to(tiny_model, target_is_directory=True)
    for named, model in (("tiny", "tiny"), ("tiny:latest", "tiny"), ("near", str(tmp_path / "near"))):
        (tmp_path / "Modelfile").write_text(f"FROM {named}\n")
        code, _, err = run(capsys, "preset", "create", "new", "--file", tmp_path / "Modelfile", "--overwrite")
        assert (named, code) == (named, 0), err
        assert PresetFolder(home).read("new").model == model


def test_a_value_of_a_modelfile_that_cannot_be_is_named_with_its_line(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    (tmp_path / "Modelfile").write_text("FROM tiny\nPARAMETER top_p 7\n")
    code, _, err = run(capsys, "preset", "create", "new", "-f", tmp_path / "Modelfile")
    assert (code, "Modelfile:2: the preset 'new': top_p is 7.0" in err, "wanted" in err) == (2, True, True), err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["tiny", "--from", "poet"], 2, "there is a model 'tiny' already"),
        (
            ["poet", "--from", "tiny"],
            2,
            "there is a preset 'poet' already; give another name, or replace it: --overwrite",
        ),
        (["new"], 2, "no model is named; give the model with --from MODEL"),
        (["new", "--file", "{home}/../NoModel"], 2, "NoModel has no FROM; give the model with --from"),
        (["new", "--from", "nothing-like-it"], 3, "no model 'nothing-like-it'"),
        (
            ["new", "--from", "{home}/../Modelfile"],
            2,
            "Modelfile is not a model; name one, or a .gguf file. A Modelfile",
        ),
        (["new", "--from", "tiny", "--temperature", "-1"], 2, "temperature is -1.0; wanted a number from 0.0"),
        (
            ["new", "--from", "tiny", "--max-tokens", "0"],
            2,
            "--max-tokens is '0'; wanted a whole number from 1, or -1 for no limit",
        ),
        (["new", "--from", "tiny", "--context", "0"], 2, "the preset 'new': context is 0; wanted a whole"),
        (["new", "--from", "tiny", "--drafter", "ngram+nothing"], 3, "no model 'nothing'"),
        (["../new", "--from", "tiny"], 2, "'../new' cannot be the name"),
        (["new", "--from", "tiny", "--schema", "{home}/none.json"], 2, "none.json"),
    ],
)
def test_what_cannot_be_a_preset_is_refused(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    given = [argument.format(home=home) for argument in arguments]
    found, _, err = run(capsys, "preset", "create", *given)
    assert (found, said in err) == (code, True), err


def test_load_answers_by_a_preset_and_by_what_is_said_beside_it(plain: Engine) -> None:
    messages = [Message("system", "in the"), *EXAMPLES, Message("user", "the an")]
    wanted = plain.generate(messages, sampling=SAMPLING, max_tokens=9)
    with load("poet", context=128) as engine:  # answers without a limit end with it
        found = engine.generate("the an")
        assert (found.text, found.prompt_tokens) == (wanted.text, wanted.prompt_tokens)
        assert engine.generate([Message("user", "the an")]).text == wanted.text
        assert engine.plain().generate("the an").text == wanted.text
        assert "".join(chunk.text for chunk in engine.stream("the an", max_tokens=4)) == "".join(
            chunk.text for chunk in plain.stream(messages, sampling=SAMPLING, max_tokens=4)
        )
        without = engine.generate("the an", system="", temperature=0.0)
        assert without.text == plain.generate("the an", max_tokens=9).text
        other = [Message("system", "an"), Message("user", "the an")]
        assert engine.generate(other).prompt_tokens == len(plain.encode([other[0], *EXAMPLES, other[1]]))
        talk = engine.chat()
        assert (talk.system, talk.sampling, talk.say("the an").text) == ("in the", SAMPLING, wanted.text)
        assert [message.content for message in talk.messages[:3]] == ["in the", "an", "the in"]
        assert talk.max_tokens == 9
        talk.undo()
        assert len(talk.say("the an", max_tokens=-1).token_ids) > 9
        talk.max_tokens = None
        assert len(talk.retry().completion().token_ids) > 9, "the limit of a preset can be lifted"
        talk.undo()
        talk.max_tokens = 9
        talk.system = None
        second = talk.say("an")
        assert second.prompt_tokens == len(plain.encode([*talk.messages[:-1]])), "it stays without one"
        raw = plain.generate("in the an", raw=True, sampling=SAMPLING, max_tokens=9)
        assert engine.generate("in the an", raw=True).text == raw.text


def test_a_conversation_follows_the_preset_of_another_model(home: Path, plain: Engine) -> None:
    with load("poet") as engine:
        talk = plain.chat()
        talk.engine = engine
        assert follow_preset(talk, None)
        assert (talk.system, talk.max_tokens, len(talk.rounds)) == ("in the", 9, 1)
        talk.max_tokens, talk.engine = None, plain
        assert follow_preset(talk, engine.preset)
        assert (talk.system, talk.max_tokens, talk.rounds) == (None, None, ())
        talk.say("an", max_tokens=2)
        talk.system, talk.max_tokens, talk.engine = "my own", 7, engine
        assert not follow_preset(talk, None), "its examples are left out"
        assert (talk.system, talk.max_tokens, len(talk.rounds)) == ("my own", 7, 1)


def test_chat_answers_by_a_preset_before_what_is_configured(
    capsys: pytest.CaptureFixture[str], home: Path, plain: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text('temperature = 1.5\nsystem = "an"\nmodel = "poet"\n')
    monkeypatch.setenv("EDGESPEC_CONFIG", str(tmp_path / "config.toml"))
    messages = [Message("system", "in the"), *EXAMPLES, Message("user", "the an")]
    wanted = plain.generate(messages, sampling=SAMPLING, max_tokens=9).text
    for name in (["poet"], []):
        for of_model in ([], ["--no-model-sampling"]):
            code, out, _ = run(capsys, "chat", *name, "--prompt", "the an", "--json", "--no-history", *of_model)
            assert (code, json.loads(out)["text"]) == (0, wanted)
    stated = ["--system", "an", "--temperature", 0, "--max-tokens", 4]
    _, out, _ = run(capsys, "chat", "poet", "--prompt", "the an", "--json", "--no-history", *stated)
    messages[0] = Message("system", "an")
    assert json.loads(out)["text"] == plain.generate(messages, max_tokens=4, temperature=0.0).text


def test_a_preset_says_whether_to_reason_where_the_command_line_does_not(
    capsys: pytest.CaptureFixture[str], home: Path, tiny_model: Path
) -> None:
    folder = home / "models" / "thinker"
    shutil.copytree(tiny_model, folder)
    template = (
        "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %} the{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    manifest = json.loads((folder / "edgespec.json").read_text())
    manifest["chat_template"] = "chat_template.jinja"
    manifest["files"]["chat_template.jinja"] = asdict(file_record(folder / "chat_template.jinja"))
    (folder / "edgespec.json").write_text(json.dumps(manifest))
    assert main(["preset", "create", "brief", "--from", "thinker", "--no-think", "--max-tokens", "3"]) == 0
    capsys.readouterr()
    lengths = []
    for stated in ([], ["--no-think"], ["--think"]):
        code, out, err = run(capsys, "chat", "brief", "--prompt", "an", "--json", "--no-history", *stated)
        assert code == 0, err
        lengths.append(json.loads(out)["prompt_tokens"])
    assert lengths[0] == lengths[1] > lengths[2]


@pytest.mark.parametrize("flag", ["--think", "--no-think"])
def test_a_preset_of_a_model_without_a_switch_for_thinking_says_so_and_answers(
    capsys: pytest.CaptureFixture[str], home: Path, plain: Engine, flag: str
) -> None:
    assert main(["preset", "create", "brief", "--from", "tiny", flag, "--max-tokens", "3"]) == 0
    said: list[str] = []
    with load("brief", report=said.append) as engine:
        assert engine.generate("the an").text == plain.generate("the an", max_tokens=3).text
        assert engine.chat().thinking is None
    assert "the preset 'brief' sets think, for which tiny has no switch: it is ignored" in said
    assert run(capsys, "chat", "brief", "hi")[0] == 0
    names = ModelNames(model_home())
    with serving(names, lambda name: load(names.source(name))) as served:
        asked = {"model": "brief", "messages": [{"role": "user", "content": "the an"}]}
        assert served.post("/v1/chat/completions", asked).json()["usage"]["completion_tokens"] == 3
        assert served.post("/api/chat", {**asked, "stream": False}).json()["eval_count"] == 3


def test_a_preset_may_have_a_drafter_a_context_and_a_schema(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object", "minProperties": -1, "$ref": 3}')
    options = ["--from", "tiny", "--drafter", "ngram", "--context", 128, "--schema", tmp_path / "schema.json"]
    assert run(capsys, "preset", "create", "json", *options)[0] == 2
    (tmp_path / "schema.json").write_text(
        '{"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}'
    )
    assert run(capsys, "preset", "create", "json", *options)[0] == 0
    with load("json") as engine:
        assert (engine.open_drafters, engine.context_length) == (("ngram",), 128)
        assert json.loads(engine.generate("the", max_tokens=30).text)["a"] == 1
    with load("json", drafter="suffix") as engine:
        assert engine.open_drafters == ("suffix",)


def test_what_a_command_line_states_comes_before_a_preset_whatever_its_value(
    capsys: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[Wish] = []

    def note(wish: Wish) -> None:
        opened.append(wish)
        raise UsageError("noted")

    monkeypatch.setattr("edgespec.engine.load._open_on_a_device_that_runs", note)
    PresetFolder(home).write(Preset(name="still", model="tiny", options={"drafter": "none", "exact": True}))
    (tmp_path / "config.toml").write_text('drafter = "suffix"\n')
    monkeypatch.setenv("EDGESPEC_CONFIG", str(tmp_path / "config.toml"))
    for flags in ((), ("--drafter", "auto", "--no-exact")):
        assert "noted" in run(capsys, "bench", "still", *flags)[2]
    options = command_parser().parse_args(["serve", "tiny", "--drafter", "small"])
    names = ModelNames(model_home(), "tiny")
    for name in ("still", "tiny"):
        with pytest.raises(UsageError, match="noted"):
            _open_engine(options, names, name)
    with pytest.raises(UsageError, match="noted"):
        load_engine(options, model="still", drafter="auto")
    assert [wish.drafter for wish in opened] == ["none", "auto", "none", "small", "auto"]
    assert [wish.exact for wish in opened] == [True, False, True, False, True]


def test_presets_follow_their_model_and_are_named_when_it_goes(
    capsys: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = run(capsys, "models", "rename", "tiny", "small")
    assert (code, "presets that use small now: poet" in err) == (0, True), err
    assert json.loads(run(capsys, "preset", "show", "poet", "--json")[1])["model"] == "small"
    code, _, err = run(capsys, "models", "rm", "poet")
    assert (code, "'poet' is a preset, not a prepared model; edgespec preset rm poet" in err) == (3, True), err
    code, _, err = run(capsys, "models", "rm", "tiny")
    assert (code, "'tiny' was renamed; use its new name: small\n" in err) == (3, True), err
    code, _, err = run(capsys, "preset", "create", "tiny", "--from", "small")
    assert (code, "'tiny' is an earlier name of the model 'small'" in err) == (2, True), err
    monkeypatch.setattr("sys.stdin", StringIO("n\n"))
    code, out, err = run(capsys, "models", "rm", "small")
    assert (code, out, "presets of small, which need it: poet" in err) == (1, "", True), err
    assert "small stays; to remove it without being asked: edgespec models remove small --yes\n" in err
    stays = run(capsys, "models", "rm", "small", "--json")
    assert (stays[0], json.loads(stays[1])) == (1, {"removed": [], "download_bytes": 0})
    assert (home / "models" / "small").exists()
    assert run(capsys, "models", "rm", "small", "--yes")[0] == 0
    assert not (home / "models" / "small").exists()


def test_a_preset_whose_model_is_gone_says_so(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    (home / "models" / "tiny").unlink()
    with pytest.raises(ModelError, match="the preset 'poet' is of the model 'tiny': no model 'tiny'"):
        load("poet")
    code, _, err = run(capsys, "chat", "poet", "--prompt", "x")
    assert (code, "the preset 'poet' is of the model 'tiny'" in err) == (3, True)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("temperature = -1.0", "temperature is -1.0; wanted a number from 0.0"),
        ("context = 1", "context is 1; wanted a whole"),
        ("schema = '{\"type\": 3}'", "the schema has a required or a type at #"),
    ],
)
def test_a_file_of_a_preset_that_was_changed_for_the_worse_is_named(
    line: str, said: str, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    (home / "presets" / "poet.toml").write_text(f'model = "tiny"\n{line}\n')
    code, _, err = run(capsys, "chat", "poet", "--prompt", "x")
    assert (code, f"the preset 'poet': {said}" in err) == (2, True), err
    names = ModelNames(model_home())
    with pytest.raises(UsageError, match="the preset 'poet': "):
        load(names.source(names.loaded_as("poet")[0]))


def test_clients_name_a_preset_as_a_model(home: Path, plain: Engine) -> None:
    wanted = plain.generate(
        [Message("system", "in the"), *EXAMPLES, Message("user", "the an")], sampling=SAMPLING, max_tokens=9
    )
    names = ModelNames(model_home())
    # Answers without a limit end with the context.
    with serving(names, lambda name: load(names.source(name), context=128)) as served:
        PresetFolder(home).write(replace(PresetFolder(home).read("poet"), model=str(home / "models" / "tiny")))
        listed = {each["id"]: each.get("preset_of") for each in served.client.get("/v1/models").json()["data"]}
        assert listed == {"poet": "tiny", "tiny": None}
        assert [*listed] == ["tiny", "poet"], "models come first"
        folder = PresetFolder(home)
        folder.write(replace(folder.read("poet"), name="brief", options={"context": 64}))
        lengths = {each["id"]: each["context_length"] for each in served.client.get("/v1/models").json()["data"]}
        assert lengths == {"poet": lengths["tiny"], "tiny": lengths["tiny"], "brief": 64}
        assert served.post("/api/show", {"model": "brief"}).json()["model_info"]["llama.context_length"] == 64
        folder.remove("brief")
        tags = {
            each["name"]: each["details"]["parent_model"]
            for each in served.client.get("/api/tags").json()["models"]
        }
        assert tags == {"poet:latest": "tiny", "tiny:latest": ""}
        shown = served.post("/api/show", {"model": "poet"}).json()
        assert shown["system"] == "in the"
        assert shown["parameters"] == "temperature 0.7\nseed 5\nnum_predict 9\n"
        stated, _ = read_modelfile(shown["modelfile"], home / "Modelfile")
        own = PresetFolder(home).read("poet")
        assert parse_preset("poet", stated, "here") == replace(own, model="tiny"), "no path of the server"
        asked: dict[str, Any] = {"model": "poet", "messages": [{"role": "user", "content": "the an"}]}
        seeded = {**asked, "seed": 5}
        answer = served.post("/v1/chat/completions", seeded).json()
        assert answer["choices"][0]["message"]["content"] == wanted.text
        assert (answer["model"], answer["usage"]["prompt_tokens"]) == ("poet", wanted.prompt_tokens)
        repeated = served.post("/v1/chat/completions", asked).json()
        assert repeated["choices"][0]["message"]["content"] == wanted.text, "by the seed of the preset"
        ollama = {**asked, "stream": False, "options": {"seed": 5}}
        assert served.post("/api/chat", ollama).json()["message"]["content"] == wanted.text
        for route in ("chat", "generate"):
            stated = {**ollama, "prompt": "the an", "options": {"seed": 5, "num_predict": -1}}
            assert served.post(f"/api/{route}", stated).json()["eval_count"] > 9
            raw = {**stated, "options": {"seed": 5}, "raw": True}
            assert served.post(f"/api/{route}", raw).json()["eval_count"] == 9
        assert [*served.services.host.hosted] == ["tiny"], "the preset shares its model"
        other = served.post("/v1/chat/completions", {**asked, "model": "tiny", "max_tokens": 9}).json()
        assert other["choices"][0]["message"]["content"] == plain.generate("the an", max_tokens=9).text
        listed = {each["id"]: each["is_loaded"] for each in served.client.get("/v1/models").json()["data"]}
        assert listed == {"poet": True, "tiny": True}
        assert main(["preset", "create", "own", "--from", "poet", "--drafter", "none"]) == 0
        assert served.post("/api/chat", {**ollama, "model": "own"}).json()["message"]["content"] == wanted.text
        assert [*served.services.host.hosted] == ["own"], "its drafter is chosen when it is loaded"
        (home / "presets" / "own.toml").write_text("model = [")
        (home / "presets" / "poet.toml").write_text('model = "tiny"\ntemperature = -1.0\n')
        for name, said in (("own", "presets/own.toml: Invalid"), ("poet", "'poet': temperature is -1.0; wanted")):
            refused = served.post("/v1/chat/completions", {**asked, "model": name})
            assert refused.status_code == 503
            assert said in refused.json()["error"]["message"]
            assert str(home) not in refused.text
            assert said in served.post("/api/chat", {**ollama, "model": name}).json()["error"]
        assert served.client.get("/v1/models").status_code == served.client.get("/api/tags").status_code == 200
        (home / "presets" / "poet.toml").write_text('model = "tiny"\n')
        (home / "models" / "tiny").unlink()
        gone = served.post("/v1/chat/completions", asked)
        assert gone.status_code == 404
        assert (
            "the preset 'poet' is of the model 'tiny', which is not prepared here"
            in gone.json()["error"]["message"]
        )


def test_a_preset_of_a_file_is_listed_and_prepared_at_its_first_request(home: Path, tiny_gguf: Path) -> None:
    assert main(["preset", "create", "later", "--from", str(tiny_gguf), "--max-tokens", "3"]) == 0
    names = ModelNames(model_home())
    with serving(names, lambda name: load(names.source(name), offline=True)) as served:
        for is_prepared in (False, True):
            models = {each["id"]: each for each in served.client.get("/v1/models").json()["data"]}
            assert (models["later"]["is_loaded"], "context_length" in models["later"]) == (
                is_prepared,
                is_prepared,
            )
            assert (models["later"]["preset_of"] == tiny_gguf.name) != is_prepared
            asked = {"model": "later", "messages": [{"role": "user", "content": "the an"}]}
            assert served.post("/v1/chat/completions", asked).json()["usage"]["completion_tokens"] == 3
            assert [*served.services.host.hosted] == ["later"], (
                "it is not loaded anew by the name that it has then"
            )


def test_the_context_of_the_server_is_stated_and_that_of_a_loaded_model(home: Path) -> None:
    names = ModelNames(model_home(), context=128)
    with serving(names, lambda name: load(names.source(name), context=64)) as served:
        for context in (128, 64):
            listed = served.client.get("/v1/models").json()["data"]
            shown = [served.post("/api/show", {"model": name}).json()["model_info"] for name in ("tiny", "poet")]
            assert {each["context_length"] for each in listed} == {context}
            assert {each["llama.context_length"] for each in shown} == {context}
            served.chat(max_tokens=1)  # loads it


def test_the_smaller_limit_of_a_server_and_a_preset_holds(home: Path) -> None:
    names = ModelNames(model_home())
    for limit, expected in ((20, 9), (5, 5)):
        with serving(names, lambda name: load(names.source(name)), limits=Limits(num_tokens=limit)) as served:
            asked: dict[str, Any] = {
                "model": "poet",
                "messages": [{"role": "user", "content": "the an"}],
                "seed": 5,
            }
            length = served.post("/v1/chat/completions", asked).json()["usage"]["completion_tokens"]
            assert length == expected
            stated = {**asked, "stream": False, "options": {"num_predict": -1, "seed": 5}}
            assert served.post("/api/chat", stated).json()["eval_count"] == limit


def test_a_preset_says_where_its_tools_hold_and_that_its_model_is_to_be_prepared(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path, tiny_gguf: Path
) -> None:
    (tmp_path / "own.py").write_text("def now() -> str:\n    return 'noon'\n")
    code, _, err = run(capsys, "preset", "create", "helper", "--from", "tiny", "--tools", tmp_path / "own.py")
    assert (code, "its tools work in edgespec chat helper only; in Python give tools=" in err) == (0, True), err
    said: list[str] = []
    load("helper", report=said.append).close()
    assert f"helper has the tools of {tmp_path / 'own.py'} in edgespec chat helper alone" in said
    code, _, err = run(capsys, "chat", "helper", "hi")
    assert (code, "cannot call tools" in err, "alone" in err) == (3, True, False), err
    code, _, err = run(capsys, "preset", "create", "later", "--from", tiny_gguf)
    assert (
        code,
        f"or a server prepares its model when it is first used; to do so now: edgespec models pull {tiny_gguf}\n"
        in err,
    ) == (0, True), err
