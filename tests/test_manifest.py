import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from edgespec.errors import EdgeSpecError, IntegrityError, ManifestError
from edgespec.manifest import FILE_NAME, Head, Manifest, Parallel, parse_manifest, read_manifest, write_manifest
from edgespec.system.file_hashes import verify_files


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def edit(folder: Path, **changes: object) -> None:
    path = folder / FILE_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_manifest_survives_writing_and_reading(folder: Path) -> None:
    manifest = read_manifest(folder)
    write_manifest(folder, manifest)
    assert read_manifest(folder) == manifest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema_version": 99}, "schema version 99"),
        ({"kv_cache": 3}, "kv_cache is 3: wanted an object"),
        ({"kv_cache": {"num_layers": 2, "num_kv_heads": 2}}, "head_dim is missing"),
        ({"surprise": 1}, "unknown fields 'surprise'"),
        ({"source": {"name": "a", "format": "gguf", "sha256": "", "x\ud800": 1}}, "ud800"),
        ({"files": {}}, "lists no hash"),
        ({"files": {"../../etc/passwd": {"sha256": "", "bytes": 1}}}, "lists no hash"),
        ({"graph": "../model.onnx"}, "lists no hash"),
        ({"graph": ["model.onnx"]}, r"graph is \['model.onnx'\]: wanted a text"),
        ({"chat_template": "../../../etc/hostname"}, "lists no hash"),
        ({"context_length": "8192"}, "context_length is '8192': wanted a whole number"),
        ({"context_length": -1}, "context_length is -1: wanted a whole number >= 1"),
        ({"context_length": 2**40}, "context_length"),
        ({"context_length": 10**4000}, "context_length"),
        ({"context_length": True}, "context_length is True"),
        ({"vocab_size": 3.5}, "vocab_size"),
        ({"eos_token_ids": ["a"]}, r"eos_token_ids\[0\] is 'a': wanted a whole number"),
        ({"eos_token_ids": [10**9]}, "special token"),
        ({"bos_token_id": 10**9}, "special token"),
        ({"suppressed_token_ids": [10**9]}, "special token"),
        ({"name": 7}, "name"),
        ({"architecture": 7}, "architecture"),
        ({"add_bos": "yes"}, "add_bos"),
        ({"schema_version": True}, "schema version"),
        ({"source": {"name": "a", "format": "gguf", "sha256": 3}}, "source.sha256"),
        ({"files": {"x\0y": {"sha256": "", "bytes": 1}}}, "lists no hash"),
        ({"kv_cache": {"num_layers": 1 << 24, "num_kv_heads": 2, "head_dim": 16}}, "num_layers"),
        ({"signature": 7}, "signature is 7: wanted an object"),
        ({"form": "CPU"}, "its form is 'CPU', known are cpu, gpu, npu"),
        ({"signature": {"logits": None}}, "logits"),
        ({"signature": {"attention_mask": 7}}, "attention_mask"),
        ({"signature": {"best": "present.0.key"}}, r"best and signature.present_key name the same output"),
        ({"signature": {"logits": "present.0.key"}}, r"logits and signature.present_key name the same output"),
        ({"signature": {"best": "logits"}}, "logits and signature.best name the same output"),
        (
            {"signature": {"present_key": "present.%d.value"}},
            "present_key and signature.present_value name the same",
        ),
        ({"signature": {"present_key": "present.key"}}, "present_key and signature.present_key name the same"),
        ({"signature": {"attention_mask": "input_ids"}}, "input_ids and signature.attention_mask name the same"),
        (
            {"signature": {"past_key": "past_key_values.%d.value", "past_value": "past_key_values.%d.key"}},
            "past_key is 'past_key_values.%d.value'",
        ),
    ],
)
def test_manifest_that_does_not_fit_is_refused(folder: Path, changes: dict[str, object], words: str) -> None:
    edit(folder, **changes)
    with pytest.raises(ManifestError, match=words):
        read_manifest(folder)


def test_file_outside_the_folder_is_refused(folder: Path) -> None:
    files = json.loads((folder / FILE_NAME).read_text())["files"]
    edit(folder, files={**files, "../secret": {"sha256": "", "bytes": 1}})
    with pytest.raises(ManifestError, match="not a file of its own folder"):
        read_manifest(folder)


