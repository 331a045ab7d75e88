"""Keeping house: plans, cards, and the models of the home."""

import errno
import json
import os
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from io import StringIO
from itertools import pairwise
from pathlib import Path
from time import sleep
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from edgespec.cli.main import main
from edgespec.draft.answer_cache import AnswerCache
from edgespec.engine.load import load
from edgespec.engine.pair_export import PairHalf, export_pair
from edgespec.errors import EdgeSpecError, IntegrityError, ModelError
from edgespec.export.convert import export_model
from edgespec.export.folder_size import OTHER_BYTES
from edgespec.export.options import ExportOptions, Trimming
from edgespec.export.output import ExportProgress, model_card
from edgespec.export.plan import plan_model
from edgespec.manifest import Origin, read_manifest
from edgespec.server.model_names import ModelNames
from edgespec.setup import given_names
from edgespec.setup.catalog import CATALOG, HubRepository
from edgespec.setup.drafting_target import find_export_source
from edgespec.setup.home import ModelHome
from edgespec.setup.inventory import Inventory
from edgespec.setup.open_model import open_decoder, open_model
from edgespec.setup.repository import HubId
from edgespec.setup.snapshot import LocalSource
from edgespec.system.command_line import quote
from edgespec.system.disk import hold_lock
from edgespec.system.units import format_bytes


@pytest.fixture(scope="module")
def tiny_int8(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    export_model(tiny_gguf, folder, precision="int8", origin=Origin(license="mit"))
    return folder


@pytest.fixture
def home(tmp_path: Path, tiny_int8: Path, monkeypatch: pytest.MonkeyPatch) -> ModelHome:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    home = ModelHome(tmp_path / "home", offline=True)
    shutil.copytree(tiny_int8, home.models / "tiny")
    return home


def test_pair_without_its_file_is_listed_as_a_pair(tiny_model: Path, tmp_path: Path) -> None:
    home = ModelHome(tmp_path)
    for part in ("target", "drafter"):
        shutil.copytree(tiny_model, home.models / "both" / part)
    (listed,) = Inventory(home).models()
    assert (listed.kind, listed.problem) == ("pair", None)


def test_models_are_listed_verified_and_removed(home: ModelHome) -> None:
    (model,) = Inventory(home).models()
    assert (model.name, model.precision, model.source, model.problem) == ("tiny", "int8", "tiny.gguf", None)
    assert model.bytes == sum(path.stat().st_size for path in (home.models / "tiny").iterdir())
    num_files, others = Inventory(home).verify("tiny")
    assert (num_files, others) == (len(read_manifest(home.models / "tiny").files), [])
    (home.models / "tiny" / "notes.txt").write_text("mine")
    assert Inventory(home).verify("tiny")[1] == ["notes.txt"]
    assert Inventory(home).remove("tiny") == (home.models / "tiny", 0)
    assert not list(Inventory(home).models())


def test_flipped_byte_is_found_by_verify(home: ModelHome, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "verify"]) == 0
    path = home.models / "tiny" / "model.onnx.data"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError):
        Inventory(home).verify("tiny")
    capsys.readouterr()
    assert main(["models", "verify", "tiny", "--json"]) == 6
    assert "changed since its export" in json.loads(capsys.readouterr().out)["tiny"]["problem"]
    path.unlink()
    assert main(["models", "verify"]) == 3


