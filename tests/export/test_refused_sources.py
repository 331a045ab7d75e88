"""Sources that are broken, foreign or malicious are refused in time, and none of their code runs."""

import io
import json
import os
import pickle
import shutil
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny
from families import FAMILIES, weights_of
from refusals import assert_refused

from edgespec.errors import ModelError, SourceError
from edgespec.export.convert import export_model
from edgespec.export.gguf import read_gguf
from edgespec.export.options import ExportOptions
from edgespec.export.plan import plan_model
from edgespec.export.safetensors import read_tensors, weight_files
from edgespec.export.sources import read_source
from edgespec.setup.home import ModelHome
from edgespec.setup.open_model import open_decoder


def cuts(size: int) -> list[int]:
    """Lengths of a file that was cut: at its first bytes, its last one, and at random."""
    return [0, 3, 7, 8, 20, 24, size - 1, *np.random.default_rng(7).integers(0, size, 24).tolist()]


def test_every_cut_of_a_gguf_is_refused_with_its_size_and_the_size_wanted(tiny_gguf: Path, tmp_path: Path) -> None:
    whole = tiny_gguf.read_bytes()
    tensors = read_gguf(tiny_gguf).tensors.values()
    data = min(tensor.offset for tensor in tensors)
    needed = max(tensor.offset + tensor.num_bytes for tensor in tensors)
    cut = tmp_path / "cut.gguf"
    for size in cuts(needed):
        cut.write_bytes(whole[:size])
        with pytest.raises(SourceError, match="fetch it again") as raised:
            read_gguf(cut)
        words = [str(cut), str(size)] + ([f"need {needed}"] if size > data else [])
        assert all(word in str(raised.value) for word in words), raised.value
    assert_refused(cut, tmp_path)


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    assert_refused(tmp_path / "a.gguf", tmp_path, "not a GGUF file")


def test_missing_source_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path / "none.gguf", tmp_path, "does not exist")


def test_a_folder_with_onnx_alone_is_told_which_of_these_load(tmp_path: Path) -> None:
    tiny.write_huggingface(tmp_path / "hf", {})
    (tmp_path / "hf" / "model.safetensors").unlink()
    (tmp_path / "hf" / "onnx").mkdir()
    (tmp_path / "hf" / "onnx" / "model.onnx").write_bytes(b"")
    with pytest.raises(SourceError, match=r"is missing.*ONNX models load .* has genai_config\.json"):
        read_source(tmp_path / "hf")


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
        (
            "model.layers.1.mlp.up_proj.weight",
            "blk.1.ffn_up.weight; it is incomplete, or stores its weights in a way",
        ),
    ],
)
def test_incomplete_gguf_is_refused(tmp_path: Path, skip: str, words: str) -> None:
    tiny.write_gguf(tmp_path / "a.gguf", tiny.random_weights(), skip=(skip,))
    assert_refused(tmp_path / "a.gguf", tmp_path, words)


def test_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "a.gguf", tiny.random_weights(), override={"tokenizer.ggml.pre": "viking"})
    assert_refused(tmp_path / "a.gguf", tmp_path, "viking", "qwen2")


def test_tensor_that_no_such_model_has_is_refused(tmp_path: Path) -> None:
    weights = tiny.random_weights() | {"model.layers.0.self_attn.o_proj.scale": np.ones(64, np.float32)}
    tiny.write_gguf(tmp_path / "a.gguf", weights)
    assert_refused(tmp_path / "a.gguf", tmp_path, "attn_output.scale")


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
    assert_refused(tmp_path / "hf", tmp_path, "no tokenizer.json", "save_pretrained", "GGUF file")