@pytest.mark.parametrize("change", [{"form": "paged"}, {"dtype": "junk"}, {"num_layers": "30"}, {"head_dim": 0}])
def test_cache_of_another_kind_is_refused(folder: Path, change: dict[str, object]) -> None:
    cache = json.loads((folder / FILE_NAME).read_text())["kv_cache"]
    edit(folder, kv_cache=cache | change)
    with pytest.raises(ManifestError):
        read_manifest(folder)


@pytest.mark.parametrize("name", ["", "..", ".", "a/b"])
def test_odd_file_names_are_refused(folder: Path, name: str) -> None:
    files = json.loads((folder / FILE_NAME).read_text())["files"]
    edit(folder, files={**files, name: {"sha256": "", "bytes": 1}})
    with pytest.raises(ManifestError, match="own folder"):
        read_manifest(folder)


def test_folder_without_a_manifest_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"models\.export\(SOURCE\)"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", "[" * 100_000])
def test_manifest_that_is_no_json_object_is_refused(folder: Path, text: str) -> None:
    (folder / FILE_NAME).write_text(text)
    with pytest.raises(ManifestError):
        read_manifest(folder)


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer.json", "chat_template.jinja"])
def test_every_changed_missing_or_cut_file_is_found(folder: Path, name: str) -> None:
    path = folder / name
    whole = path.read_bytes()

    def refused() -> type[EdgeSpecError]:
        with pytest.raises(EdgeSpecError, match=name) as raised:
            verify_files(folder, read_manifest(folder).files)
        return raised.type

    path.write_bytes(whole[:-1])
    assert refused() is IntegrityError
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert refused() is IntegrityError
    path.unlink()
    assert refused() is ManifestError
    for size in (0, len(whole) // 3):
        path.write_bytes(whole[:size])
        with pytest.raises(
            IntegrityError, match=f"{name} has {size} bytes, its manifest says {len(whole)}; export"
        ):
            read_manifest(folder)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(IntegrityError, match=f"{name} is a pointer of Git LFS .*git lfs pull"):
        read_manifest(folder)
    path.write_bytes(whole)
    verify_files(folder, read_manifest(folder).files)


def test_file_that_is_no_file_or_may_not_be_read_is_refused(folder: Path) -> None:
    files = json.loads((folder / FILE_NAME).read_text())["files"]
    edit(folder, files={**files, "x\0y": {"sha256": "", "bytes": 1}})
    with pytest.raises(ManifestError, match="not a file of its own folder"):
        read_manifest(folder)
    edit(folder, files={**files, "model.onnx": {"sha256": None, "bytes": 1}})
    with pytest.raises(ManifestError, match=r"files\[...\].sha256: wanted a text"):
        read_manifest(folder)
    edit(folder, files=files)
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(ManifestError, match="not a regular file"):
        read_manifest(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()
    with pytest.raises(ManifestError, match="not a regular file"):
        read_manifest(folder)


def test_head_is_read_as_it_was_written_and_refused_where_it_contradicts_itself(tiny_model: Path) -> None:
    head = Head(
        method="medusa",
        kind="steps",
        target_layers=(2,),
        target_hidden_size=64,
        state_size=64,
        step_graphs=("model_step_0.onnx",),
    )
    base = read_manifest(tiny_model)

    def parse(manifest: Manifest) -> Manifest:
        return parse_manifest(tiny_model / FILE_NAME, json.loads(json.dumps(asdict(manifest))))

    good = replace(base, head=head, kv_cache=replace(base.kv_cache, num_layers=0))
    assert parse(good).head == head
    assert (base.most_draft_tokens, good.most_draft_tokens) == (None, 1)
    for changed, words in (
        (replace(good, head=replace(head, kind="ring")), "known are recurrent, steps, block"),
        (replace(good, head=replace(head, step_graphs=())), "no step graphs"),
        (replace(good, head=replace(head, target_layers=())), "reads no layer"),
        (replace(good, head=replace(head, kind="recurrent")), "0 layers can only be a head of the kind steps"),
        (replace(good, head=None), "0 layers can only be a head"),
        (replace(base, head=replace(head, kind="block")), "names no mask token"),
        (replace(good, head=replace(head, mask_token_id=10**6)), "mask token 1000000 is not in the vocabulary"),
        (replace(base, parallel=Parallel(mask_token_id=10**6, num_tokens=4)), "mask token 1000000"),
        (replace(base, hidden_layers=(base.kv_cache.num_layers + 1,)), "names layers"),
    ):
        with pytest.raises(ManifestError, match=words):
            parse(changed)
    last = (base.kv_cache.num_layers,)  # the state behind the final norm
    assert parse(replace(base, hidden_layers=last)).hidden_layers == last
