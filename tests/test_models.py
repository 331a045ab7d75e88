"""Models from Python: what edgespec models does, by import."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec import IntegrityError, LoadProgress, ModelError, UsageError, devices, load, models
from edgespec.cli.main import main
from edgespec.config.presets import Preset
from edgespec.setup.catalog import CATALOG
from edgespec.setup.given_names import source_of
from edgespec.setup.home import ModelHome
from edgespec.setup.inventory import PreparedModel


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_pulled_model_is_listed_loaded_by_its_name_renamed_and_removed(
    home: Path, tiny_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    steps: list[LoadProgress] = []
    model = models.pull(tiny_gguf, name="mine", report=lines.append, progress=steps.append)
    assert (model.name, model.kind, model.form, model.problem) == ("mine", "model", "cpu", None)
    assert models.list() == (model,) == (models.show("mine"),)
    assert lines
    assert steps[-1].done_bytes == steps[-1].total_bytes
    with load("mine", drafter="none", home=home) as engine:
        assert engine.manifest.name == "mine"
    assert models.pull(tiny_gguf, name="mine").name == "mine", "it is there already"
    assert models.rename("mine", "mine").name == "mine"
    with pytest.raises(UsageError, match="'suffix' has a meaning for drafter=; give another name"):
        models.rename("mine", "suffix")
    renamed = models.pull(tiny_gguf, name="yours", report=lines.append)
    assert lines[-1] == "mine has the name yours now; mine still finds it"
    assert models.show("mine") == renamed
    assert Path(renamed.path) == home / "models" / "yours"
    assert main(["models", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prepared"] == [dataclasses.asdict(each) for each in models.list()]
    assert models.remove("yours") == renamed.bytes
    assert models.list() == ()


def test_a_damaged_model_is_found_and_pulled_again(home: Path, tiny_gguf: Path) -> None:
    model = models.pull(tiny_gguf)
    models.verify(model.name)
    (Path(model.path) / "tokenizer.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"tokenizer\.json"):
        models.verify(model.name)
    models.verify(models.pull(tiny_gguf).name)


@pytest.mark.parametrize("damage", ["no manifest", "a pipe", "cut short"])
def test_a_model_that_cannot_be_read_says_how_to_repair_it_which_loses_no_file(
    home: Path, tiny_gguf: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    folder = Path(models.pull(tiny_gguf).path)
    (folder / "notes.txt").write_text("mine")
    if damage == "cut short":
        os.truncate(folder / "model.onnx.data", 10)
    else:
        (folder / "edgespec.json").unlink()
    if damage == "a pipe":
        os.mkfifo(folder / "edgespec.json")
    way, code = f"repair it: edgespec models pull {tiny_gguf}", 6 if damage == "cut short" else 3
    for command in (["chat", str(tiny_gguf), "-p", "hi"], ["models", "verify", folder.name], ["models", "list"]):
        assert main(command) == (0 if command[-1] == "list" else code)
        assert way in "".join(capsys.readouterr())
    assert main(["models", "pull", str(tiny_gguf)]) == 0
    assert main(["models", "verify", folder.name]) == 0
    assert (folder / "notes.txt").read_text() == "mine"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_model_that_another_process_names_while_it_is_pulled_has_the_wished_name_in_the_end(
    home: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_export = ModelHome.note_export

    def note_late(self: ModelHome, *arguments: Any, **named: Any) -> None:
        note_export(self, *arguments, **named)
        [made] = models.list()
        models.rename(made.name, "theirs")

    monkeypatch.setattr(ModelHome, "note_export", note_late)
    assert models.pull(tiny_gguf, name="mine").name == "mine"
    assert [each.name for each in models.list()] == ["mine"]
    assert source_of(home, "mine") == str(tiny_gguf)


def test_export_has_a_name_or_a_folder_and_the_precision_that_is_wished(
    home: Path, tiny_gguf: Path, tmp_path: Path
) -> None:
    inside = models.export(tiny_gguf, name="small", precision="fp32", context_length=64, check=False)
    outside = models.export(str(tiny_gguf), output=tmp_path / "own", precision="int8", check=False)
    assert (inside.precision, inside.check) == ("fp32", None)
    assert [each.name for each in models.list()] == ["small"]
    assert (outside.path, outside.precision) == (str(tmp_path / "own"), "int8")
    with load("small", drafter="none") as engine:
        assert engine.context_length == 64
    for arguments in (
        {},
        {"name": "a", "output": tmp_path / "a"},
        {"name": "small"},
        {"output": tmp_path / "own"},
    ):
        with pytest.raises(UsageError):
            models.export(tiny_gguf, check=False, **arguments)


def test_another_home_has_models_of_its_own(home: Path, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "other" / "models" / "tiny")
    assert [model.name for model in models.list(tmp_path / "other")] == ["tiny"]
    assert models.list() == ()
    assert models.prune(str(tmp_path / "other")) == 0


def test_what_cannot_be_done_is_a_public_error(home: Path, tiny_gguf: Path) -> None:
    for call in (
        lambda: models.show("nothing"),
        lambda: models.remove("nothing"),
        lambda: models.rename("nothing", "something"),
        lambda: models.pull("nothing"),
        lambda: models.verify("nothing"),
    ):
        with pytest.raises(ModelError, match="nothing"):
            call()
    for name in ("", "a b", "smollm2-135m"):
        with pytest.raises(UsageError, match="name"):
            models.pull(tiny_gguf, name=name)
    for wrong in (None, 5, ["a"]):
        with pytest.raises(UsageError, match="wanted a text or a path"):
            models.pull(wrong)  # type: ignore[arg-type]
    unfit: tuple[tuple[dict[str, Any], str], ...] = (
        ({"name": 3}, "name is 3; wanted a text"),
        ({"name": "made", "device": None}, "device is None; wanted a text"),
        ({"name": "made", "context_length": -1}, "context_length= is -1, wanted 64 or more tokens"),
        ({"name": "made", "context_length": "64"}, "context_length= is '64', wanted 64 or more tokens"),
        ({"name": "made", "progress": 3}, "progress is 3; wanted a function"),
        ({"name": "made", "calibration": "a text"}, "calibration is 'a text'; wanted a list of texts"),
    )
    for options, said in unfit:
        with pytest.raises(UsageError, match=said):
            models.export(tiny_gguf, **options)
    assert models.list() == ()


def test_the_catalogue_says_what_a_model_takes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = {model.name: model for model in models.catalog()}
    assert known.keys() == CATALOG.keys()
    assert known["qwen2.5-7b"].drafter == "qwen2.5-0.5b"
    assert main(["models", "list", "--all"]) == 0
    (row,) = re.findall(r"^llama-3\.2-1b .*", capsys.readouterr().out, re.MULTILINE)
    assert str(known["llama-3.2-1b"].head) in row
    assert all(model.disk_bytes > 0 and model.memory_bytes > 0 for model in known.values())
    assert repr(known["smollm2-135m"]) == "<CatalogModel smollm2-135m, 0.1 GB to download>"


def test_devices_are_listed_with_the_cpu_among_them() -> None:
    cpu = next(each for each in devices() if each.device == "cpu")
    assert cpu.is_usable
    assert repr(cpu).startswith("<cpu: usable cpu")


def test_the_module_is_there_without_an_import_of_its_own() -> None:
    assert edgespec.models is models


@pytest.mark.parametrize("named", ["qwen3-4b:w8a16", "poet"])
def test_a_preset_is_pulled_with_all_that_its_model_is(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    pulled: list[tuple[str, bool]] = []

    def pull(model: str, **how: Any) -> PreparedModel:
        pulled.append((model, how["calibration"] is not None))
        return PreparedModel(name=model, path=model, bytes=0)

    ModelHome(home).presets.write(Preset(name="poet", model="qwen3-4b:w8a16"))
    monkeypatch.setattr(models, "pull", pull)
    assert main(["models", "pull", named]) == 0
    assert pulled == [(named, True), ("qwen3-0.6b", True)]
