import json
import re
from collections.abc import Callable

import pytest

from edgespec.errors import ModelError
from edgespec.setup.repository import Commit, HubId, RemoteFile, choose_files, parse_hub_id, shard_files


def commit(*names: str, is_part: bool = False) -> Commit:
    files = tuple(RemoteFile(name=name, bytes=10**6, digest="") for name in names)
    return Commit(repository="org/m", sha="0" * 40, license=None, files=files, is_part=is_part)


INDEX = json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}).encode()


@pytest.mark.parametrize(
    ("choose", "missing"),
    [
        (lambda: choose_files(commit("config.json", is_part=True), None), "the file of weights"),
        (lambda: choose_files(commit("a-00001-of-00002.gguf", is_part=True), None), "a-00002-of-00002.gguf"),
        (lambda: choose_files(commit("README.md", is_part=True), "Q4_0"), "Q4_0"),
        (lambda: shard_files(commit("1.safetensors", is_part=True), INDEX), "2.safetensors"),
    ],
)
def test_what_an_interrupted_fetch_left_out_is_to_be_fetched(choose: Callable[[], object], missing: str) -> None:
    with pytest.raises(ModelError, match=f"is incomplete: {re.escape(missing)} is missing, and nothing"):
        choose()


@pytest.mark.parametrize("is_part", [False, True])
def test_an_index_beside_all_weights_in_one_file_is_not_needed(is_part: bool) -> None:
    """In a cache there may be more files than it has."""
    index, single = "model.safetensors.index.json", "model.safetensors"
    chosen = choose_files(commit("config.json", index, single, "old/model.safetensors", is_part=is_part), None)
    assert [file.name for file in chosen] == ["config.json", *([index] if is_part else []), single]


@pytest.mark.parametrize("is_named", [False, True])
def test_an_index_that_does_not_name_the_single_file_is_of_earlier_weights(is_named: bool) -> None:
    single, other = "model.safetensors", "model-mtp.safetensors"
    holds = commit("config.json", "model.safetensors.index.json", single, other)
    assert [file.name for file in choose_files(holds, None)] == [
        "config.json",
        "model.safetensors.index.json",
        single,
    ]
    names = [other, single] if is_named else ["model-00001-of-00001.safetensors"]
    index = json.dumps({"weight_map": dict(zip("ab", names, strict=False))}).encode()
    assert [file.name for file in shard_files(holds, index)] == (names if is_named else [single])


@pytest.mark.parametrize(
    ("text", "repository", "choice"),
    [
        ("org/name", "org/name", None),
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", None),
        ("org/name:Q4_K_M", "org/name", "Q4_K_M"),
        ("hf.co/org/name-GGUF:Q4_K_M", "org/name-GGUF", "Q4_K_M"),
        ("https://huggingface.co/org/name", "org/name", None),
        ("org/name:sub/file-00001-of-00002.gguf", "org/name", "sub/file-00001-of-00002.gguf"),
    ],
)
def test_hub_ids_are_known_by_their_form(text: str, repository: str, choice: str | None) -> None:
    assert parse_hub_id(text) == HubId(repository, choice)


@pytest.mark.parametrize(
    "text",
    [
        "name", "./org/name", "../org", "/org/name", "a/b/c", "~/models", "org/", "/name", "models/m.gguf",
        "models/m.GGUF", "models/model.safetensors", "org/a--b", "org/a..b", "org/näme", "org/name:",
        "org/name:a:b",
        "C:/models", "org\\name", "org/name\n", "o/" + "x" * 100, "https://host/org", "org/name:a\0b",
    ],
)  # fmt: skip
def test_what_can_be_no_id_is_none(text: str) -> None:
    assert parse_hub_id(text) is None


def test_ids_and_choices_have_folders_of_their_own() -> None:
    ids = [HubId("a/b"), HubId("a/b", "Q4_0"), HubId("a/b-Q4_0"), HubId("a-b/c"), HubId("a/b", "x/y.gguf")]
    names = [hub_id.name for hub_id in ids]
    assert names == ["a--b", "a--b--Q4_0", "a--b-Q4_0", "a-b--c", "a--b--x--y.gguf"]


