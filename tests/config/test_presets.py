"""Files of presets and Modelfiles: what they say, and what is wrong in them."""

from pathlib import Path
from typing import Any

import pytest

from edgespec.config.modelfile import read_modelfile
from edgespec.config.options import OPTIONS, PRESET_OPTIONS
from edgespec.config.presets import Preset, PresetFolder, parse_preset
from edgespec.errors import ModelError, UsageError

EXAMPLE = ({"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"})
POET = Preset(
    name="poet", model="tiny", options={"system": 'In "verse",\nplease.', "temperature": 0.9, "drafter": "ngram"},
    stop=("END", "\n"), think=False, schema='{"type": "object"}', tools="/a/b.py", messages=EXAMPLE,
)  # fmt: skip


def test_a_name_of_more_bytes_than_a_file_may_have_is_that_of_no_preset(tmp_path: Path) -> None:
    (tmp_path / "presets").mkdir()
    assert not PresetFolder(tmp_path).has("日" * 96)


def test_a_preset_is_read_as_it_was_written(tmp_path: Path) -> None:
    presets = PresetFolder(tmp_path)
    assert presets.names() == []
    (tmp_path / "presets" / "folder.toml").mkdir(parents=True)
    path = presets.write(POET)
    assert path == tmp_path / "presets" / "poet.toml"
    assert presets.read("poet") == POET
    assert (presets.names(), presets.find("other"), presets.model_of("poet")) == (["poet"], None, "tiny")
    assert presets.model_of("../poet") == "../poet"
    presets.remove("poet")
    assert not path.exists()
    with pytest.raises(ModelError, match="there is no preset 'poet'; there are: none"):
        presets.remove("poet")


def test_what_a_preset_says_goes_to_load_to_the_sampling_and_to_answers() -> None:
    assert POET.load_arguments == {"drafter": "ngram"}
    assert POET.sampling == {"temperature": 0.9}
    assert POET.answer_options == {
        "stop": ("END", "\n"), "thinking": False,
        "response_format": {"type": "json_schema", "schema": {"type": "object"}},
    }  # fmt: skip


def test_every_option_has_one_use() -> None:
    for name in PRESET_OPTIONS:
        value: Any = {"whole": 7, "limit": 7, "length": 7, "number": 0.5, "switch": True}.get(
            OPTIONS[name].kind, "equality"
        )
        if OPTIONS[name].choices:
            value = OPTIONS[name].choices[0]
        preset = parse_preset("p", {"model": "m", name: value}, "here")
        uses = [preset.load_arguments, preset.sampling, preset.answer_options, preset.system or ()]
        assert sum(map(bool, uses)) == 1, name


def test_a_preset_of_a_preset_has_what_it_does_not_say() -> None:
    own = Preset(name="short", model="poet", options={"temperature": 0.1, "max-tokens": 5}, stop=("X",))
    found = own.over(POET)
    assert (found.name, found.model, found.stop, found.messages) == ("short", "tiny", ("X",), EXAMPLE)
    assert found.options == {**POET.options, "temperature": 0.1, "max-tokens": 5}
    assert (found.think, own.over(None)) == (False, own)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it names no model"),
        ("model = 3", "model is 3; wanted a text"),
        ("model = 'm'\ntempo = 1", "'tempo' is unknown; known are model"),
        ("model = 'm'\ntemperature = 'hot'", "temperature is 'hot'; wanted a number"),
        ("model = 'm'\nstop = ['']", r"stop is \[''\]; wanted texts"),
        ("model = 'm'\nschema = '{'", "schema is not a JSON schema"),
        ("model = 'm'\nthink = 'yes'", "think is 'yes'; wanted true or false"),
        ("model = 'm'\nmessages = [{role = 'assistant', content = 'x'}]", "message 1 is"),
        ("model = 'm'\nmessages = [{role = 'user', content = 'x'}]", "the last message has no answer"),
        ("model = ", "Invalid value"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    presets = PresetFolder(tmp_path)
    presets.path.mkdir()
    (presets.path / "bad.toml").write_text(text)
    with pytest.raises(ModelError, match=rf"bad\.toml: .*{said}.*edgespec preset rm bad"):
        presets.find("bad")


def test_a_modelfile_says_what_a_preset_does(tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").touch()
    text = (
        "# made for a test\nFROM ./mine.gguf\nPARAMETER temperature 0.5\nparameter\ttop_k\t40\n"
        "PARAMETER num_ctx 512\n"
        'PARAMETER num_predict -1\nPARAMETER stop "A B"\nPARAMETER stop C\nPARAMETER num_gpu 9\n'
        'LICENSE """MIT\n"""\n'
        'SYSTEM """You are\n# no comment\n"good"."""\nMESSAGE\tuser\tWhat is\tit?\n'
        'MESSAGE assistant """It\nis."""\n'
    )
    found, notes = read_modelfile(text, tmp_path / "Modelfile")
    assert found == {
        "model": str(tmp_path / "mine.gguf"), "temperature": 0.5, "top-k": 40, "context": 512,
        "max-tokens": -1, "stop": ["A B", "C"],
        "system": 'You are\n# no comment\n"good".',
        "messages": [{"role": "user", "content": "What is\tit?"}, {"role": "assistant", "content": "It\nis."}],
    }  # fmt: skip
    assert [note.split("Modelfile:")[1] for note in notes] == [
        "9: the parameter num_gpu has no effect", "10: LICENSE has no effect",
    ]  # fmt: skip
    assert read_modelfile("FROM llama:latest", tmp_path / "Modelfile")[0] == {"model": "llama"}
    other = read_modelfile("FROM ./other.gguf", tmp_path / "Modelfile")[0]["model"]
    assert other == str(tmp_path / "other.gguf"), "beside the Modelfile, whatever the working folder has"
    assert read_modelfile("FROM ~nobody-here/m.gguf", tmp_path / "Modelfile")[0] == {
        "model": str(tmp_path / "~nobody-here" / "m.gguf")
    }
    assert read_modelfile("FROM llama:8b\r\n", tmp_path / "Modelfile")[0] == {"model": "llama:8b"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FROM a\nTEMPLATE {{ .Prompt }}", "Modelfile:2: TEMPLATE is not for presets: a model here has its own"),
        ("ADAPTER x", "edgespec export BASE --adapter"),
        ("PARAMETER mirostat 1", "mirostat is not for presets"),
        ("PARAMETER temperature warm", "temperature is 'warm'; wanted a number"),
        ("PARAMETER top_k 1.5", "top_k is '1.5'; wanted a whole number"),
        ("PARAMETER seed 1.5", "Modelfile:1: seed is '1.5'; wanted a whole number"),
        (
            "PARAMETER tempreature 0.5",
            "Modelfile:1: the parameter 'tempreature' is unknown; did you mean temperature?",
        ),
        ("FROM a\nMESSAGE bob x", "Modelfile:2: a MESSAGE is of the role 'bob'; wanted user or assistant"),
        ('SYSTEM """begins', 'Modelfile:1: the text that begins with """ has no end'),
        ("RUN x", "'RUN' is not an instruction; known are FROM"),
        ("FROM", "Modelfile:1: FROM says nothing"),
        ("MESSAGE system x", "give it as SYSTEM"),
    ],
)
def test_a_line_of_a_modelfile_that_cannot_be_followed_is_named(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_modelfile(text, Path("Modelfile"))
    assert said in str(caught.value)
