"""Tiny random models through the exporter, against the same transformer written out in numpy."""

import errno
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny

import edgespec.system.disk
from edgespec.errors import DiskFull, EdgeSpecError, SourceError, UsageError
from edgespec.export.convert import export_model
from edgespec.manifest import file_record, read_manifest, verify_files
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder

TOKENS = np.random.default_rng(1).integers(0, tiny.VOCAB, 40).astype(np.int32)


def exported_logits(source: Path, output: Path, precision: str = "source") -> np.ndarray:
    manifest = export_model(source, output, precision=precision)
    return OnnxDecoder(output, manifest, find_device("cpu")).logits(TOKENS, len(TOKENS))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("architecture", "bias"), [("llama", False), ("qwen2", True)])
def test_fp32_export_of_a_gguf_gives_the_reference_logits(
    tmp_path: Path, architecture: str, bias: bool, tied: bool
) -> None:
    weights = tiny.random_weights(bias=bias, tied=tied)
    tiny.write_gguf(tmp_path / "a.gguf", weights, architecture=architecture)
    logits = exported_logits(tmp_path / "a.gguf", tmp_path / "out", "fp32")
    assert np.abs(logits - tiny.reference_logits(weights, TOKENS)).max() < 1e-4


def test_biases_of_a_llama_gguf_are_unpermuted_with_their_rows(tmp_path: Path) -> None:
    weights = tiny.random_weights(bias=True)
    tiny.write_gguf(tmp_path / "a.gguf", weights)
    logits = exported_logits(tmp_path / "a.gguf", tmp_path / "out", "fp32")
    assert np.abs(logits - tiny.reference_logits(weights, TOKENS)).max() < 1e-4


@pytest.mark.parametrize("storage", ["F16", "BF16"])
def test_source_export_of_half_floats_is_exact(tmp_path: Path, storage: str) -> None:
    weights = tiny.write_gguf(tmp_path / "a.gguf", tiny.random_weights(tied=False), storage=storage)
    logits = exported_logits(tmp_path / "a.gguf", tmp_path / "out")
    assert np.abs(logits - tiny.reference_logits(weights, TOKENS)).max() < 1e-4


@pytest.mark.parametrize("storage", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_source_export_of_blocks_differs_only_by_8_bit_activations(tmp_path: Path, storage: str) -> None:
    """Rounding activations to 8 bits moves logits by a percent; losing the minima of Q4_1 moves them by 30."""
    weights = tiny.write_gguf(tmp_path / "a.gguf", tiny.random_weights(), storage=storage)
    reference = tiny.reference_logits(weights, TOKENS)
    error = exported_logits(tmp_path / "a.gguf", tmp_path / "out") - reference
    assert error.std() < 0.025 * reference.std()


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["F32", "F16"])
@pytest.mark.parametrize(("model_type", "bias"), [("llama", False), ("qwen2", True)])
def test_huggingface_folder_gives_the_reference_logits(
    tmp_path: Path, model_type: str, bias: bool, dtype: str, shards: int
) -> None:
    weights = tiny.random_weights(bias=bias, tied=False)
    tiny.write_huggingface(tmp_path / "hf", weights, model_type=model_type, shards=shards, dtype=dtype)
    if dtype == "F16":
        weights = {name: value.astype(np.float16) for name, value in weights.items()}
    logits = exported_logits(tmp_path / "hf", tmp_path / "out")
    assert np.abs(logits - tiny.reference_logits(weights, TOKENS)).max() < 1e-4


def test_gguf_and_huggingface_folder_of_one_model_agree(tmp_path: Path) -> None:
    weights = tiny.random_weights()
    tiny.write_gguf(tmp_path / "a.gguf", weights)
    tiny.write_huggingface(tmp_path / "hf", weights)
    from_gguf = exported_logits(tmp_path / "a.gguf", tmp_path / "one", "int8")
    assert np.array_equal(from_gguf, exported_logits(tmp_path / "hf", tmp_path / "two", "int8"))
    one, two = read_manifest(tmp_path / "one"), read_manifest(tmp_path / "two")
    assert one.vocab_sha256 == two.vocab_sha256
    assert sorted(one.eos_token_ids) == sorted(two.eos_token_ids) == [0, 2]