def test_a_disk_that_is_read_only_is_named(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for module, name in ((os, "rename"), (os, "replace"), (shutil, "rmtree"), (Path, "unlink")):
        monkeypatch.setattr(module, name, refuse)
    for command in ("models rename tiny mine", "models remove tiny --yes", "preset create poet --from tiny -q"):
        assert main(command.split()) == 1
        assert "nothing can be changed on that disk" in capsys.readouterr().err, command


@pytest.mark.parametrize("name", ["..", "../home", "", "nothing", "/etc"])
def test_what_is_no_model_of_the_home_is_never_removed(home: ModelHome, name: str) -> None:
    with pytest.raises(ModelError, match="not a prepared model"):
        Inventory(home).remove(name)


def test_model_that_is_damaged_is_listed_with_its_problem(
    home: ModelHome, capsys: pytest.CaptureFixture[str]
) -> None:
    (home.models / "tiny" / "edgespec.json").write_text("{")
    (model,) = Inventory(home).models()
    assert "not JSON" in (model.problem or "")
    assert main(["models", "list", "--all"]) == 0
    assert "smollm2-135m        98 MB" in capsys.readouterr().out
    assert main(["models", "list"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("PREPARED")
    assert "smollm2-135m        98 MB" not in shown
    assert len(shown.splitlines()) < 20


def test_home_that_is_a_file_and_models_that_are_links(home: ModelHome, tmp_path: Path) -> None:
    (home.models / "linked").symlink_to(home.models / "tiny")
    Inventory(home).remove("linked")
    assert (home.models / "tiny").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(EdgeSpecError, match="not a folder"):
        list(Inventory(ModelHome(tmp_path / "file")).models())


def test_pull_prepares_and_remove_forgets(
    home: ModelHome, tiny_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "pull", str(tiny_gguf)]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert read_manifest(folder).name == folder.name
    assert main(["models", "remove", folder.name]) == 0
    assert not folder.exists()


def test_a_model_of_a_file_gets_a_name_by_which_it_is_listed_served_loaded_and_removed(
    home: ModelHome, tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = shutil.copy(tiny_gguf, tmp_path / "Some-Model.Q4_1.gguf")
    assert main(["models", "pull", str(file), "--name", "mine"]) == 0
    assert capsys.readouterr().out == f"{home.models / 'mine'}\n"
    assert [model.name for model in Inventory(home).models()] == ["mine", "tiny"]
    assert ModelNames(home).names() == ["mine", "tiny"]
    assert home.resolve("mine") == home.resolve(str(file)) == home.models / "mine", "it is not exported again"
    with load("mine", drafter="none", home=home.path) as engine:
        assert engine.manifest.name == "mine"
    assert main(["models", "pull", str(file), "--name", "mine"]) == 0
    assert main(["models", "rename", "mine", "yours"]) == 0
    assert home.resolve(str(file)) == home.models / "yours"
    assert Inventory(home).verify("yours")[0] > 3
    assert main(["models", "rm", "yours"]) == 0
    assert home.find(str(file)) is None
    assert main(["models", "ls", "--json"]) == 0


def test_a_name_of_old_finds_the_model_until_another_one_has_it(
    home: ModelHome, tiny_gguf: Path, tmp_path: Path
) -> None:
    was = home.resolve("tiny")
    for old, new in pairwise(["tiny", "small", "large"]):
        assert main(["models", "rename", old, new]) == 0
    now = home.models / "large"
    assert [home.resolve(name) for name in ("tiny", "small", str(was), "large")] == [now] * 4
    assert Inventory(home).verify("small")[0] > 3
    assert ModelNames(home).require("tiny:latest") == "large"
    assert main(["export", str(tiny_gguf), "--name", "small", "--precision", "int8", "--no-check"]) == 0
    assert [home.resolve(name).name for name in ("tiny", "small")] == ["large", "small"]
    assert main(["models", "rm", "tiny"]) == 3, "what is deleted is named by its name of now"
    assert main(["models", "rm", "large"]) == 0
    with pytest.raises(ModelError, match="no model 'tiny'"):
        home.resolve("tiny")


def test_a_model_of_the_catalogue_gets_its_own_name_back(home: ModelHome) -> None:
    (home.models / "tiny").rename(home.models / "smollm2-135m")
    for old, new in pairwise(["smollm2-135m", "mine", "smollm2-135m"]):
        assert main(["models", "rename", old, new]) == 0
    assert home.find("smollm2-135m") == home.find("mine") == home.models / "smollm2-135m"


def test_a_repository_is_not_taken_for_the_model_that_had_its_name(home: ModelHome) -> None:
    for old, new in pairwise(["tiny", "small", "large"]):
        assert main(["models", "rename", old, new]) == 0
    assert home.find("org/small") is None


@pytest.mark.parametrize(
    "name", ["tiny", "smollm2-135m", "a/b", ".hidden", "a b", "", "a:int4", "..", "gpu", "Con.1", "x" * 97]
)
def test_a_name_that_no_model_can_have_is_refused_before_anything_is_done(
    home: ModelHome, tiny_gguf: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    commands = [
        ["models", "pull", str(tiny_gguf), "--name", name],
        ["export", str(tiny_gguf), "--name", name],
        ["models", "rename", "tiny", name],  # to its own name it stays as it is
    ]
    for command in commands[0 if name else 1 : 2 if name == "tiny" else 3]:
        assert main(command) == 2, command
        assert "name" in capsys.readouterr().err
    assert home.names() == ["tiny"]


def test_what_is_exported_under_a_name_is_a_model_of_the_home(home: ModelHome, tiny_gguf: Path) -> None:
    assert main(["export", str(tiny_gguf), "--name", "mine", "--precision", "int8", "--no-check"]) == 0
    assert read_manifest(home.resolve("mine")).name == "mine"
    assert main(["models", "remove", "mine"]) == 0


def test_models_alone_lists_and_show_tells_of_one(home: ModelHome, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for command in (["models"], ["models", "list"], ["models", "ls"]):
        assert main(command) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
    assert main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prepared"][0]["name"] == "tiny"
    assert main(["models", "show", "tiny"]) == 0
    shown = capsys.readouterr().out
    assert all(line in shown for line in ("name: tiny\n", "precision: int8\n", "license: mit\n"))
    with pytest.raises(SystemExit) as ended:
        main(["version"])
    assert (ended.value.code, capsys.readouterr().out.startswith("edgespec ")) == (0, True)


@pytest.mark.parametrize("file", ["tokenizer.json", "model.onnx.data", "edgespec.json"])
def test_pull_repairs_what_is_damaged(
    home: ModelHome, tiny_gguf: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    assert main(["models", "pull", str(tiny_gguf)]) == 0
    folder = Path(capsys.readouterr().out.strip())
    with (folder / file).open("ab") as damaged:
        damaged.write(b"x")
    assert main(["models", "pull", str(tiny_gguf)]) == 0
    assert "preparing it again" in capsys.readouterr().err
    assert main(["models", "verify", folder.name]) == 0
    assert [path.name for path in home.models.iterdir() if path.name.startswith(".")] == []


def test_pull_leaves_a_damaged_model_whose_source_is_not_known(
    home: ModelHome, capsys: pytest.CaptureFixture[str]
) -> None:
    with (home.models / "tiny" / "tokenizer.json").open("ab") as damaged:
        damaged.write(b"x")
    assert main(["models", "pull", "tiny"]) == 3
    assert "preparing it again" in capsys.readouterr().err
    assert (home.models / "tiny" / "tokenizer.json").is_file()


def test_prune_leaves_a_model_alone_that_is_being_repaired(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home.models / "tiny" / "tokenizer.json").write_text("damaged")
    (home.models / ".tiny.damaged.partial").mkdir()  # of a repair that was killed
    (home.models / ".tiny.damaged.partial" / "model.onnx").touch()

    def resolve(*model: str, **about: Any) -> Path:
        Inventory(home).prune()
        raise ModelError("no network")

    monkeypatch.setattr(ModelHome, "resolve", resolve)
    with pytest.raises(ModelError, match="no network"):
        Inventory(home).repaired("tiny", "cpu")
    assert (home.models / "tiny" / "tokenizer.json").read_text() == "damaged"
    assert [path.name for path in home.models.iterdir()] == ["tiny"]


def test_a_model_that_another_process_has_repaired_is_not_repaired_again(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = home.models / "tiny" / "tokenizer.json"
    sound = file.read_bytes()
    file.write_text("damaged")
    monkeypatch.setattr(ModelHome, "resolve", Mock(side_effect=ModelError("no network")))
    said: list[str] = []
    with ExitStack() as other:
        other.enter_context(hold_lock(home.models / ".tiny.damaged.lock"))

        def repair(line: str) -> None:
            said.append(line)
            file.write_bytes(sound)
            other.close()

        assert Inventory(replace(home, report=repair)).repaired("tiny", "cpu") == home.models / "tiny"
    assert said == [f"process {os.getpid()} is repairing this model; waiting"]


def test_use_is_remembered_and_forgotten_with_the_model(home: ModelHome, tmp_path: Path) -> None:
    assert next(Inventory(home).models()).last_used is None
    load(home.models / "tiny", drafter="none", home=home.path).close()
    used = datetime.fromisoformat(next(Inventory(home).models()).last_used or "")
    assert abs((datetime.now(UTC) - used).total_seconds()) < 60
    with home.uses.hold(tmp_path / "elsewhere"):
        pass
    assert [path.name for path in (home.path / "used").iterdir()] == ["tiny"]
    Inventory(home).remove("tiny")
    assert not list((home.path / "used").iterdir())


def test_a_model_that_a_program_has_open_is_neither_removed_nor_renamed(
    home: ModelHome, capsys: pytest.CaptureFixture[str]
) -> None:
    (home.path / "used").mkdir()
    (home.path / "used" / "tiny@1-left").touch()  # by a program that was killed
    engine = load("tiny", drafter="none", home=home.path)
    assert main(["models", "rename", "tiny", "tiny"]) == 0
    assert "tiny has that name already; nothing was changed" in capsys.readouterr().err
    for command in (["rm", "tiny"], ["rename", "tiny", "small"]):
        assert main(["models", *command]) == 1
        said = capsys.readouterr().err
        assert f"tiny is open in process {os.getpid()} (" in said
        assert "end that program first" in said
    assert engine.generate("the", max_tokens=2).text
    engine.close()
    assert main(["models", "rm", "tiny"]) == 0
    assert not list((home.path / "used").iterdir())


def test_a_model_that_is_being_opened_is_neither_removed_nor_renamed(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders = list[str | None]()

    def note_holder(*given: Any, **named: Any) -> Any:
        holders.append(home.uses.holder("tiny"))
        return open_model(*given, **named)

    monkeypatch.setattr("edgespec.engine.load.open_model", note_holder)  # which with large models takes minutes
    load("tiny", drafter="none", home=home.path).close()
    assert f"process {os.getpid()} (" in str(holders[0])
    assert home.uses.holder("tiny") is None


@pytest.mark.parametrize("order", [["rename", "mine", "small"], ["rm", "mine"]])
def test_a_folder_that_was_exported_elsewhere_is_left_to_its_owner(
    home: ModelHome, order: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home.path.parent)
    shutil.copytree(home.models / "tiny", "mine")
    assert main(["models", *order]) == 3
    said = capsys.readouterr().err
    assert said == "edgespec: mine is a model folder of your own; rename or delete the folder itself\n"
    assert main(["models", *(each.replace("mine", "home/models/tiny") for each in order)]) == 3
    assert "is the folder of a prepared model; give its name: tiny\n" in capsys.readouterr().err


def test_a_model_is_renamed_to_other_cases_on_a_disk_that_ignores_them(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a disk is imitated by a link that gives way."""
    rename = os.rename
    (home.models / "Tiny").symlink_to(home.models / "tiny", target_is_directory=True)
    monkeypatch.setattr(os, "rename", lambda old, new: (new.unlink(), rename(old, new)))
    assert main(["models", "rename", "tiny", "Tiny"]) == 0
    assert home.names() == ["Tiny"]
    assert read_manifest(home.models / "Tiny").name == "Tiny"


@pytest.mark.parametrize("part", ["setup.inventory.note_name", "manifest.replace_file"])
def test_a_model_that_cannot_be_renamed_whole_keeps_its_name(
    home: ModelHome, part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"edgespec.{part}", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    assert main(["models", "rename", "tinny", "small"]) == 3
    assert "'tinny' is not a prepared model; did you mean tiny?" in capsys.readouterr().err
    assert main(["models", "rename", "tiny", "small"]) == 1
    assert capsys.readouterr().err == "edgespec: cannot rename tiny (No space left on device); free some space\n"
    assert [model.name for model in Inventory(home).models()] == ["tiny"]
    assert read_manifest(home.models / "tiny").name == "tiny"


@pytest.mark.parametrize("other", [None, "copy", "pair/target"])
def test_a_renamed_model_drafts_from_its_earlier_answers(home: ModelHome, other: str | None) -> None:
    """The target of a pair may have the name of a model, and has the answers of that too."""
    if other:
        shutil.copytree(home.models / "tiny", home.models / other)
    manifest = read_manifest(home.models / "tiny")

    def answers(name: str) -> AnswerCache:
        return AnswerCache(home.path / "memory", name, manifest.vocab_sha256, manifest.vocab_size)

    for name, tokens in (("tiny", [5, 6]), ("small", [7])):  # the second is of a model that was removed
        old = answers(name)
        old.add(np.zeros(0, np.int32), np.array(tokens, np.int32))
        old.save()
    Inventory(home).rename("tiny", "small")
    assert answers("small").read().tolist() == [5, 6, -1]
    assert answers("tiny").read().tolist() == ([5, 6, -1] if other else [])


def test_a_damaged_model_keeps_its_name(home: ModelHome) -> None:
    (home.models / "tiny" / "tokenizer.json").unlink()
    assert main(["models", "rename", "tiny", "small"]) == 3
    assert home.names() == ["tiny"]


def test_damaged_names_are_told_once_and_put_aside(home: ModelHome, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "rename", "tiny", "small"]) == 0
    assert main(["models", "path", "tiny"]) == 0
    path = home.path / "names.json"
    whole = path.read_text()
    for number, damaged in enumerate((whole[:-3], "[" * 9999, '{"was/tiny": 1}')):
        path.write_text(damaged)
        capsys.readouterr()
        assert main(["models", "path", "tiny"]) == 3
        said, aside = capsys.readouterr().err, path.with_name(f"names.json.bak{number or ''}")
        assert said.startswith(f"edgespec: {path} is damaged (")
        assert said.count("is damaged (") == said.count(f"the damaged file was renamed to {aside}\n") == 1
        assert (aside.read_text(), path.exists()) == (damaged, False)
    assert main(["models", "rename", "small", "mine"]) == 0
    assert main(["models", "path", "small"]) == 0


def test_sources_that_are_noted_at_once_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, names = given_names._read, ["a", "b", "c"]
    monkeypatch.setattr(given_names, "_read", lambda home: (read(home), sleep(0.02))[0])
    with ThreadPoolExecutor() as pool:
        for name in names:
            pool.submit(given_names.note_source, tmp_path, name, f"{name}.gguf")
    assert [given_names.source_of(tmp_path, name) for name in names] == ["a.gguf", "b.gguf", "c.gguf"]


def test_what_was_removed_is_prepared_again_by_the_command_that_the_error_names(
    home: ModelHome, tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = shutil.copy(tiny_gguf, tmp_path / "a file.gguf")
    assert main(["export", str(file), "--name", "mine", "--no-check"]) == 0
    wrote, use = capsys.readouterr().err.splitlines()[-2:]
    assert (
        wrote == f"edgespec: wrote {home.models / 'mine'} ({format_bytes(Inventory(home).describe('mine').bytes)})"
    )
    assert use == "edgespec: use it with: edgespec chat mine"
    assert main(["models", "rename", "mine", "yours"]) == 0
    source = find_export_source(home, "yours", read_manifest(home.models / "yours"))
    assert source is not None
    assert source.words == [str(file)], "its whole path, for a command that is typed elsewhere"
    assert home.source_of("yours").path == Path(file), "a training takes the source that is noted"
    with pytest.raises(ModelError, match="there is no file or folder yours"):
        home.resolve("./yours")
    for name, model in (("poet", "yours"), ("other", str(home.models / "yours")), ("third", "tiny")):
        assert main(["preset", "create", name, "--from", model]) == 0
    assert main(["models", "rm", "yours", "tiny", "nothing", "--yes"]) == 3, "all or none"
    capsys.readouterr()
    assert main(["models", "rm", "yours"]) == 1, "it stays where nobody can be asked"
    assert main(["models", "rm", "yours", "--yes"]) == 0
    way = f"edgespec export {quote(file)} --name yours"
    assert f"presets of yours, which need it: other, poet; to get it back: {way}\n" in capsys.readouterr().err
    for words in (["chat", "yours"], ["chat", "poet"], ["chat", "other"]):
        assert main([*words, "--prompt", "x"]) == 3
        assert f"yours' any more; prepare it again: {way}\n" in capsys.readouterr().err
    assert main(["preset", "ls"]) == 0
    assert capsys.readouterr().out.count("PROBLEM: ") == 2
    assert main([*shlex.split(way)[1:], "--no-check"]) == 0
    assert main(["preset", "ls"]) == 0
    assert "PROBLEM" not in capsys.readouterr().out


def test_a_person_is_asked_before_presets_lose_their_model(
    home: ModelHome, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Typed(StringIO):
        def isatty(self) -> bool:
            return True

    assert main(["models", "pull", str(tiny_gguf)]) == 0
    name = Path(capsys.readouterr().out.strip()).name
    assert main(["preset", "create", "poet", "--from", str(tiny_gguf)]) == 0
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for typed, code, is_there in (("\n", 1, True), ("", 1, True), ("y\n", 0, False)):
        monkeypatch.setattr("sys.stdin", Typed(typed))
        assert main(["models", "rm", name]) == code
        assert (home.models / name).exists() == is_there
        assert f"presets of {name}, which need it: poet; to get it back: " in (said := capsys.readouterr().err)
        assert "remove it? [y/N] " in said


def test_path_names_the_folder_of_what_is_prepared_alone(
    home: ModelHome, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "path", "tiny"]) == 0
    assert capsys.readouterr().out == f"{home.models / 'tiny'}\n"
    assert main(["models", "path", "smollm2-135m"]) == 3
    assert "not a prepared model" in capsys.readouterr().err


def test_pull_fetches_a_pair_at_its_commits(
    home: ModelHome, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def fetched(hub: object, hub_id: HubId, revision: str, judge: object) -> LocalSource:
        asked.append((hub_id.repository, revision))
        return LocalSource(path=tiny_gguf, origin=Origin(repository=hub_id.repository, revision=revision))

    monkeypatch.setattr("edgespec.setup.home.HubFolder.fetch", fetched)
    monkeypatch.setattr("edgespec.setup.home.published", lambda name, hub: None)
    assert main(["models", "pull", "qwen2.5-7b", "--json"]) == 0
    folders = json.loads(capsys.readouterr().out)
    pair = [CATALOG[name].source for name in ("qwen2.5-7b", "qwen2.5-0.5b")]
    assert asked == [(each.repository, each.revision) for each in pair if isinstance(each, HubRepository)]
    stated = [read_manifest(Path(folders[part])) for part in ("path", "drafter")]
    assert [(manifest.name, manifest.precision, manifest.source.license) for manifest in stated] == [
        ("qwen2.5-7b", "int4", "apache-2.0"),
        ("qwen2.5-0.5b", "int8", "apache-2.0"),
    ]
    assert main(["models", "pull", "qwen2.5-7b:int4", "--no-drafter", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": folders["path"]}


@pytest.mark.slow
def test_pull_compares_with_the_source_when_asked(home: ModelHome, tiny_gguf: Path) -> None:
    assert main(["models", "pull", str(tiny_gguf), "--check"]) == 0
    assert sorted(model.check is None for model in Inventory(home).models()) == [False, True]


def test_control_characters_of_a_model_are_shown_not_obeyed(
    home: ModelHome, capsys: pytest.CaptureFixture[str]
) -> None:
    path = home.models / "tiny" / "edgespec.json"
    document = json.loads(path.read_text())
    document["architecture"] = "\x1b[2Jllama"
    path.write_text(json.dumps(document))
    assert main(["models", "list"]) == 0
    out = capsys.readouterr().out
    assert "\\x1b[2Jllama" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("source", {}),
        ("fp32", {}),
        ("fp16", {}),
        ("int8", {"block_size": 64}),
        ("int4", {}),
        ("auto", {}),
        ("int4", {"form": "gpu"}),
        ("fp16", {"form": "npu"}),
        ("source", {"trimming": Trimming(keep=frozenset({0}))}),
        ("int8", {"hidden_layers": (0,)}),
    ],
)
def test_plan_has_the_bytes_that_are_written(
    tiny_gguf: Path, tmp_path: Path, precision: str, options: dict[str, Any]
) -> None:
    plan = plan_model(tiny_gguf, ExportOptions(precision=precision, **options)).cost
    manifest = export_model(tiny_gguf, tmp_path / "out", precision=precision, **options)
    written = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    others = written.pop("edgespec.json") + written.pop("README.md")
    assert plan.precision == manifest.precision
    # Of some tensors a part is smaller than a page and the whole is larger, which begins at a page in the plan.
    assert 0 <= plan.write_bytes - OTHER_BYTES - sum(written.values()) <= (3 * 4096 if "form" in options else 0)
    assert others < OTHER_BYTES


def test_dry_run_writes_nothing(tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", str(tiny_gguf), "--output", str(tmp_path / "out"), "--dry-run"]
    assert main([*arguments, "--drafter", str(tiny_gguf), "--drafter-precision", "int4", "--json"]) == 0
    target, drafter = json.loads(capsys.readouterr().out)
    assert (target["precision"], drafter["precision"], target["fetch_bytes"]) == ("source", "int4", 0)
    assert main([*arguments, "--precision", "auto"]) == 0
    assert "int8 (" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-7b"])
def test_dry_run_takes_names_of_the_catalogue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("edgespec.setup.home.HubFolder.preview", seen := Mock(return_value=nullcontext(None)))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Mock(free=1 << 40))
    assert main(["export", name, "--output", str(tmp_path / "out"), "--dry-run", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert (plan["source"], plan["fetch_bytes"]) == (name, CATALOG[name].fetch_bytes)
    source = CATALOG[name].source
    if isinstance(source, HubRepository):
        assert seen.call_args.args == (HubId(source.repository), source.revision)
    assert not (tmp_path / "home").exists()


def test_card_says_what_the_model_is_and_how_it_was_checked(tiny_gguf: Path, tmp_path: Path) -> None:
    manifest = export_model(
        tiny_gguf, tmp_path / "out", origin=Origin(license="apache-2.0"), open_decoder=open_decoder
    )
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert card == model_card(replace(manifest, files={}))
    assert all(word in card for word in ("tiny.gguf", "apache-2.0", manifest.source.sha256, "Compared with"))
    assert "was not compared" in model_card(replace(manifest, check=None))


def test_progress_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 4.0, 5.0, 8.0])
    monkeypatch.setattr("edgespec.export.output.monotonic", lambda: next(clock))
    lines: list[str] = []
    progress = ExportProgress(10_000_000, lines.append)
    for done in (1, 4_000_000, 5_000_000, 8_000_000):
        progress(done)
    assert lines == ["4 MB of at most 10 MB, 1 MB/s", "8 MB of at most 10 MB, 1 MB/s"]


@pytest.mark.slow
def test_pair_in_the_home_is_listed_as_one_with_its_size(
    home: ModelHome, tiny_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = LocalSource(path=tiny_gguf)
    halves = [
        PairHalf(part=part, source=source, precision=precision)
        for part, precision in (("target", "fp32"), ("drafter", "int8"))
    ]
    export_pair(*halves, home.models / "pair")
    pair, _ = Inventory(home).models()
    size = sum(path.stat().st_size for path in (home.models / "pair").rglob("*") if path.is_file())
    assert (pair.kind, pair.precision, pair.bytes, pair.problem) == ("pair", "fp32 + int8", size, None)
    assert main(["models", "list"]) == 0
    assert "pair of llama + llama, tiny.gguf + tiny.gguf" in capsys.readouterr().out
    assert main(["models", "verify"]) == 0


def test_source_without_a_name_is_a_damaged_manifest(home: ModelHome) -> None:
    path = home.models / "tiny" / "edgespec.json"
    document = json.loads(path.read_text())
    document["source"]["name"] = None
    path.write_text(json.dumps(document))
    (model,) = Inventory(home).models()
    assert "source.name is None" in (model.problem or "")


def test_empty_names_are_refused(home: ModelHome, tmp_path: Path) -> None:
    assert main(["models", "verify", ""]) == 3
    assert main(["export", "", "--output", str(tmp_path / "out")]) == 2


def test_a_name_that_no_file_can_have_is_no_model_for_any_command(
    home: ModelHome, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "x" * 300
    commands = [f"models {action} {name}" for action in ("show", "path", "verify", "learned", "rm")]
    commands += [f"models rename {name} b", f"doctor {name}"]
    commands += [f"export {name} {rest}" for rest in ("--dry-run", "--name b")]
    for command in commands:
        assert main(command.split()) == 3, command
        assert "Errno" not in "".join(capsys.readouterr()), command
    assert main(["chat", "tiny", "hi", "--tools", name]) == 2
    assert "wanted a Python file with functions" in capsys.readouterr().err


def test_dry_run_says_what_cannot_work(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    arguments = ["export", str(tiny_gguf), "--dry-run", "--json", "--output"]
    assert main([*arguments, str(tmp_path / "file" / "out")]) == 2
    assert "it is not a folder" in json.loads(capsys.readouterr().out)[0]["problem"]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert main([*arguments, str(tmp_path / "new" / "out")]) == 1
    said = capsys.readouterr()
    assert "no room in" in json.loads(said.out)[0]["problem"]
    assert "this export is not possible: no room in" in said.err
    monkeypatch.undo()
    assert main([*arguments, str(tmp_path / "new" / "out")]) == 0
    assert json.loads(capsys.readouterr().out)[0]["problem"] is None
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).is_file())
    assert main([*arguments, str(tmp_path / "out")]) == 2
    assert "may not be written" in capsys.readouterr().err


def test_plan_counts_the_check(tiny_gguf: Path) -> None:
    plain, checked = (
        plan_model(tiny_gguf, ExportOptions(), is_checked=is_checked).cost for is_checked in (False, True)
    )
    npu = plan_model(tiny_gguf, ExportOptions(precision="fp16", form="npu"), is_checked=True).cost
    assert plain.peak_bytes + plain.write_bytes < checked.peak_bytes
    assert plain.seconds < checked.seconds < npu.seconds