def test_cut_safetensors_is_refused(tmp_path: Path) -> None:
    tiny.write_huggingface(tmp_path / "hf", tiny.random_weights())
    path = tmp_path / "hf" / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for size in cuts(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(SourceError, match="fetch it again") as raised:
            read_tensors([path])
        needed = f"need {len(whole)}" if size >= header else "needs more than 8" if size < 8 else f"needs {header}"
        assert all(word in str(raised.value) for word in (str(path), f"has {size} bytes", needed)), raised.value
    assert_refused(tmp_path / "hf", tmp_path, str(path))


@pytest.mark.parametrize("ending", [".part", ".incomplete", ".crdownload"])
def test_a_download_that_did_not_end_is_named(tmp_path: Path, ending: str) -> None:
    tiny.write_huggingface(tmp_path / "hf", tiny.random_weights(), shards=2)
    shard = tmp_path / "hf" / "model-00002-of-00002.safetensors"
    for path in (tmp_path / "a.gguf", shard):
        path.unlink(missing_ok=True)
        path.with_name(path.name + ending).write_bytes(bytes(77))
    words = ("a.gguf does not exist", f"a.gguf{ending} (77 bytes)", "resume")
    assert_refused(tmp_path / "a.gguf", tmp_path, *words)
    with pytest.raises(ModelError) as raised:  # as chat does
        ModelHome(tmp_path / "home").resolve(str(tmp_path / "a.gguf"))
    assert all(word in str(raised.value) for word in words)
    assert_refused(tmp_path / "hf", tmp_path, f"{shard} is missing, one of 2", f"{ending} (77 bytes)", "resume")
    kept = tmp_path / "hf" / ".cache" / "huggingface" / "download" / f"{shard.name}.ab12.incomplete"
    kept.parent.mkdir(parents=True)
    shard.with_name(shard.name + ending).rename(kept)
    assert_refused(tmp_path / "hf", tmp_path, str(kept), "resume")


@pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes, which Windows lacks")
@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors.index.json"])
def test_a_pipe_in_the_place_of_a_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert_refused(folder, folder.parent, "not a regular file")


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


def test_an_index_that_does_not_name_the_single_file_is_of_earlier_weights(folder: Path) -> None:
    single = folder / "model.safetensors"
    other = Path(shutil.copy(single, folder / "model-mtp.safetensors"))
    both = [single.name, other.name]
    for names, files in (([other.name], [single]), (["gone.safetensors"], [single]), (both, [other, single])):
        index = {"weight_map": dict(zip("ab", names, strict=False))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert weight_files(folder) == files


def test_a_single_file_of_weights_may_have_another_name_but_that_of_a_part(folder: Path) -> None:
    weights = folder / "model.safetensors"
    (folder / "adapter_model.safetensors").touch()
    for name in ("gptq_model-4bit-128g.safetensors", "model-00001-of-00001.safetensors"):
        weights = weights.rename(folder / name)
        assert weight_files(folder) == [weights]
    weights.rename(folder / "model-00001-of-00010.safetensors")
    with pytest.raises(SourceError, match=r"has model-00001-of-00010.safetensors, but no model.safetensors.index"):
        weight_files(folder)


def write_sized(folder: Path, heads: int, kv_heads: int, head_dim: int) -> None:
    """Write a folder whose attention has other sizes."""
    rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    weights = {name: value for name, value in tiny.random_weights().items() if "self_attn" not in name}
    for i in range(tiny.LAYERS):
        for part, count in rows.items():
            weights[f"model.layers.{i}.self_attn.{part}_proj.weight"] = np.ones((count, tiny.HIDDEN), np.float32)
        weights[f"model.layers.{i}.self_attn.o_proj.weight"] = np.ones((tiny.HIDDEN, rows["q"]), np.float32)
    tiny.write_huggingface(folder, weights)
    change(folder / "config.json", num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "form", "words"),
    [
        (4, 3, 16, "cpu", "4 attention heads and 3 heads of keys"),
        (4, 8, 16, "npu", "4 attention heads and 8 heads of keys"),
        (4, 2, 40, "cpu", "heads of 40 values, ONNX Runtime's kernels take multiples of 16"),
        (4, 2, 40, "gpu", "--exporter transformers"),
        (4, 2, 15, "npu", "heads of 15 values, ONNX Runtime's kernels take multiples of 2"),
    ],
)
def test_attention_that_no_kernel_runs_is_refused_before_anything_is_written(
    tmp_path: Path, heads: int, kv_heads: int, head_dim: int, form: str, words: str
) -> None:
    write_sized(tmp_path / "hf", heads, kv_heads, head_dim)
    with pytest.raises(SourceError, match=words):
        plan_model(tmp_path / "hf", ExportOptions(precision="fp32", form=form))
    with pytest.raises(SourceError, match=words):
        export_model(tmp_path / "hf", tmp_path / "out", precision="fp32", form=form)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tie_word_embeddings": False}, "no tensor lm_head.weight, and its config.json sets tie_word_embeddings"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', wanted true or false"),
        ({"max_position_embeddings": 1}, "texts of up to 1 token, wanted 2 or more"),
        (
            {"max_position_embeddings": 10**9},
            "max_position_embeddings is 1000000000, wanted a whole number below",
        ),
        ({"intermediate_size": None}, ": intermediate_size is missing"),
    ],
)
def test_config_that_does_not_suit_the_weights_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    change(folder / "config.json", **changes)
    assert_refused(folder, tmp_path, words)


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_bias_that_other_layers_have_is_not_left_out(tmp_path: Path, model_type: str) -> None:
    weights = tiny.random_weights(bias=True)
    del weights["model.layers.1.self_attn.k_proj.bias"]
    tiny.write_huggingface(tmp_path / "hf", weights, model_type=model_type)
    assert_refused(tmp_path / "hf", tmp_path, "has no tensor model.layers.1.self_attn.k_proj.bias")