def test_split_gguf_exports_like_the_whole(tiny_gguf: Path, tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "tiny.gguf", tiny.random_weights(), tensors_per_part=8)
    parts = sorted(tmp_path.glob("tiny-*.gguf"))
    split = export_model(parts[1], tmp_path / "split")
    whole = export_model(tiny_gguf, tmp_path / "whole")
    same = set(whole.files) - {"README.md"}  # which states the hash of the source
    assert all(split.files[name] == whole.files[name] for name in same)
    assert split.source.sha256 == ",".join(file_record(part).sha256 for part in parts)
    assert split.source.name == parts[0].name


@pytest.mark.parametrize(("precision", "bound"), [("int8", 0.05), ("int4", 0.4)])
def test_rounded_precisions_stay_near_the_source(tmp_path: Path, precision: str, bound: float) -> None:
    weights = tiny.random_weights()
    tiny.write_gguf(tmp_path / "a.gguf", weights)
    reference = tiny.reference_logits(weights, TOKENS)
    error = exported_logits(tmp_path / "a.gguf", tmp_path / "out", precision) - reference
    assert 0 < error.std() < bound * reference.std()


def test_linear_rope_scaling_stretches_positions(tmp_path: Path) -> None:
    weights = tiny.random_weights()
    tiny.write_huggingface(tmp_path / "hf", weights)
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text()) | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    path.write_text(json.dumps(config))
    scaled = exported_logits(tmp_path / "hf", tmp_path / "out")
    plain = tiny.reference_logits(weights, TOKENS)
    assert np.abs(scaled[0] - plain[0]).max() < 1e-4  # position 0 is not rotated
    assert np.abs(scaled[-1] - plain[-1]).max() > 0.1


def test_manifest_describes_the_folder_and_its_hashes_hold(tiny_model: Path) -> None:
    manifest = read_manifest(tiny_model)
    verify_files(tiny_model, manifest)
    found_at_use = {"experience.json", "row_proofs.json"}  # written where other tests ran this model
    made = {path.name for path in tiny_model.iterdir()} - {"edgespec.json", *found_at_use}
    assert set(manifest.files) == made
    assert manifest.context_length == tiny.CONTEXT
    assert manifest.vocab_size == tiny.VOCAB
    assert manifest.kv_cache.bytes_per_token == 2 * 4 * tiny.LAYERS * tiny.KV_HEADS * tiny.HEAD_DIM


def test_two_exports_of_one_source_are_the_same_bytes(tiny_gguf: Path, tmp_path: Path) -> None:
    one = export_model(tiny_gguf, tmp_path / "one", precision="int4")
    two = export_model(tiny_gguf, tmp_path / "two", precision="int4")
    assert one.files == two.files


# -- bad input ---------------------------------------------------------------------------------------


def assert_refused(source: Path, folder: Path, *words: str, error: type[EdgeSpecError] = SourceError) -> None:
    output = folder / "made" / "out"
    with pytest.raises(error) as raised:
        export_model(source, output)
    for word in words:
        assert word in str(raised.value)
    assert not output.exists()
    assert not output.parent.exists() or list(output.parent.iterdir()) == [], "something half written was left"


def test_every_cut_of_a_gguf_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    whole = tiny_gguf.read_bytes()
    for size in [0, 3, 4, 20, 24, 100, 1000, 5000, len(whole) // 2, len(whole) - 1]:
        cut = tmp_path / f"{size}.gguf"
        cut.write_bytes(whole[:size])
        assert_refused(cut, tmp_path)


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    assert_refused(tmp_path / "a.gguf", tmp_path, "not a GGUF file")


def test_missing_source_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path / "none.gguf", tmp_path, "does not exist")


def test_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "a.gguf", tiny.random_weights(), architecture="mamba")
    assert_refused(tmp_path / "a.gguf", tmp_path, "mamba", "llama", "qwen2")