@pytest.mark.parametrize(
    ("held", "choice", "chosen"),
    [
        (["config.json", "model.safetensors", "m.gguf", "x.py"], None, ["config.json", "model.safetensors"]),
        (["m-Q4_K_M.gguf", "m-Q4_K_S.gguf"], "Q4_K_M", ["m-Q4_K_M.gguf"]),
        (["m.Q4_K_M.gguf", "m.Q8_0.gguf"], "q8_0", ["m.Q8_0.gguf"]),
        (["m_q4_0-it.gguf", "m-it-mmproj.gguf"], "Q4_0", ["m_q4_0-it.gguf"]),
        (["m_q4_0-it.gguf", "m-it-mmproj.gguf"], None, ["m_q4_0-it.gguf"]),
        (["m-Q8_0.gguf", "mtp-m-Q8_0.gguf"], "Q8_0", ["m-Q8_0.gguf"]),
        (["sub/m.gguf", "sub/mtp-m.gguf"], None, ["sub/m.gguf"]),
        (["m-Q4_0.gguf", "m-Q4_0-pure.gguf"], "Q4_0", ["m-Q4_0.gguf"]),
        (["Q4_0/m.gguf", "Q8_0/m.gguf"], "Q8_0/m.gguf", ["Q8_0/m.gguf"]),
        (["Q4_0/m-Q4_0.gguf", "Q8_0/m-Q8_0.gguf"], "m-Q8_0.gguf", ["Q8_0/m-Q8_0.gguf"]),
        (["m.gguf", "old/m.gguf"], "m.gguf", ["m.gguf"]),
        (["q/m-00001-of-00001.gguf", "n.gguf"], "m-00001-of-00001.gguf", ["q/m-00001-of-00001.gguf"]),
        (["m.gguf", "model.safetensors"], "m.gguf", ["m.gguf"]),
        (["m.gguf"], None, ["m.gguf"]),
        (
            ["a-00002-of-00002.gguf", "a-00001-of-00002.gguf"],
            None,
            ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"],
        ),
        (["m-F16.gguf", "m-BF16.gguf"], "F16", ["m-F16.gguf"]),
        (["medusa.safetensors", "config.json", "x.bin"], None, ["config.json", "medusa.safetensors"]),
    ],
)
def test_files_of_a_choice(held: list[str], choice: str | None, chosen: list[str]) -> None:
    assert [file.name for file in choose_files(commit(*held), choice)] == chosen


@pytest.mark.parametrize(
    ("held", "choice", "words"),
    [
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", r"matches 2 files .*a-Q4_0.gguf \(1 MB\), b-Q4_0.gguf \(1 MB\)"),
        (
            ["Q4_0/m.gguf", "Q8_0/m.gguf"],
            "m.gguf",
            r"matches 2 files .*Q4_0/m.gguf \(1 MB\), Q8_0/m.gguf \(1 MB\)",
        ),
        (["Q8_0/m.gguf"], "Q4_0/m.gguf", "no GGUF file 'Q4_0/m.gguf'"),
        (["a-Q4_0.gguf"], "Q8_0", "no GGUF file 'Q8_0'. It has a-Q4_0.gguf"),
        (["model.safetensors"], "Q8_0", "no GGUF file 'Q8_0'. It has none"),
        (["a-00001-of-00003.gguf", "a-00003-of-00003.gguf"], "a", "lacks a-00002-of-00003.gguf"),
        (["a-00001-of-00003.gguf", "a-00003-of-00003.gguf"], None, "lacks a-00002-of-00003.gguf"),
        (["a.gguf", "b.gguf"], None, "holds 2 GGUF models"),
        (["mmproj-a.gguf"], None, "holds no model"),
        (["adapter_model.safetensors"], None, "is a LoRA adapter, which runs with its base"),
        (["pytorch_model.bin"], None, "loading them runs code"),
        (["onnx/model.onnx", "config.json"], None, r"its ONNX models are not fetched.*hf download org/m"),
        (["mtp-m-Q8_0.gguf"], None, "holds no model"),
        ([], None, "holds no model"),
    ],
)
def test_choices_that_cannot_be_met_are_told(held: list[str], choice: str | None, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        choose_files(commit(*held), choice)