def test_qwen2_without_biases_is_incomplete(tmp_path: Path) -> None:
    tiny.write_huggingface(tmp_path / "hf", tiny.random_weights(), model_type="qwen2")
    assert_refused(tmp_path / "hf", tmp_path, "has no tensor model.layers.0.self_attn.q_proj.bias")


def test_head_is_the_embedding_where_nothing_is_said_of_it(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    expected = read_source(folder).head
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    assert read_source(folder).head == expected


@pytest.mark.parametrize(("says", "is_same"), [(True, True), (True, False), (None, False), (False, False)])
def test_head_that_is_stored_is_used_unless_it_is_the_embedding(
    tmp_path: Path, says: bool | None, is_same: bool
) -> None:
    weights = tiny.random_weights()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * (1 if is_same else 2)
    tiny.write_huggingface(tmp_path / "hf", weights)
    change(tmp_path / "hf" / "config.json", tie_word_embeddings=says)
    loaded = read_source(tmp_path / "hf")
    assert ("head" in loaded.tensors) is not is_same
    assert len(loaded.notes) == (says is True and not is_same)


@pytest.mark.parametrize("said", [(True, False), (False, True), (None, True), (True, None)])
def test_whole_or_text_part_may_say_that_the_embedding_is_the_head(
    tmp_path: Path, said: tuple[bool | None, bool | None]
) -> None:
    whole, part = ({} if each is None else {"tie_word_embeddings": each} for each in said)
    inner = FAMILIES["gemma3"]["config"] | {"tie_word_embeddings": None} | part
    config = {"model_type": "gemma3", "text_config": inner, **whole}
    tiny.write_huggingface(tmp_path / "hf", weights_of("gemma3"), config=config)
    assert "head" not in read_source(tmp_path / "hf").tensors


@pytest.mark.filterwarnings("error")
def test_weights_that_overflow_are_a_fault_of_the_file(tmp_path: Path) -> None:
    weights = tiny.random_weights()
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = 3e38
    tiny.write_huggingface(tmp_path / "hf", weights)
    with pytest.raises(SourceError, match="not finite numbers, since some are too large"):
        export_model(tmp_path / "hf", tmp_path / "out", open_decoder=open_decoder)


def test_weights_of_zeros_are_a_fault_of_the_file(tmp_path: Path) -> None:
    weights = {name: np.zeros_like(value) for name, value in tiny.random_weights().items()}
    tiny.write_huggingface(tmp_path / "hf", weights)
    with pytest.raises(SourceError, match="give all tokens the same logit, as zeros do"):
        export_model(tmp_path / "hf", tmp_path / "out", open_decoder=open_decoder)


TEXTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def with_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in two shards that has every file of text."""
    folder = tmp_path_factory.mktemp("texts") / "hf"
    tiny.write_huggingface(folder, tiny.random_weights(), shards=2)
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    (folder / "chat_template.jinja").write_text(tiny.TEMPLATE + "é")
    return folder


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_files_that_windows_wrote_are_read(with_texts: Path, tmp_path: Path, encoding: str) -> None:
    shutil.copytree(with_texts, tmp_path / "hf")
    for name in (*TEXTS, INDEX):
        path = tmp_path / "hf" / name
        path.write_bytes(path.read_text(encoding="utf-8").encode(encoding))
    found, wanted = read_source(tmp_path / "hf"), read_source(with_texts)
    assert str(found.config) == str(wanted.config)  # which holds arrays
    assert (found.vocabulary, found.sampling) == (wanted.vocabulary, wanted.sampling)
    assert found.source == wanted.source


@pytest.mark.parametrize("name", [*TEXTS, INDEX, "model-00002-of-00002.safetensors"])
def test_what_is_no_text_and_what_is_a_pointer_is_named(with_texts: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(with_texts, tmp_path / "hf")
    path = tmp_path / "hf" / name
    if name in (*TEXTS, INDEX):
        path.write_bytes(path.read_text(encoding="utf-8").encode("utf-16-le"))
        assert_refused(tmp_path / "hf", tmp_path, str(path), "UTF-16 without a byte order mark")
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert_refused(tmp_path / "hf", tmp_path, str(path), "a pointer of Git LFS", "git lfs pull")


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
        (safetensors({"a": f32([8], -32, 0)}), "has 32 bytes, and the header states -32 to 0"),
        (safetensors({"a": f32([8], 0, 2**63)}), "has 32 bytes, and the header states 0 to"),
        (safetensors({"a": f32([2**40, 2**40], 0, 2**82)}), "ends early"),
        (safetensors({"a": f32([8], 1024, 1056)}), "ends early"),
        (safetensors({"a": f32([8], 0, 28)}), "has 32 bytes, and the header states 0 to 28"),
        (safetensors({"a": f32([8.0], 0, 32)}), "whole numbers"),
        (safetensors({"a": f32([8], 0.0, 32)}), "whole numbers"),
        (safetensors({"a": f32([True], 0, 4)}), "whole numbers"),
        (safetensors({"a": f32([-8], 0, -32)}), "wanted up to 5 numbers above 0"),
        (safetensors({"a": f32([1] * 9, 0, 4)}), "wanted up to 5 numbers above 0"),
        (safetensors({"a": f32("8", 0, 32)}), "whole numbers"),
        (safetensors({"a": f32([8], 0, 8, "F8_E4M3")}), "F8_E4M3"),
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
    assert_refused(folder, folder.parent, name, "8.6 GB")
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
        ({"model": {"type": "BPE", "vocab": {f"x{i}": i for i in range(20_000)}, "merges": []}}, "embedding has"),
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
        ({"rope_scaling": [1]}, "wanted an object with a rope_type"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 2,
                    "high_freq_factor": 2,
                    "original_max_position_embeddings": 64,
                }
            },
            "high_freq_factor 2",
        ),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "ntk"}}, "scaling 'ntk'"),
        ({"partial_rotary_factor": 0.5}, "rotates 8 of the 16"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "activation"),
        ({"eos_token_id": [[1]]}, "cannot be understood"),
        ({"eos_token_id": "abc"}, "special token ids"),
        ({"hidden_size": 128}, "its settings require"),
        ({"model_type": None}, "states no model_type, which names its family"),
        ({"model_type": "bert"}, "is a model that reads text and writes none"),
        ({"model_type": "qwen9", "vision_config": {}, "audio_config": {"a": 1}}, "'qwen9', which takes sound"),
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
        *(
            {f"tokenizer.ggml.{end}_token_id": value}
            for end in ("bos", "eos", "eot")
            for value in ("a", True, 1.0)
        ),
        {"llama.block_count": "two"},
    ],
)
def test_odd_metadata_is_refused(tmp_path: Path, override: dict[str, object]) -> None:
    tiny.write_gguf(tmp_path / "a.gguf", tiny.random_weights(), override=override)
    assert_refused(tmp_path / "a.gguf", tmp_path)


def test_tokenizer_larger_than_the_embedding_is_refused_by_its_header(tmp_path: Path) -> None:
    weights = tiny.random_weights()
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:100]
    tiny.write_huggingface(tmp_path / "hf", weights)
    tiny.write_gguf(tmp_path / "a.gguf", weights)
    for source in (tmp_path / "hf", tmp_path / "a.gguf"):
        with pytest.raises(SourceError, match="embedding has 100 rows"):
            read_source(source)