def test_unknown_tensor_type_is_named_with_the_known_ones(tmp_path: Path) -> None:
    weights = tiny.random_weights()
    tiny.write_gguf(tmp_path / "a.gguf", weights)
    data = (tmp_path / "a.gguf").read_bytes()
    name = b"token_embd.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # past the number of dimensions and the two extents
    (tmp_path / "a.gguf").write_bytes(data[:at] + (17).to_bytes(4, "little") + data[at + 4 :])
    assert_refused(tmp_path / "a.gguf", tmp_path, "IQ2_XS", "Q4_K", "token_embd.weight")


@pytest.mark.parametrize(
    ("skip", "words"),
    [
        ("tokenizer.ggml.tokens", "carries no tokenizer"),
        ("tokenizer.ggml.merges", "no merges"),
        ("model.layers.1.mlp.up_proj.weight", "blk.1.ffn_up.weight"),
    ],
)
def test_incomplete_gguf_is_refused(tmp_path: Path, skip: str, words: str) -> None:
    tiny.write_gguf(tmp_path / "a.gguf", tiny.random_weights(), skip=(skip,))
    assert_refused(tmp_path / "a.gguf", tmp_path, words)


def test_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "a.gguf", tiny.random_weights(), override={"tokenizer.ggml.pre": "tekken"})
    assert_refused(tmp_path / "a.gguf", tmp_path, "tekken", "qwen2")


def test_tensor_that_no_such_model_has_is_refused(tmp_path: Path) -> None:
    weights = tiny.random_weights() | {"model.layers.0.self_attn.o_proj.bias": np.ones(64, np.float32)}
    tiny.write_gguf(tmp_path / "a.gguf", weights)
    assert_refused(tmp_path / "a.gguf", tmp_path, "attn_output.bias")


