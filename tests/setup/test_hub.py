"""Models of the hub, from one that runs on this machine."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.request import Request, urlopen

import huggingface_hub.constants
import made_heads
import pytest
import tiny
from fake_hub import FakeHub
from until import SOON_S

import edgespec.engine.pair_export
import edgespec.setup.hub
import edgespec.setup.resolve
import edgespec.setup.snapshot
from edgespec.cli.main import main
from edgespec.engine.load import load
from edgespec.errors import DiskFull, EdgeSpecError, IntegrityError, ModelError, UsageError
from edgespec.manifest import Origin, read_manifest
from edgespec.setup.catalog import CATALOG, CatalogFile, HubRepository, HubSource
from edgespec.setup.downloads import fetch
from edgespec.setup.home import ModelHome
from edgespec.setup.inventory import Inventory
from edgespec.setup.open_model import open_decoder
from edgespec.setup.pair import write_pair
from edgespec.setup.repository import HubId, RemoteFile
from edgespec.setup.resolve import compare_devices
from edgespec.setup.snapshot import HubFolder, LocalSource
from edgespec.setup.wish import Wish
from edgespec.system.console import log_to_stderr
from edgespec.system.disk import hold_lock
from edgespec.system.file_hashes import file_record
from edgespec.system.progress import LoadProgress
from edgespec.system.units import format_bytes

pytestmark = pytest.mark.slow  # a module of many models or processes

TINY = HubId("org/tiny")
HEAD_BYTES = 4096  # of a file of weights, asked for first
LARGE = bytes(range(256)) * 100


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    hub = FakeHub()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(edgespec.setup.hub, "_PAUSE_S", 0.0)
    monkeypatch.setattr(edgespec.setup.snapshot, "_HEAD_BYTES", HEAD_BYTES)
    yield hub
    hub.close()


@pytest.fixture(scope="session")
def folder_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The tiny model as a repository holds it, with things that nobody needs."""
    folder = tmp_path_factory.mktemp("repository") / "tiny"
    tiny.write_huggingface(folder, tiny.random_weights(), shards=2)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return files | {
        "README.md": b"# Tiny",
        "pytorch_model.bin": b"PK\x03\x04",
        "modeling_tiny.py": b"raise SystemExit",
        "original/consolidated.00.pth": b"PK",
        "consolidated.safetensors": b"other weights",
    }


@pytest.fixture
def repository(hub: FakeHub, folder_files: dict[str, bytes]) -> str:
    """The commit of org/tiny."""
    hub.cards["org/tiny"] = {"license": "apache-2.0"}
    return hub.commit("org/tiny", folder_files)


def ggufs(*names: str) -> dict[str, bytes]:
    return {name: LARGE + name.encode() for name in names}


def get(folder: Path, hub_id: HubId = TINY, said: list[str] | None = None, **settings: object) -> LocalSource:
    report = (said if said is not None else []).append
    asked: Any = {name: settings.pop(name) for name in ("revision", "judge") if name in settings}
    return HubFolder(path=folder, report=report, **settings).fetch(hub_id, **asked)  # type: ignore[arg-type]


# -- what is fetched ---------------------------------------------------------------------------------


