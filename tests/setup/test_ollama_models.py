"""Models that ollama has pulled, found by its names and used where they lie."""

import hashlib
import json
from pathlib import Path

import pytest

from edgespec.cli.main import main
from edgespec.errors import MemoryExhausted, ModelError
from edgespec.export.convert import export_model
from edgespec.manifest import Origin, read_manifest
from edgespec.setup.drafting_target import find_export_source
from edgespec.setup.home import ModelHome
from edgespec.setup.ollama_models import find_pulled, pulled_names

LIBRARY = "registry.ollama.ai/library"


class OllamaFolder:
    """A folder as ollama writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pull(self, place: str, content: bytes, kind: str = "model", size: int | None = None) -> Path:
        """Add a model by the place of its manifest; gives the file of its weights."""
        digest = hashlib.sha256(content).hexdigest()
        blob = self.path / "blobs" / f"sha256-{digest}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        named = ((kind, digest, len(content) if size is None else size), ("template", "0" * 64, 9))
        layers = [
            {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}", "size": size}
            for kind, digest, size in named
        ]
        manifest = self.path / "manifests" / place
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text(json.dumps({"schemaVersion": 2, "config": {}, "layers": layers}))
        return blob


@pytest.fixture
def ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OllamaFolder:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    return OllamaFolder(tmp_path / "ollama")


def test_a_model_of_ollama_is_exported_from_where_it_lies(
    ollama: OllamaFolder, tiny_gguf: Path, tmp_path: Path
) -> None:
    blob = ollama.pull(f"{LIBRARY}/tiny/1b", tiny_gguf.read_bytes())
    home = ModelHome(tmp_path / "home")
    folder = home.resolve("ollama:tiny:1b")
    assert folder.name == f"tiny-1b-{blob.name[7:15]}"
    assert read_manifest(folder).source.name == "ollama:tiny:1b"
    assert home.resolve("ollama:tiny:1b") == home.find("ollama:tiny:1b") == folder
    assert home.advice.way_to(folder.name) == f"edgespec export ollama:tiny:1b --name {folder.name}"
    assert [path.name for path in (tmp_path / "home").iterdir() if path.name == "downloads"] == []
    assert home.source_of("ollama:tiny:1b").path == home.source_of(folder.name).path == blob
    again = find_export_source(home, folder.name, read_manifest(folder))
    assert again is not None
    assert again.words == ["ollama:tiny:1b"]
    (folder / "edgespec.json").write_text("{")
    assert home.find("ollama:tiny:1b:int8") is None


def test_a_planned_export_names_the_model_as_ollama_does(
    ollama: OllamaFolder, tiny_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ollama.pull(f"{LIBRARY}/tiny/1b", tiny_gguf.read_bytes())
    for drafter in ([], ["--drafter", "ollama:tiny:1b"]):
        assert main(["export", "ollama:tiny:1b", *drafter, "--dry-run", "--json"]) == 0
        plans = json.loads(capsys.readouterr().out)
        assert {plan["source"] for plan in plans} == {"ollama:tiny:1b"}
    with pytest.raises(MemoryExhausted, match=r"^ollama:tiny:1b in source precision takes"):
        export_model(tiny_gguf, ollama.path / "out", origin=Origin(name="ollama:tiny:1b"), most_bytes=1)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (f"{LIBRARY}/llama3.2/latest", "llama3.2:latest"),
        (f"{LIBRARY}/qwen3/4b", "qwen3:4b"),
        ("registry.ollama.ai/somebody/model/q4", "somebody/model:q4"),
        ("hf.co/org/name-GGUF/Q4_K_M", "hf.co/org/name-GGUF:Q4_K_M"),
    ],
)
def test_names_are_those_of_ollama_list(ollama: OllamaFolder, place: str, name: str) -> None:
    blob = ollama.pull(place, b"GGUF")
    assert pulled_names() == [name]
    assert find_pulled(f"ollama:{name}").path == blob
    assert find_pulled(name.removesuffix(":latest")).name == name


def test_the_newest_file_of_a_name_is_another_model(ollama: OllamaFolder) -> None:
    ollama.pull(f"{LIBRARY}/qwen3/4b", b"GGUF 1")
    first = find_pulled("ollama:qwen3:4b").folder_name
    ollama.pull(f"{LIBRARY}/qwen3/4b", b"GGUF 2")
    assert find_pulled("ollama:qwen3:4b").folder_name != first


def test_what_is_no_whole_model_is_refused(ollama: OllamaFolder) -> None:
    ollama.pull(f"{LIBRARY}/cut/latest", b"GGUF", size=4_700_000_000)
    ollama.pull(f"{LIBRARY}/lora/latest", b"GGUF", kind="adapter")
    ollama.pull(f"{LIBRARY}/mlx/latest", b"{}", kind="tensor")
    damaged = ollama.path / "manifests" / LIBRARY / "bad" / "latest"
    damaged.parent.mkdir()
    damaged.write_text('{"layers": 1}')
    for name, words in {
        "cut": r"cut:latest is incomplete: .* has 4 bytes of 4\.7 GB; pull it again: ollama pull cut:latest",
        "lora": "is an adapter for another model; .*adapter=ADAPTER",
        "mlx": "has no GGUF files, wanted one",
        "bad": "cannot be read .*pull it again: ollama pull bad:latest",
        "none": "no model 'none' on this machine; it has bad:latest, cut:latest, .*; pull it: ollama pull none",
    }.items():
        with pytest.raises(ModelError, match=words):
            find_pulled(f"ollama:{name}")


def test_commands_name_the_models_of_ollama(
    ollama: OllamaFolder, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    assert main(["models", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ollama"] == []
    ollama.pull(f"{LIBRARY}/llama3.2/latest", b"GGUF")
    assert main(["models", "list"]) == 0
    assert "models of ollama, which can be used from there: ollama:llama3.2:latest" in capsys.readouterr().out
    for name in ("llama3.2", "llama3.2:latest"):
        assert main(["chat", name, "-p", "hi"]) == 3
        assert f"ollama has this model: use ollama:{name}" in capsys.readouterr().err


def test_no_ollama_is_no_error(ollama: OllamaFolder) -> None:
    assert pulled_names() == []
    with pytest.raises(ModelError, match="ollama has no model 'x' on this machine; pull it: ollama pull x"):
        find_pulled("ollama:x")