def test_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    tiny.write_huggingface(tmp_path / "hf", tiny.random_weights())
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "hf" / "pytorch_model.bin")
    assert_refused(tmp_path / "hf", tmp_path, "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder that is right."""
    tiny.write_huggingface(tmp_path / "hf", tiny.random_weights())
    return tmp_path / "hf"


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("model_type", ["llama", "tiny-of-its-own"])
def test_code_of_a_repository_is_never_run(folder: Path, tmp_path: Path, model_type: str) -> None:
    canary = tmp_path / "canary"
    for name in ("configuration_tiny.py", "modeling_tiny.py", "tokenization_tiny.py"):
        (folder / name).write_text(f"open({str(canary)!r}, 'w')")
    code = {"AutoConfig": "configuration_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyModel"}
    change(folder / "config.json", model_type=model_type, auto_map=code, trust_remote_code=True)
    names = {"AutoTokenizer": ["tokenization_tiny.TinyTokenizer", "tokenization_tiny.TinyTokenizer"]}
    change(folder / "tokenizer_config.json", auto_map=names)
    if model_type == "llama":
        export_model(folder, tmp_path / "out")
    else:
        assert_refused(folder, tmp_path, "tiny-of-its-own")
    assert not canary.exists()


class Canary:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def zipped(pickled: bytes) -> bytes:
    """The way torch.save has had since 1.6."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3")
    return buffer.getvalue()


@pytest.mark.parametrize("form", [bytes, zipped], ids=["plain", "zipped"])
@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "model.pt", "model.safetensors", "tokenizer.json", "config.json", "shard in the index"],
)
def test_pickles_are_refused_and_never_loaded(
    folder: Path, tmp_path: Path, name: str, form: Callable[[bytes], bytes]
) -> None:
    canary = tmp_path / "canary"
    pickled = form(pickle.dumps(Canary(canary)))
    if name == "shard in the index":
        name = "pytorch_model.bin"
        index = {"weight_map": {"model.norm.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if name.endswith((".bin", ".pt")):
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickled)
    assert_refused(folder, tmp_path)
    assert_refused(folder / name, tmp_path, "not a GGUF file", "runs code")
    assert not canary.exists()
    pickle.loads(pickle.dumps(Canary(canary)))
    assert canary.exists(), "the canary sings where it is let"


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny.write_huggingface(tmp_path / "hf", tiny.random_weights())
    (tmp_path / "hf" / "tokenizer.json").unlink()
    assert_refused(tmp_path / "hf", tmp_path, "tokenizer.json")


def test_cut_safetensors_is_refused(tmp_path: Path) -> None:
    tiny.write_huggingface(tmp_path / "hf", tiny.random_weights())
    path = tmp_path / "hf" / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 7, 8, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert_refused(tmp_path / "hf", tmp_path, "cut short")


def test_index_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    tiny.write_huggingface(tmp_path / "hf", tiny.random_weights(), shards=2)
    index = tmp_path / "hf" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../secret.safetensors"}}))
    assert_refused(tmp_path / "hf", tmp_path, "../secret.safetensors")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "", 7, None])
def test_index_cannot_name_files_that_are_there_outside_its_folder(folder: Path, name: object) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert_refused(folder, folder.parent)


def safetensors(header: bytes | dict[str, object], data_bytes: int = 1024) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


def f32(shape: object, begin: object, end: object, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (safetensors({"a": f32([8], 0, 32), "b": f32([8], 16, 48)}), "a and b overlap"),
        (safetensors({"a": f32([8], 0, 32), "b": f32([8], 0, 32)}), "a and b overlap"),
        (safetensors(b'{"a": {"dtype": "F32"}, "a": {"dtype": "F32"}}'), "twice"),
        (safetensors({"a": f32([8], -32, 0)}), "does not lie within"),
        (safetensors({"a": f32([8], 0, 2**63)}), "does not lie within"),
        (safetensors({"a": f32([2**40, 2**40], 0, 2**82)}), "does not lie within"),
        (safetensors({"a": f32([8], 1024, 1056)}), "does not lie within"),
        (safetensors({"a": f32([8], 0, 28)}), "does not lie within"),
        (safetensors({"a": f32([8.0], 0, 32)}), "whole numbers"),
        (safetensors({"a": f32([8], 0.0, 32)}), "whole numbers"),
        (safetensors({"a": f32([True], 0, 4)}), "whole numbers"),
        (safetensors({"a": f32([-8], 0, -32)}), "vectors and matrices"),
        (safetensors({"a": f32([], 0, 4)}), "vectors and matrices"),
        (safetensors({"a": f32([1] * 9, 0, 4)}), "vectors and matrices"),
        (safetensors({"a": f32("8", 0, 32)}), "whole numbers"),
        (safetensors({"a": f32([8], 0, 32, "F8_E4M3")}), "F8_E4M3"),
        (safetensors({"a": f32([8], 0, 32, ["F32"])}), "dtype"),
        (safetensors({"a": {"dtype": "F32", "shape": [8], "data_offsets": [0]}}), "damaged header"),
        (safetensors({"a": 7}), "damaged header"),
        (safetensors(b"[]"), "damaged header"),
        (safetensors(b"\xff" * 8), "damaged header"),
        (safetensors(b"[" * 100_000), "damaged header"),
        ((2**63).to_bytes(8, "little") + bytes(64), "cut short"),
    ],
)
def test_damaged_safetensors_are_refused_in_words(folder: Path, content: bytes, words: str) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert_refused(folder, folder.parent, words)


def test_header_of_safetensors_that_is_over_the_cap_is_not_read(folder: Path) -> None:
    """A sparse file, in which the header fits."""
    with (folder / "model.safetensors").open("wb") as file:
        file.write((10**9).to_bytes(8, "little"))
        file.truncate(2 * 10**9)
    started = time.process_time()
    assert_refused(folder, folder.parent, "not a safetensors file")
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json"]
)
def test_texts_that_are_too_large_are_not_read(folder: Path, name: str) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(1 << 33)
    started = time.process_time()
    assert_refused(folder, folder.parent, name, "8192 MiB")
    assert time.process_time() - started < 1


def split_by(pattern: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre_tokenizer": split_by("((((")}, "not a usable tokenizer"),
        ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 40}}, "ever more text"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 10**6}]}},
            "more",
        ),
        ({"decoder": {"type": "Sequence", "decoders": [DOUBLING] * 40}}, "ever more text"),
        (
            {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]] * 100_000}},
            "not a usable tokenizer",
        ),
        ({"model": {"type": "BPE", "vocab": {f"x{i}": i for i in range(200_000)}, "merges": []}}, "embedding has"),
        ({"model": {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}}, "id 4294967295"),
        ({"model": {"type": "BPE", "vocab": {"a": 2**32 - 2}, "merges": []}}, "id 4294967294"),
        ({"model": {"type": "BPE", "vocab": {"a": 2**80}, "merges": []}}, "not a usable tokenizer"),
        ({"model": [[[[]]]]}, "not a usable tokenizer"),
    ],
)
def test_tokenizers_that_are_made_to_harm_are_refused_in_time(
    folder: Path, changes: dict[str, object], words: str
) -> None:
    change(folder / "tokenizer.json", **changes)
    started = time.process_time()
    assert_refused(folder, folder.parent, words)
    assert time.process_time() - started < 5


def test_gguf_token_of_great_length_is_refused_in_time(tmp_path: Path) -> None:
    pieces = [*tiny.PIECES[:-1], "a" * 10**6]
    override = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * len(pieces),
    }
    tiny.write_gguf(tmp_path / "a.gguf", tiny.random_weights(), override=override)
    started = time.process_time()
    assert_refused(tmp_path / "a.gguf", tmp_path, "token of 1000000 characters")
    assert time.process_time() - started < 2


def test_padding_and_truncation_of_a_tokenizer_are_left_behind(folder: Path, tmp_path: Path) -> None:
    """Some are published with those of their training."""
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 10**9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    plain = export_model(folder, tmp_path / "plain")
    change(folder / "tokenizer.json", truncation=truncation, padding=padding)
    assert export_model(folder, tmp_path / "out").files == plain.files


@pytest.mark.parametrize("precision", ["source", "int8", "fp32"])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, precision: str) -> None:
    weights = tiny.random_weights()
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    tiny.write_huggingface(tmp_path / "hf", weights)
    with pytest.raises(SourceError, match=r"up_proj.*not finite"):
        export_model(tmp_path / "hf", tmp_path / "out", precision=precision)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0, wanted a whole number"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"max_position_embeddings": 700.5}, "whole number"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_scaling": [1]}, "cannot be understood"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor is None"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "scaling 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "rotates 8 of the 16"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "activation"),
        ({"eos_token_id": 10**12}, "eos token id"),
        ({"eos_token_id": [[1]]}, "cannot be understood"),
        ({"eos_token_id": "abc"}, "special token ids"),
        ({"hidden_size": 128}, "its settings want"),
        ({"model_type": "bert"}, "bert"),
    ],
)
def test_odd_settings_are_refused_in_words(tmp_path: Path, change: dict[str, object], words: str) -> None:
    tiny.write_huggingface(tmp_path / "hf", tiny.random_weights())
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert_refused(tmp_path / "hf", tmp_path, words)


@pytest.mark.parametrize(
    "override",
    [
        {"tokenizer.ggml.token_type": 3},
        {"tokenizer.ggml.merges": [1, 2]},
        {"tokenizer.ggml.pre": ["smollm"]},
        {"tokenizer.chat_template": 7},
        {"tokenizer.ggml.bos_token_id": "a"},
        {"tokenizer.ggml.bos_token_id": 4_000_000_000},
        {"llama.block_count": "two"},
    ],
)
def test_odd_metadata_is_refused(tmp_path: Path, override: dict[str, object]) -> None:
    tiny.write_gguf(tmp_path / "a.gguf", tiny.random_weights(), override=override)
    assert_refused(tmp_path / "a.gguf", tmp_path)


def test_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    weights = tiny.random_weights()
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:100]
    tiny.write_huggingface(tmp_path / "hf", weights)
    assert_refused(tmp_path / "hf", tmp_path, "embedding has 100 rows")


def test_named_chat_templates_give_the_default_one(tmp_path: Path) -> None:
    tiny.write_huggingface(tmp_path / "hf", tiny.random_weights())
    templates = [{"name": "tools", "template": "x"}, {"name": "default", "template": tiny.TEMPLATE}]
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    export_model(tmp_path / "hf", tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == tiny.TEMPLATE


# Where an export is killed: after its first lines of talk, at a write, around each step.
KILLED_EXPORTS = """
import os, signal, sys
from pathlib import Path
import edgespec.system.disk, edgespec.system.file_lock
from edgespec.export import convert, output as output_module, graph, weights

source, parent = Path(sys.argv[1]), Path(sys.argv[2])
output = parent / "out"

def die(*arguments, **settings):
    os.kill(os.getpid(), signal.SIGKILL)

def before(owner, name):
    setattr(owner, name, die)

def after(owner, name):
    step = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **settings: die(step(*arguments, **settings)))