def test_only_what_a_model_needs_is_fetched_from_one_commit(
    hub: FakeHub, repository: str, folder_files: dict[str, bytes], tmp_path: Path
) -> None:
    seen: list[LoadProgress] = []
    snapshot = get(tmp_path, progress=seen.append)
    assert snapshot.origin == Origin(repository="org/tiny", revision=repository, license="apache-2.0")
    needed = {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    assert set(hub.fetched()) == {path.name for path in snapshot.path.iterdir() if path.suffix != ".new"} == needed
    assert all((snapshot.path / name).read_bytes() == folder_files[name] for name in needed)
    assert {(each.stage, each.name, each.total_bytes) for each in seen} == {
        ("download", name, len(folder_files[name])) for name in needed
    }
    assert all({each.name: each.done_bytes for each in seen}[name] == len(folder_files[name]) for name in needed)
    assert all(repository in path for path, _ in hub.requests if "/resolve/" in path)


@pytest.mark.usefixtures("repository")
def test_what_is_here_is_not_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    first = get(tmp_path)
    hub.requests.clear()
    assert get(tmp_path) == first
    assert hub.fetched() == []


def test_branch_that_moves_between_listing_and_fetching_changes_nothing(
    hub: FakeHub, repository: str, folder_files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.after_listing = lambda: hub.commit("org/tiny", folder_files | {"config.json": b"{}"}) and None
    snapshot = get(tmp_path)
    assert snapshot.origin.revision == repository
    assert (snapshot.path / "config.json").read_bytes() == folder_files["config.json"]
    hub.after_listing = lambda: None
    moved = get(tmp_path)
    assert moved.origin.revision != repository
    assert (moved.path / "config.json").read_bytes() == b"{}"


def test_revision_can_be_a_branch_a_tag_with_a_slash_or_a_commit(
    hub: FakeHub, repository: str, folder_files: dict[str, bytes], tmp_path: Path
) -> None:
    other = hub.commit("org/tiny", folder_files | {"config.json": b"{}"}, branch="refs/pr/1")
    assert get(tmp_path, revision="refs/pr/1").origin.revision == other
    assert get(tmp_path, revision=other).origin.revision == other
    assert get(tmp_path).origin.revision == repository


def test_export_on_first_use_says_where_the_model_came_from(hub: FakeHub, repository: str, tmp_path: Path) -> None:
    home = ModelHome(tmp_path)
    folder = home.resolve("org/tiny")
    source = read_manifest(folder).source
    assert (source.name, source.format, source.license) == ("tiny", "safetensors", "apache-2.0")
    assert (source.repository, source.revision) == ("org/tiny", repository)
    hub.requests.clear()
    assert home.resolve("org/tiny") == folder
    assert hub.requests == []
    assert read_manifest(home.resolve("org/tiny:int4")).precision == "int4"


def test_export_command_takes_a_hub_id(
    hub: FakeHub, repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    command = ["export", "org/tiny", "--revision", repository, "--keep-download"]
    assert main([*command, "--output", str(tmp_path / "out")]) == 0
    assert read_manifest(tmp_path / "out").source.revision == repository
    assert main(["export", "org/tiny", "--offline", "--output", str(tmp_path / "again")]) == 3
    assert (
        main(["export", "org/tiny", "--revision", repository, "--offline", "--output", str(tmp_path / "b")]) == 0
    )
    hub.requests.clear()
    assert main(["export", "org/tiny", "--output", str(tmp_path / "out")]) == 2
    assert hub.requests == [], "what is in the way is seen before anything is fetched"


@pytest.mark.slow
def test_both_of_a_pair_can_come_from_the_hub(
    hub: FakeHub, repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    assert main(["export", "org/tiny", "--drafter", "org/tiny", "--output", str(tmp_path / "pair")]) == 0
    for part in ("target", "drafter"):
        assert read_manifest(tmp_path / "pair" / part).source.revision == repository
    assert hub.fetched().count("config.json") == 1


@pytest.mark.usefixtures("repository")
def test_folder_of_that_name_here_comes_first(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.write_huggingface(tmp_path / "org" / "tiny", tiny.random_weights())
    home = ModelHome(tmp_path / "home")
    assert read_manifest(home.resolve("org/tiny")).source.repository is None
    assert home.locate("org/tiny") == LocalSource(path=Path("org/tiny"))
    with pytest.raises(UsageError, match="revision="):
        home.locate("org/tiny", "main")
    shutil.rmtree(tmp_path / "org" / "tiny")
    (tmp_path / "org" / "tiny").mkdir()
    with pytest.raises(ModelError, match="folder without"):
        home.resolve("org/tiny")
    assert hub.requests == []


# -- GGUF --------------------------------------------------------------------------------------------


def test_gguf_is_chosen_by_name_or_tag(hub: FakeHub, tiny_gguf: Path, tmp_path: Path) -> None:
    hub.commit("org/g", ggufs("m-Q8_0.gguf", "mmproj-Q4_0.gguf") | {"m-Q4_0.gguf": tiny_gguf.read_bytes()})
    for choice in ("Q4_0", "q4_0", "m-Q4_0.gguf"):
        assert get(tmp_path, HubId("org/g", choice)).path.name == "m-Q4_0.gguf"
    assert hub.fetched() == ["m-Q4_0.gguf"]
    manifest = read_manifest(ModelHome(tmp_path / "home").resolve("org/g:Q4_0:int8"))
    assert (manifest.name, manifest.precision) == ("org--g--Q4_0-int8", "int8")


def test_all_parts_of_a_split_gguf_are_fetched(hub: FakeHub, tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "tiny.gguf", tiny.random_weights(), tensors_per_part=8)
    parts = sorted(tmp_path.glob("tiny-*.gguf"))
    hub.commit("org/g", {f"Q8/{part.name}": part.read_bytes() for part in parts})
    for choice in (f"Q8/{parts[1].name}", "tiny", None):
        snapshot = get(tmp_path / "home", HubId("org/g", choice))
        assert snapshot.path.name == parts[0].name
    assert hub.fetched() == [f"Q8/{part.name}" for part in parts]
    assert ModelHome(tmp_path / "home").resolve("org/g").name == "org--g"


# -- what the hub refuses ----------------------------------------------------------------------------


def refused(*arguments: object, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([str(argument) for argument in arguments]) == 3
    return capsys.readouterr().err


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    return tmp_path / "out"


@pytest.mark.usefixtures("hub")
def test_repository_that_is_not_there_is_told(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused("export", "org/none", "--output", output, capsys=capsys)
    assert "org/none is not a file or folder on this machine and not a repository" in said
    assert "hf auth login" in said


@pytest.mark.usefixtures("repository")
def test_gated_repository_says_how_to_get_in(
    hub: FakeHub, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.gated.add("org/tiny")
    said = refused("export", "org/tiny", "--output", output, capsys=capsys)
    assert f"accept its terms at {hub.url}/org/tiny" in said
    assert "hf auth login" in said


@pytest.mark.usefixtures("repository")
def test_revision_that_is_not_there_is_told(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused("export", "org/tiny", "--revision", "v9", "--output", output, capsys=capsys)
    assert "no revision 'v9'" in said


def test_several_ggufs_are_listed_and_none_is_chosen(
    hub: FakeHub, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.commit("org/g", ggufs("m-Q4_0.gguf", "m-Q8_0.gguf"))
    said = refused("export", "org/g", "--output", output, capsys=capsys)
    size = format_bytes(len(LARGE) + len("m-Q4_0.gguf"))
    assert f"m-Q4_0.gguf ({size}), m-Q8_0.gguf ({size})" in said
    assert "org/g:m-Q4_0.gguf" in said
    assert hub.fetched() == []


def test_pickles_are_not_even_fetched(hub: FakeHub, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.commit("org/old", {"config.json": b"{}", "pytorch_model.bin": b"PK", "model.pt": b"PK"})
    assert "loading them runs code" in refused("export", "org/old", "--output", output, capsys=capsys)
    assert hub.fetched() == []


@pytest.mark.parametrize(
    "answer",
    [b"no json", b"[]", b"{}", b'{"id": "org/tiny"}', b'{"id": "org/tiny", "sha": "../..", "siblings": []}'],
)
@pytest.mark.usefixtures("repository")
def test_listing_that_makes_no_sense_is_told(hub: FakeHub, tmp_path: Path, answer: bytes) -> None:
    hub.faults["api"] = [answer]
    with pytest.raises(ModelError, match=r"answer of http.* about org/tiny is not valid"):
        get(tmp_path)


def test_names_that_lead_out_of_the_folder_are_passed_over(hub: FakeHub, tmp_path: Path) -> None:
    hub.commit("org/g", ggufs("../m.gguf", "/etc/m.gguf", "a/../../m.gguf", "c:\\m.gguf"))
    with pytest.raises(ModelError, match="holds no model"):
        get(tmp_path, HubId("org/g"))


@pytest.mark.parametrize("name", ["../secret.safetensors", "pytorch_model.bin", 7, "none.safetensors"])
def test_index_can_only_name_weights_of_the_repository(
    hub: FakeHub, folder_files: dict[str, bytes], tmp_path: Path, name: object
) -> None:
    index = json.dumps({"weight_map": {"a": name}}).encode()
    hub.commit("org/tiny", folder_files | {"model.safetensors.index.json": index})
    with pytest.raises(ModelError, match="index of org/tiny"):
        get(tmp_path)


# -- what is seen before the weights are fetched -----------------------------------------------------

FACES = [
    ["chat", "{source}", "-p", "hi"],
    ["models", "pull", "{source}"],
    ["export", "{source}", "--output", "{out}"],
    ["export", "{source}", "--output", "{out}", "--dry-run"],
]


def weights_sent(hub: FakeHub) -> int:
    return sum(sent for name, sent in hub.sent.items() if name.endswith((".safetensors", ".gguf")))


@pytest.mark.parametrize("face", FACES, ids=["chat", "pull", "export", "dry run"])
@pytest.mark.parametrize(
    ("family", "words"),
    [("whisper", "is a model that takes sound"), ("not_known_yet", "is of the family 'not_known_yet'")],
)
def test_a_family_that_is_not_read_is_refused_before_its_weights_are_fetched(
    hub: FakeHub,
    folder_files: dict[str, bytes],
    output: Path,
    capsys: pytest.CaptureFixture[str],
    face: list[str],
    family: str,
    words: str,
) -> None:
    weights = {name: bytes(1 << 20) for name in folder_files if name.endswith("-of-00002.safetensors")}
    hub.commit("org/new", folder_files | weights | {"config.json": json.dumps({"model_type": family}).encode()})
    said = refused(*(part.format(source="org/new", out=output) for part in face), capsys=capsys)
    assert f"org/new {words}" in said
    assert weights_sent(hub) <= 2 * HEAD_BYTES


@pytest.mark.parametrize("face", FACES, ids=["chat", "pull", "export", "dry run"])
@pytest.mark.parametrize("change", ["family", "type"])
def test_a_gguf_that_cannot_be_exported_is_refused_by_its_header(
    hub: FakeHub, tiny_gguf: Path, output: Path, capsys: pytest.CaptureFixture[str], face: list[str], change: str
) -> None:
    old, new = {"family": (b"llama", b"bloom"), "type": (b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight")}[change]
    hub.commit("org/g", {"m.gguf": tiny_gguf.read_bytes().replace(old, new) + bytes(1 << 20)})
    said = refused(*(part.format(source="org/g", out=output) for part in face), capsys=capsys)
    assert {"family": "org/g/m.gguf is of the family 'bloom'", "type": "has no tensor blk.0.ffn_up"}[
        change
    ] in said
    assert weights_sent(hub) < tiny_gguf.stat().st_size + HEAD_BYTES


@pytest.mark.parametrize("source", ["org/tiny", "org/g"])
def test_a_dry_run_of_a_model_on_the_hub_says_what_it_says_of_its_files(
    hub: FakeHub,
    repository: str,
    tiny_gguf: Path,
    output: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    source: str,
) -> None:
    hub.commit("org/g", {"m.gguf": tiny_gguf.read_bytes()})
    command = ["--output", str(output), "--precision", "int8", "--dry-run", "--json"]
    assert main(["export", source, *command]) == 0
    (foreseen,) = json.loads(capsys.readouterr().out)
    asked = weights_sent(hub)
    local = ModelHome(tmp_path / "home").locate(source).path
    assert asked <= weights_sent(hub) == sum(
        path.stat().st_size for path in local.parent.rglob("*.safetensors")
    ) or (source == "org/g")
    assert main(["export", str(local), *command]) == 0
    (known,) = json.loads(capsys.readouterr().out)
    assert foreseen["fetch_bytes"] > 0 == known["fetch_bytes"]
    names = ("precision", "write_bytes", "peak_bytes", "seconds", "source_bytes", "problem")
    assert [foreseen[name] for name in names] == [known[name] for name in names]


def test_what_was_fetched_of_a_header_is_not_fetched_again(hub: FakeHub, tiny_gguf: Path, tmp_path: Path) -> None:
    hub.commit("org/g", {"m.gguf": tiny_gguf.read_bytes() + bytes(1 << 20)})
    ModelHome(tmp_path).resolve("org/g")
    assert weights_sent(hub) == tiny_gguf.stat().st_size + (1 << 20)


def test_a_checkpoint_in_4_bits_is_judged_by_its_settings(
    hub: FakeHub, folder_files: dict[str, bytes], output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its headers say too little: which rows have which scales stands among the weights."""
    settings = json.loads(folder_files["config.json"])
    for method, code in (("gptq", 0), ("hqq", 3)):
        stated = json.dumps({**settings, "quantization_config": {"quant_method": method, "bits": 4}})
        hub.commit("org/q", folder_files | {"config.json": stated.encode()})
        assert main(["export", "org/q", "--output", str(output), "--dry-run"]) == code
    assert "org/q is quantised by hqq, which is not read" in capsys.readouterr().err
    assert weights_sent(hub) <= 2 * 2 * HEAD_BYTES


@pytest.mark.parametrize(("disk", "memory", "code"), [(1 << 20, 1 << 40, 1), (1 << 40, 1 << 18, 5)])
def test_a_model_without_room_on_this_machine_is_refused_before_its_weights_are_fetched(
    hub: FakeHub,
    repository: str,
    output: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    disk: int,
    memory: int,
    code: int,
) -> None:
    usage = shutil.disk_usage("/")
    weights = sum(len(each) for name, each in hub.commits["org/tiny"][repository].items() if "-of-" in name)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=min(disk, weights * 3 // 2)))
    monkeypatch.setattr("edgespec.setup.foreseen_export.total_memory", lambda: memory)
    assert main(["chat", "org/tiny", "-p", "hi"]) == code
    assert ("no room in" if code == 1 else "put :int4 behind the name") in capsys.readouterr().err
    assert weights_sent(hub) <= 2 * HEAD_BYTES


@pytest.mark.parametrize("published", [True, False])
def test_a_model_of_the_catalogue_comes_in_4_bits_where_that_is_published(
    hub: FakeHub,
    repository: str,
    tiny_gguf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    published: bool,
) -> None:
    stated = CATALOG["qwen2.5-1.5b"]
    entry = replace(stated, source=HubRepository("org/tiny", repository), gguf="org/g:q4_k_m")
    monkeypatch.setitem(CATALOG, "small", entry)
    assert stated.fetch_bytes < 0.32 * 2 * stated.num_parameters
    if published:
        sha = hub.commit("org/g", {"m-q4_k_m.gguf": tiny_gguf.read_bytes(), "m-q8_0.gguf": LARGE})
    said: list[str] = []
    home = ModelHome(tmp_path, report=said.append)
    source = read_manifest(home.resolve("small")).source
    found = ("m-q4_k_m.gguf", "org/g", sha) if published else ("tiny", "org/tiny", repository)
    assert (source.name, source.repository, source.revision) == found
    assert any("using safetensors" in line for line in said) is not published
    assert read_manifest(home.resolve("small:int8")).source.repository == "org/tiny"
    assert home.resolve("small").name == home.resolve("small:int4").name == "small"


# -- the disk ----------------------------------------------------------------------------------------


def downloads(home: Path) -> list[str]:
    return sorted(
        path.name for path in (home / "downloads").rglob("*") if path.suffix in (".safetensors", ".gguf")
    )


@pytest.mark.parametrize("keep", [[], ["--keep-download"]])
@pytest.mark.parametrize("command", [["models", "pull", "org/g"], ["export", "org/g", "--output", "{out}"]])
def test_a_download_is_deleted_once_its_export_was_checked(
    hub: FakeHub,
    tiny_gguf: Path,
    output: Path,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    keep: list[str],
) -> None:
    hub.commit("org/g", {"m.gguf": tiny_gguf.read_bytes()})
    assert main([*(part.format(out=output) for part in command), *keep]) == 0
    assert downloads(output.parent / "home") == (["m.gguf"] if keep else [])
    assert ("deleted the download" in capsys.readouterr().err) is not bool(keep)


@pytest.mark.parametrize("keep", [False, True])
def test_a_model_that_is_loaded_leaves_no_download(
    hub: FakeHub, tiny_gguf: Path, tmp_path: Path, keep: bool
) -> None:
    hub.commit("org/g", {"m.gguf": tiny_gguf.read_bytes()})
    load("org/g", home=tmp_path, keep_download=keep).close()
    assert downloads(tmp_path) == (["m.gguf"] if keep else [])
    load("org/g", home=tmp_path, offline=True).close()


@pytest.mark.parametrize("pulled", ["org/g", "big"])
def test_a_model_that_a_user_has_named_has_its_name_when_it_was_repaired(
    hub: FakeHub, tiny_gguf: Path, output: Path, capsys: pytest.CaptureFixture[str], pulled: str
) -> None:
    hub.commit("org/g", {"m.gguf": tiny_gguf.read_bytes()})
    assert main(["models", "pull", "org/g", "--name", "big"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    (folder / "notes.txt").write_text("mine")
    with (folder / "model.onnx.data").open("ab") as damaged:
        damaged.write(b"x")
    assert main(["models", "verify", "big"]) == 6
    assert "repair it: edgespec models pull org/g\n" in capsys.readouterr().out
    assert main(["models", "pull", pulled]) == 0
    assert [path.name for path in folder.parent.iterdir()] == ["big"]
    assert (folder / "notes.txt").read_text() == "mine"
    assert read_manifest(folder).name == "big"
    assert ModelHome(output.parent / "home").find("org/g") == folder


@pytest.mark.parametrize("drafter", ["self", "org/none"])
def test_a_target_leaves_no_download_where_its_drafter_fails(
    hub: FakeHub, tiny_gguf: Path, tmp_path: Path, drafter: str
) -> None:
    hub.commit("org/g", {"m.gguf": tiny_gguf.read_bytes()})
    with pytest.raises(EdgeSpecError):
        load("org/g", home=tmp_path, drafter=drafter)
    assert (tmp_path / "models" / "org--g" / "edgespec.json").is_file()
    assert downloads(tmp_path) == []


def test_what_is_prepared_to_compare_devices_leaves_no_download(
    hub: FakeHub, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def auto_devices(wish: Wish, models: ModelHome, **how: bool) -> SimpleNamespace:
        return SimpleNamespace(compare=lambda **how: models.resolve(str(wish.model)))

    hub.commit("org/g", {"m.gguf": tiny_gguf.read_bytes()})
    monkeypatch.setattr(edgespec.setup.resolve, "auto_devices", auto_devices)
    compare_devices(Wish(model="org/g", home=tmp_path), remeasure=False)
    assert (tmp_path / "models" / "org--g" / "edgespec.json").is_file()
    assert downloads(tmp_path) == []


def test_a_download_stays_until_all_processes_have_exported_it(
    hub: FakeHub, tiny_gguf: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.commit("org/g", {"m.gguf": tiny_gguf.read_bytes()})
    first, second = (ModelHome(output.parent / "home") for _ in range(2))  # each with marks of its own
    sources = [home.locate("org/g") for home in (first, second)]
    first.note_export(sources[0], is_checked=True)
    first.settle_downloads(keep=False)
    assert main(["models", "prune"]) == 1
    assert f"is not deleted: used by process {os.getpid()} (" in capsys.readouterr().err
    assert main(["models", "prune", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"deleted": [], "export_bytes": 0}
    assert downloads(first.path) == ["m.gguf"]
    second.note_export(sources[1], is_checked=True)
    second.settle_downloads(keep=False)
    assert not list((first.path / "downloads" / "hub").iterdir())


def test_a_download_that_was_kept_stays_after_later_exports(hub: FakeHub, tiny_gguf: Path, tmp_path: Path) -> None:
    hub.commit("org/g", {"m.gguf": tiny_gguf.read_bytes()})
    load("org/g", home=tmp_path, keep_download=True).close()
    load("org/g:int8", home=tmp_path).close()
    assert downloads(tmp_path) == ["m.gguf"]


def test_other_weights_of_a_commit_stay_when_those_of_a_model_are_deleted(
    hub: FakeHub, tiny_gguf: Path, tmp_path: Path
) -> None:
    weights = tiny_gguf.read_bytes()
    hub.commit("org/g", {f"m-{name}.gguf": weights for name in ("q2_k", "q4_k_m", "q8_0")})
    hub.faults["m-q2_k.gguf"] = [("cut", 9000)] + [503] * 4
    home = ModelHome(tmp_path, open_decoder=open_decoder)
    with pytest.raises(ModelError, match="stopped at"):
        home.locate("org/g:Q2_K")
    for name, keep in (("Q8_0", True), ("Q4_K_M", False)):
        home.resolve(f"org/g:{name}")
        home.settle_downloads(keep=keep)
    assert downloads(tmp_path) == ["m-q8_0.gguf"]
    assert Inventory(home).remove("org--g--Q4_K_M")[1] == 0
    assert Inventory(home).remove("org--g--Q8_0")[1] == len(weights)
    assert [path.name for path in tmp_path.rglob("m-*")] == ["m-q2_k.gguf.part"]


def test_a_download_whose_export_never_began_is_deleted_after_the_next_one(
    hub: FakeHub, tiny_gguf: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.commit("org/g", {"m.gguf": tiny_gguf.read_bytes()})
    home = output.parent / "home"
    ModelHome(home).locate("org/g")
    assert main(["models", "list"]) == 0
    assert "not exported yet" in capsys.readouterr().out
    hub.faults["m.gguf"] = [503]  # it is not fetched again
    assert main(["models", "pull", "org/g"]) == 0
    assert "deleted the download" in capsys.readouterr().err
    assert not list((home / "downloads" / "hub").iterdir())


@pytest.mark.usefixtures("repository")
def test_a_download_that_took_several_runs_is_deleted_whole(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults["model-00002-of-00002.safetensors"] = [("cut", 9000)] + [503] * 4
    home = ModelHome(tmp_path, open_decoder=open_decoder)
    with pytest.raises(ModelError, match="stopped at"):
        home.resolve("org/tiny")
    assert downloads(tmp_path) == ["model-00001-of-00002.safetensors"]
    home.resolve("org/tiny")
    home.settle_downloads(keep=False)
    assert not list((tmp_path / "downloads" / "hub").iterdir())


def test_a_form_is_added_to_a_pair_without_fetching_what_it_is_not_made_of(
    hub: FakeHub, tiny_gguf: Path, tiny_model: Path, output: Path
) -> None:
    for part in ("target", "drafter"):
        shutil.copytree(tiny_model, output / part)
    write_pair(output)
    hub.commit("org/g", {"m.gguf": tiny_gguf.read_bytes()})
    add = ["export", "org/none", "--drafter", "org/g", "--drafter-device", "gpu", "--add-to", str(output)]
    assert main(add) == 0
    assert sorted(path.name for path in output.iterdir()) == ["drafter", "drafter-gpu", "pair.json", "target"]
    assert downloads(output.parent / "home") == []


def test_downloads_are_listed_and_removed_with_the_last_model_of_them(
    hub: FakeHub, tiny_gguf: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sha = hub.commit("org/g", {"m.gguf": tiny_gguf.read_bytes()})
    home = ModelHome(output.parent / "home")
    home.resolve("org/g")
    home.resolve("org/g:int8")
    size = format_bytes(tiny_gguf.stat().st_size)
    assert main(["models", "list"]) == 0
    assert f"org/g at {sha[:12]}  {size}  complete" in capsys.readouterr().out
    assert main(["doctor", "--no-self-test"]) == 0
    assert f"{size} of downloads, which edgespec models prune deletes" in capsys.readouterr().out
    assert main(["models", "remove", "org--g"]) == 0
    assert downloads(home.path) == ["m.gguf"], "another model was exported from it"
    assert main(["models", "remove", "org--g-int8"]) == 0
    assert f"and its download ({size})" in capsys.readouterr().out
    assert not list((home.path / "downloads" / "hub").iterdir())


@pytest.mark.parametrize("names", [("org/g:int8", "org/g-int8"), ("org/g-int8", "org/g:int8")])
def test_a_precision_of_a_repository_and_a_repository_of_that_name_are_two_models(
    hub: FakeHub, tiny_gguf: Path, tmp_path: Path, names: tuple[str, str]
) -> None:
    for repository in ("org/g", "org/g-int8"):
        hub.commit(repository, {"m.gguf": tiny_gguf.read_bytes()})
    home = ModelHome(tmp_path, is_quick=True)
    first, second = map(home.resolve, names)
    assert (first.name, second.name.startswith("org--g-int8-")) == ("org--g-int8", True)
    for name, folder in zip(names, (first, second), strict=True):
        assert read_manifest(folder).source.repository == name.removesuffix(":int8")
        assert home.find(name) == folder
    shutil.rmtree(first)
    assert [home.find(name) for name in names] == [None, second]


def test_prune_deletes_interrupted_downloads_and_exports_but_none_that_runs(
    hub: FakeHub, repository: str, one_file: HubId, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ModelHome(output.parent / "home")
    running = (tiny := home.locate("org/tiny")).path
    hub.faults["m.gguf"] = [("cut", 9000)] + [503] * 4
    with pytest.raises(ModelError, match="stopped at"):
        home.locate("org/g")
    (home.models / ".old.partial").mkdir(parents=True)
    (home.models / ".old.partial" / "model.onnx.data").write_bytes(LARGE)
    abandoned = home.path / "downloads" / ".fetch-abc"
    abandoned.mkdir()
    os.utime(abandoned, (1, 1))
    assert main(["models", "list"]) == 0
    listed = capsys.readouterr().out
    assert "interrupted" in listed
    assert "not exported yet" in listed
    with hold_lock(running.with_name(".lock")):
        would = subprocess_prune(home.path, "--dry-run")
        assert abandoned.exists()
        assert subprocess_prune(home.path) == {"deleted": would["would_delete"], "export_bytes": len(LARGE)}
    assert running.is_dir()
    assert not abandoned.exists()
    home.note_export(tiny, is_checked=False)
    assert main(["models", "prune", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(f"would delete org/tiny at {repository[:12]} (")
    assert main(["models", "prune", "--json"]) == 0
    deleted = json.loads(capsys.readouterr().out)["deleted"]
    assert [each["source"] for each in deleted] == [f"org/tiny at {repository[:12]}"]
    assert not list(home.models.iterdir())


def subprocess_prune(home: Path, *options: str) -> dict[str, Any]:
    """What another process deletes, since a process has its own locks; its code says that something stays."""
    command = [sys.executable, "-m", "edgespec", "models", "prune", "--json", *options]
    environment = {**os.environ, "EDGESPEC_HOME": str(home)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
    assert done.returncode == 1
    return cast("dict[str, Any]", json.loads(done.stdout))


# -- files of other programs -------------------------------------------------------------------------


def write_cache(cache: Path, sha: str, files: dict[str, bytes]) -> Path:
    """Files as huggingface_hub keeps them: under their digests, with links of their names."""
    place = cache / "models--org--tiny"
    for folder in ("refs", "blobs", f"snapshots/{sha}"):
        (place / folder).mkdir(parents=True)
    (place / "refs" / "main").write_text(sha)
    for name, content in files.items():
        listed = FakeHub.listed(name, content)
        blob = place / "blobs" / (listed["lfs"]["sha256"] if "lfs" in listed else listed["blobId"])
        blob.write_bytes(content)
        link = place / "snapshots" / sha / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(blob)
    return place / "snapshots" / sha


@pytest.mark.parametrize("offline", [False, True])
def test_the_cache_of_huggingface_hub_is_used_where_it_lies(
    hub: FakeHub,
    repository: str,
    folder_files: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    offline: bool,
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = write_cache(tmp_path / "cache", repository, folder_files)
    said: list[str] = []
    home = ModelHome(tmp_path / "home", offline, said.append)
    assert home.locate("org/tiny").path == folder
    assert hub.fetched() == []
    manifest = read_manifest(home.resolve("org/tiny"))
    assert (manifest.source.repository, manifest.source.revision) == ("org/tiny", repository)
    assert f"the files of org/tiny are in {folder}, and are used there" in said
    assert Path(folder / "config.json").is_file()


def test_a_cache_without_the_index_of_earlier_parts_is_used(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks for model.safetensors first, and then for no index."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    index = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}).encode()
    files = {"config.json": b"{}", "model.safetensors": LARGE}
    folder = write_cache(
        tmp_path / "cache", hub.commit("org/tiny", files | {"model.safetensors.index.json": index}), files
    )
    assert get(tmp_path / "home").path == folder
    assert hub.fetched() == []


def test_a_cache_that_lacks_a_file_or_has_other_bytes_is_left_alone(
    hub: FakeHub, repository: str, folder_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = write_cache(tmp_path / "cache", repository, folder_files)
    weights = folder / "model-00002-of-00002.safetensors"
    copy = bytes(weights.stat().st_size)
    weights.unlink()
    for _ in range(2):
        assert tmp_path / "home" in get(tmp_path / "home").path.parents
        weights.write_bytes(copy)


def test_a_cache_that_was_cut_off_is_told_offline(
    repository: str, folder_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = write_cache(tmp_path / "cache", repository, folder_files)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002.safetensors is missing, and nothing is fetched"):
        get(tmp_path / "home", offline=True)


@pytest.mark.parametrize("place", [".lmstudio/models", ".cache/lm-studio/models"])
def test_files_of_lm_studio_are_used_where_they_lie(
    hub: FakeHub, one_file: HubId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    file = tmp_path / place / "org" / "g" / "m.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(LARGE)
    assert get(tmp_path / "home", one_file).path == file
    assert hub.fetched() == []


# -- networks that fail ------------------------------------------------------------------------------


@pytest.fixture
def one_file(hub: FakeHub) -> HubId:
    hub.commit("org/g", {"m.gguf": LARGE})
    return HubId("org/g")


def test_no_network_is_told_in_words(
    hub: FakeHub, output: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    for command in (["export", "org/tiny", "--output", output], ["models", "pull", "qwen2.5-1.5b"]):
        said = refused(*command, capsys=capsys)
        assert "does not answer; check the network, or use an earlier download with --offline" in said
        assert "safetensors" not in said  # of a model of the catalogue, whose 4 bits may well be published


def test_hub_that_never_answers_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not edgespec.setup.hub.is_reachable(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.2)


def test_hub_that_falls_silent_after_its_first_answer_is_told(
    hub: FakeHub, one_file: HubId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_reachable = edgespec.setup.hub.is_reachable
    monkeypatch.setattr(edgespec.setup.hub, "is_reachable", lambda url, timeout_s: is_reachable(url, SOON_S))
    monkeypatch.setattr(edgespec.setup.hub, "_ANSWER_S", 0.3)
    hub.faults["api"] = ["stall"]
    with pytest.raises(ModelError, match="connection to the hub broke"):
        get(tmp_path, one_file)


@pytest.mark.parametrize(
    "faults",
    [
        [("cut", 9000)],
        [("close", 9000)],
        [("cut", 9000), ("cut", 0), ("close", 5000), None],
        [503, 429, ("cut", 100), 500],
    ],
)
def test_download_that_breaks_off_goes_on_where_it_was(
    hub: FakeHub, one_file: HubId, tmp_path: Path, faults: list[object]
) -> None:
    hub.faults["m.gguf"] = list(faults)
    said: list[str] = []
    assert get(tmp_path, one_file, said).path.read_bytes() == LARGE
    ranges = [asked for path, asked in hub.requests if path.endswith("m.gguf")]
    assert len(ranges) > 1
    assert ranges[-1] is not None
    assert any("continuing at byte" in line for line in said)


def test_a_download_shows_a_bar_where_progress_is_shown_alone(
    hub: FakeHub, one_file: HubId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    get(tmp_path / "program", one_file)
    assert not terminal.getvalue()
    with log_to_stderr():
        get(tmp_path / "command", one_file)
    assert "m.gguf: 100%" in terminal.getvalue()


def test_download_goes_on_in_a_later_run_with_room_for_the_rest(
    hub: FakeHub, one_file: HubId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults["m.gguf"] = [("cut", 9000)] + [503] * 4
    with pytest.raises(ModelError, match=r"stopped at 9000 of 25600 bytes .*continue from there"):
        get(tmp_path, one_file)
    assert not list(tmp_path.rglob("m.gguf"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=len(LARGE) - 9000))
    with HubFolder(path=tmp_path, report=print).preview(one_file) as preview:
        assert preview.fetch_bytes == len(LARGE) - 9000
    assert get(tmp_path, one_file).path.read_bytes() == LARGE
    assert hub.requests[-1][1] == "bytes=9000-"
    assert not list(tmp_path.rglob("*.part"))


def test_server_without_ranges_starts_anew(hub: FakeHub, one_file: HubId, tmp_path: Path) -> None:
    hub.knows_ranges = False
    hub.faults["m.gguf"] = [("cut", 9000)]
    assert get(tmp_path, one_file).path.read_bytes() == LARGE


@pytest.mark.usefixtures("one_file")
def test_huggingface_hub_before_1_0_fetches_too(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which transformers 4 needs: its sessions are those of requests, imitated here."""

    @contextmanager
    def request(method: str, url: str, *, headers: dict[str, str], timeout: float, stream: bool) -> Iterator[Any]:
        with urlopen(Request(url, headers=headers, method=method), timeout=timeout) as reply:
            yield SimpleNamespace(
                status_code=reply.status,
                headers=reply.headers,
                raise_for_status=lambda: None,
                iter_content=lambda size: iter(partial(reply.read, size), b""),
            )

    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: SimpleNamespace(request=request))
    file = RemoteFile(name="m.gguf", bytes=len(LARGE), digest=hashlib.sha256(LARGE).hexdigest())
    url = edgespec.setup.hub.file_url("org/g", hub.branches["org/g"]["main"], file.name)
    edgespec.setup.hub.download(url, file, tmp_path / file.name, print)
    assert (tmp_path / file.name).read_bytes() == LARGE


def test_a_download_that_a_virus_scanner_reads_on_windows_is_tried_again(
    hub: FakeHub, one_file: HubId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_, num_failing = os.replace, [3]

    def replace(part: Path, path: Path) -> None:
        if str(part).endswith(".part") and num_failing[0]:
            num_failing[0] -= 1
            raise PermissionError(13, "it is open")
        replace_(part, path)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(edgespec.system.disk, "sleep", lambda seconds: None)
    monkeypatch.setattr("edgespec.system.disk.sys", SimpleNamespace(platform="win32"))
    assert get(tmp_path, one_file).path.read_bytes() == LARGE


def test_range_that_is_past_the_end_starts_anew(hub: FakeHub, one_file: HubId, tmp_path: Path) -> None:
    hub.faults["m.gguf"] = [("cut", 9000), 416]
    assert get(tmp_path, one_file).path.read_bytes() == LARGE
    assert [asked for path, asked in hub.requests if "m.gguf" in path] == [None, "bytes=9000-", None]


def test_stalled_download_goes_on(
    hub: FakeHub, one_file: HubId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edgespec.setup.hub, "_STALL_S", 2.0)  # within which a busy hub begins to answer
    hub.faults["m.gguf"] = ["stall"]
    assert get(tmp_path, one_file).path.read_bytes() == LARGE
    assert hub.requests[-1][1] == f"bytes={len(LARGE) // 2}-"


def test_file_of_the_catalogue_is_fetched_like_any_other(hub: FakeHub, one_file: HubId, tmp_path: Path) -> None:
    """A cut is resumed, wrong bytes are refused, and a hub that keeps failing is one reason among others."""
    revision = hub.branches["org/g"]["main"]
    source = HubSource(repository="org/g", revision=revision, file="m.gguf")
    sha256 = hashlib.sha256(LARGE).hexdigest()
    entry = CatalogFile(title="G", file="m.gguf", bytes=len(LARGE), sha256=sha256, sources=(source,))
    hub.faults["m.gguf"] = [503] * 4
    with pytest.raises(ModelError, match=r"could not be downloaded.*stopped at 0 of 25600 bytes"):
        fetch(entry, tmp_path, print)
    hub.faults["m.gguf"] = [LARGE[:-1] + b"!"]
    with pytest.raises(IntegrityError):
        fetch(entry, tmp_path, print)
    assert list(tmp_path.iterdir()) == []
    hub.faults["m.gguf"] = [("cut", 9000)]
    assert fetch(entry, tmp_path, print).read_bytes() == LARGE
    assert hub.requests[-1][1] == "bytes=9000-"


def test_a_file_of_the_catalogue_goes_on_in_a_later_run_and_is_not_pruned_meanwhile(
    hub: FakeHub, one_file: HubId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = HubSource(repository="org/g", revision=hub.branches["org/g"]["main"], file="m.gguf")
    sha256 = hashlib.sha256(LARGE).hexdigest()
    file = CatalogFile(title="G", file="m.gguf", bytes=len(LARGE), sha256=sha256, sources=(source,))
    monkeypatch.setitem(CATALOG, "g", replace(CATALOG["smollm2-135m"], source=file))
    other = Inventory(ModelHome(tmp_path))
    home = ModelHome(tmp_path, progress=lambda at: cast("None", other.prune()))
    hub.faults["m.gguf"] = [("cut", 9000)] + [503] * 4
    with pytest.raises(ModelError, match="stopped at 9000"):
        home.locate("g")
    ((part,), _) = other.prune(is_dry=True)
    assert (part.source, part.is_whole) == ("m.gguf.part", False)
    assert home.locate("g").path.read_bytes() == LARGE
    assert hub.requests[-1][1] == "bytes=9000-"
    assert not list(tmp_path.rglob("*.part"))
    assert other.prune() == ([], 0)


def test_file_that_went_missing_is_told(hub: FakeHub, one_file: HubId, tmp_path: Path) -> None:
    hub.faults["m.gguf"] = [404]
    with pytest.raises(ModelError, match=r"refuses org/g .*404"):
        get(tmp_path, one_file)


@pytest.mark.parametrize("wrong", [LARGE[:-1] + b"!", LARGE + b"!"])
def test_other_bytes_than_the_commit_lists_are_not_kept(
    hub: FakeHub, one_file: HubId, tmp_path: Path, wrong: bytes
) -> None:
    hub.faults["m.gguf"] = [wrong]
    with pytest.raises(IntegrityError, match="its commit lists"):
        get(tmp_path, one_file)
    assert get(tmp_path, one_file).path.read_bytes() == LARGE


def test_small_files_are_checked_too(hub: FakeHub, folder_files: dict[str, bytes], tmp_path: Path) -> None:
    hub.commit("org/tiny", folder_files)
    hub.faults["config.json"] = [b"x" * len(folder_files["config.json"])]
    with pytest.raises(IntegrityError, match=r"config\.json"):
        get(tmp_path)


def test_another_host_gets_no_token(
    hub: FakeHub, one_file: HubId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = FakeHub()
    other.commits = hub.commits
    hub.redirect = other.url.replace("127.0.0.1", "localhost")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert get(tmp_path, one_file).path.read_bytes() == LARGE
    assert any("hf_secret" in headers.get("authorization", "") for headers in hub.headers)
    assert not any("hf_secret" in str(headers) for headers in other.headers)
    other.close()


def test_full_disk_is_told_before_fetching(
    hub: FakeHub, one_file: HubId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(DiskFull) as raised:
        get(tmp_path, one_file)
    assert raised.value.needed_bytes == len(LARGE)
    assert hub.fetched() == []


def test_home_that_is_a_file_is_told(one_file: HubId, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EdgeSpecError, match="EDGESPEC_HOME"):
        get(tmp_path / "file", one_file)


# -- offline -----------------------------------------------------------------------------------------


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        pytest.fail("it connected")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("by", ["argument", "convention"])
def test_offline_uses_what_was_fetched_and_connects_to_nothing(
    hub: FakeHub, repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    online = get(tmp_path)
    hub.requests.clear()
    if by == "convention":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    settings = {"offline": True} if by == "argument" else {}
    assert get(tmp_path, **settings) == online
    assert get(tmp_path, revision=repository, **settings) == online
    assert hub.requests == []


@pytest.mark.usefixtures("no_sockets")
def test_offline_without_anything_fetched_is_told(tmp_path: Path) -> None:
    words = "org/tiny at 'main' is not on this machine, and nothing is fetched with offline=True or HF_HUB_OFFLINE"
    with pytest.raises(ModelError, match=f"{words}, or for a request to a server; fetch it first"):
        get(tmp_path, offline=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("repository")
def test_offline_with_a_part_fetched_names_what_is_missing(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults["model-00002-of-00002.safetensors"] = [404]
    with pytest.raises(ModelError, match="404"):
        get(tmp_path)
    with pytest.raises(ModelError, match=r"model-00002-of-00002.safetensors of org/tiny is not on this machine"):
        get(tmp_path, offline=True)


@pytest.mark.usefixtures("repository")
def test_damaged_record_is_as_none(tmp_path: Path) -> None:
    get(tmp_path)
    record = tmp_path / "org--tiny" / "revisions" / "main.json"
    for text in ("", "{", "[]", "{}", '{"files": [{}]}'):
        record.write_text(text)
        with pytest.raises(ModelError, match="not on this machine"):
            get(tmp_path, offline=True)


@pytest.mark.usefixtures("repository")
def test_home_offline_exports_what_was_fetched(hub: FakeHub, tmp_path: Path) -> None:
    home = ModelHome(tmp_path)
    home.locate("org/tiny")
    hub.requests.clear()
    folder = replace(home, offline=True).resolve("org/tiny")
    assert file_record(folder / "tokenizer.json").bytes
    assert hub.requests == []


# -- drafting heads ----------------------------------------------------------------------------------


def head_files(folder: Path) -> dict[str, bytes]:
    made = made_heads.eagle3("specforge").write(folder)
    return {path.name: path.read_bytes() for path in made.iterdir()}


def test_a_drafting_head_is_exported_by_its_id(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    target = made_heads.write_target(tmp_path / "target")
    sha = hub.commit("org/head", head_files(tmp_path / "head"))
    command = ["export", str(target), "--drafter", "org/head", "--no-check", "--output", str(tmp_path / "pair")]
    assert main([*command, "--dry-run"]) == 0
    assert hub.sent["model.safetensors"] <= 2 * HEAD_BYTES
    assert "org/head, cpu form" in capsys.readouterr().out
    monkeypatch.setattr(edgespec.engine.pair_export, "check_if_here", lambda *arguments: None)
    assert main(command) == 0
    manifest = read_manifest(tmp_path / "pair" / "drafter")
    assert (manifest.source.repository, manifest.source.revision, manifest.name) == ("org/head", sha, "head")


def test_a_plan_for_a_head_fetches_no_weights_of_its_target(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    made_heads.eagle3("specforge").write(tmp_path / "head")
    made = made_heads.mtp()
    weights = made_heads.target_weights(bias=True) | made.tensors
    config = made_heads.target_config("mimo") | {"num_nextn_predict_layers": 1}
    target = tmp_path / "target"
    tiny.write_huggingface(target, weights, config=config)
    hub.commit("org/target", {path.name: path.read_bytes() for path in target.iterdir()})
    command = ["export", "org/target", "--dry-run", "--json", "--output", str(tmp_path / "pair"), "--drafter"]
    assert main([*command, str(tmp_path / "head")]) == 0
    capsys.readouterr()
    assert main([*command, "mtp"]) == 0
    whole, own = json.loads(capsys.readouterr().out)
    mtp_bytes = sum(each.nbytes for each in made.tensors.values())
    assert own["write_bytes"] <= 1.5 * mtp_bytes < whole["write_bytes"]
    assert (whole["fetch_bytes"] > 0, own["fetch_bytes"]) == (True, 0)
    assert all(sent <= 4 * HEAD_BYTES for name, sent in hub.sent.items() if name.endswith(".safetensors"))


def test_a_pickled_head_on_the_hub_is_not_fetched(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    files = head_files(tmp_path / "head")
    hub.commit("org/head", {"config.json": files["config.json"], "pytorch_model.bin": files["model.safetensors"]})
    target = made_heads.write_target(tmp_path / "target")
    assert main(["export", str(target), "--drafter", "org/head", "--output", str(tmp_path / "pair")]) == 3
    assert "since loading them runs code" in capsys.readouterr().err
    assert hub.fetched() == []
    assert not (tmp_path / "pair").exists()