def in_the_fifth_write():
    write, count = weights.WeightsFile._write, iter(range(99))
    weights.WeightsFile._write = lambda self, part: die() if next(count) == 4 else write(self, part)

def exporting(prepare):
    if (pid := os.fork()) == 0:
        try:
            prepare()
            convert.export_model(source, output)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

STAGES = {
    "reading": (lambda: after(convert, "read_source"), False),
    "locked": (lambda: before(output_module, "require_disk_space"), False),
    "weights": (in_the_fifth_write, False),
    "graph": (lambda: before(convert.ir, "save"), False),
    "saved": (lambda: after(convert.ir, "save"), False),
    "hashing": (lambda: before(convert, "file_record"), False),
    "manifest": (lambda: before(convert, "write_manifest"), False),
    "written": (lambda: after(convert, "write_manifest"), False),
    "renaming": (lambda: before(os, "rename"), False),
    "renamed": (lambda: after(os, "rename"), True),
}
for stage, (prepare, is_whole) in STAGES.items():
    assert exporting(prepare) == signal.SIGKILL, stage
    assert output.exists() == is_whole, stage
    if is_whole:
        left = {path.name for path in parent.iterdir()}
        assert left == {"out", ".out.lock"}, left
        os.rename(output, parent / "first")
    assert exporting(lambda: None) == 0, stage
    left = {path.name for path in parent.iterdir()} - {"first"}
    assert left == {"out"}, (stage, left)
    output_module.shutil.rmtree(output)
    print(stage)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, which Windows lacks: the stages run in forks")
def test_export_that_is_killed_at_any_stage_leaves_no_half_and_can_be_run_again(
    tiny_gguf: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED_EXPORTS, str(tiny_gguf), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[-1] == "renamed"
    verify_files(tmp_path / "first", read_manifest(tmp_path / "first"))


def test_leftovers_of_outputs_with_longer_names_are_left_alone(tiny_gguf: Path, tmp_path: Path) -> None:
    other = tmp_path / ".out.int4.partial"
    other.mkdir()
    export_model(tiny_gguf, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.int4.partial", "out"]


def test_second_export_to_one_output_waits_for_the_first(tiny_gguf: Path, tmp_path: Path) -> None:
    """The first is another process, which holds the lock until the second says that it waits."""
    output = tmp_path / "out"
    program = (
        "import sys; from pathlib import Path; from edgespec.export import convert;"
        "convert._write_files = (lambda write: lambda *given: (print('busy', flush=True), sys.stdin.readline(),"
        " write(*given))[2])(convert._write_files);"
        "convert.export_model(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", program, str(tiny_gguf), str(output)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdin is not None
        assert first.stdout is not None
        assert first.stdout.readline() == b"busy\n"
        said: list[str] = []

        def report(line: str) -> None:
            said.append(line)
            if "waiting" in line:
                first.stdin.write(b"go on\n")
                first.stdin.flush()

        with pytest.raises(UsageError, match="already exists"):
            export_model(tiny_gguf, output, report=report)
    assert f"process {first.pid} is exporting to {output}; waiting for it" in said
    verify_files(output, read_manifest(output))
    assert list(tmp_path.iterdir()) == [output]


def test_everything_reaches_the_disk_before_the_folder_gets_its_name(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    fsync, rename, open_ = os.fsync, os.rename, os.open
    names: dict[int, str] = {}

    def opened(path: object, *settings: int) -> int:
        handle = open_(path, *settings)  # type: ignore[call-overload]
        names[handle] = Path(str(path)).name
        return int(handle)

    monkeypatch.setattr(edgespec.system.disk.os, "open", opened)
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append(("sync", names[handle])), fsync(handle)))
    monkeypatch.setattr(os, "rename", lambda old, new: (done.append(("rename", Path(new).name)), rename(old, new)))
    manifest = export_model(tiny_gguf, tmp_path / "out")
    files = {("sync", name) for name in [*manifest.files, "edgespec.json"]}
    assert set(done[: len(files)]) == files
    assert done[len(files) :] == [("sync", ".out.partial"), ("rename", "out"), ("sync", tmp_path.name)]


def test_dangling_link_in_the_way_is_seen_before_the_work(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    said: list[str] = []
    with pytest.raises(UsageError, match="already exists"):
        export_model(tiny_gguf, tmp_path / "out", report=said.append)
    assert said == []


def test_output_in_the_way_is_left_alone(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    with pytest.raises(UsageError, match="already exists"):
        export_model(tiny_gguf, tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "precious"


def test_full_disk_is_told_before_writing(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert_refused(tiny_gguf, tmp_path, "free some space", error=EdgeSpecError)


@pytest.mark.parametrize("limit_bytes", [0, 1000, 50_000, 300_000])
def test_largest_file_that_is_reached_while_writing_leaves_nothing(
    tiny_gguf: Path, tmp_path: Path, limit_bytes: int
) -> None:
    resource = pytest.importorskip("resource", reason="needs file size limits, which Windows lacks")
    signal = __import__("signal")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limits[1]))
    try:
        assert_refused(tiny_gguf, tmp_path, error=EdgeSpecError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


WRITES = {
    "weights": "edgespec.export.weights.WeightsFile._write",
    "graph": "edgespec.export.convert.ir.save",
    "texts": "pathlib.Path.write_text",
    "manifest": "edgespec.export.convert.write_manifest",
    "to the disk": "os.fsync",
    "name": "os.rename",
}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_full_disk_at_any_write_is_told_with_the_bytes_needed(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str, number: int
) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(write, fail)
    with pytest.raises(DiskFull, match=rf"MiB are needed.*{os.strerror(number)}.*free some space") as raised:
        export_model(tiny_gguf, tmp_path / "out")
    assert raised.value.needed_bytes > 100_000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EFBIG])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_write_that_is_forbidden_is_told_in_words(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str, number: int
) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(write, fail)
    with pytest.raises(EdgeSpecError, match=rf"cannot write to .*{os.strerror(number)}.*choose another"):
        export_model(tiny_gguf, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_folder_that_cannot_be_written_is_told_at_once(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(UsageError, match=rf"cannot write to .*{os.strerror(number)}.*--output"):
        export_model(tiny_gguf, tmp_path / "new" / "out")


def test_names_that_are_not_utf8_are_written_with_replacements(tiny_gguf: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"bad\xff\xfe.gguf")
    try:
        (tmp_path / name).symlink_to(tiny_gguf)
    except OSError:
        pytest.skip("needs a file system that takes names that are not UTF-8")
    manifest = export_model(tmp_path / name, tmp_path / "out")
    assert manifest.source.name == "bad\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}.gguf"
    assert read_manifest(tmp_path / "out") == manifest


@pytest.mark.parametrize("kind", ["file", "link"])
def test_file_or_link_in_the_place_of_the_partial_folder_is_left_alone(
    tiny_gguf: Path, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "text").write_text("precious")
    place = tmp_path / "made" / ".out.partial"
    place.parent.mkdir()
    if kind == "file":
        place.write_text("precious")
    else:
        place.symlink_to(tmp_path / "mine")
    with pytest.raises(UsageError, match="in the way and not a folder; remove it"):
        export_model(tiny_gguf, tmp_path / "made" / "out")
    assert [path.name for path in place.parent.iterdir()] == [".out.partial"]
    assert (tmp_path / "mine" / "text").read_text() == "precious"


def test_link_in_the_place_of_the_lock_is_told_in_words(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    (tmp_path / ".out.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(UsageError, match=r"\.out\.lock is a link and no lock; remove it"):
        export_model(tiny_gguf, tmp_path / "out")
    assert (tmp_path / "mine").read_text() == "precious"


def test_failed_export_takes_back_the_folders_above_it(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(DiskFull, match=r"are needed, 64\.0 MiB more must stay free, and"):
        export_model(tiny_gguf, tmp_path / "a" / "b" / "out")
    assert not list(tmp_path.iterdir())
