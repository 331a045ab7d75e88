"""Tiny random models through the exporter, against the same transformer written out in numpy."""

import json
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import numpy as np
import pytest
import tiny
from tokenizers import Tokenizer

from edgespec.export import template_check
from edgespec.export.blocks import BLOCK_FORMATS
from edgespec.export.convert import export_model
from edgespec.export.sources import read_source
from edgespec.export.template_check import report_template
from edgespec.export.vocabulary import vocabulary_from_gguf
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.system.file_hashes import file_record, verify_files
from edgespec.text.chat_template import TemplateProcess

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


@pytest.mark.parametrize("storage", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "TQ1_0"])
def test_source_export_of_blocks_differs_only_by_8_bit_activations(tmp_path: Path, storage: str) -> None:
    """Rounding activations to 8 bits moves logits by a percent; losing the minima of Q4_1 moves them by 30."""
    inner = max(tiny.INNER, BLOCK_FORMATS[storage].weights_per_block)
    override = {"llama.feed_forward_length": inner}
    weights = tiny.random_weights(inner=inner)
    weights = tiny.write_gguf(tmp_path / "a.gguf", weights, storage=storage, override=override)
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


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "module."])
def test_names_that_torch_wrapped_are_read_without_the_wrapper(tmp_path: Path, wrapper: str) -> None:
    weights = tiny.random_weights(tied=False)
    tiny.write_huggingface(tmp_path / "hf", weights, shards=2)
    tiny.write_huggingface(
        tmp_path / "wrapped", {wrapper + name: each for name, each in weights.items()}, shards=2
    )
    found, wanted = (read_source(tmp_path / name) for name in ("wrapped", "hf"))
    assert found.tensors.keys() == wanted.tensors.keys()
    assert all(each.holds_same(wanted.tensors[role]) for role, each in found.tensors.items())


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


def test_manifest_describes_the_folder_and_its_hashes_hold(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    export_model(tiny_gguf, folder, precision="fp32")
    manifest = read_manifest(folder)
    verify_files(folder, manifest.files)
    assert set(manifest.files) == {path.name for path in folder.iterdir()} - {"edgespec.json"}
    assert manifest.context_length == tiny.CONTEXT
    assert manifest.vocab_size == tiny.VOCAB
    assert manifest.kv_cache.bytes_per_token == 2 * 4 * tiny.LAYERS * tiny.KV_HEADS * tiny.HEAD_DIM


def test_two_exports_of_one_source_are_the_same_bytes(tiny_gguf: Path, tmp_path: Path) -> None:
    one = export_model(tiny_gguf, tmp_path / "one", precision="int4")
    two = export_model(tiny_gguf, tmp_path / "two", precision="int4")
    assert one.files == two.files


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateProcess]:
    with closing(TemplateProcess()) as process:
        yield process


TOOLS = "{% if tools %}{{ tools | tojson }} <tool_call>\n{}\n</tool_call>{% endif %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (tiny.TEMPLATE, None),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + tiny.TEMPLATE, None),
        ("{% if messages[1] is defined %}{{ 1 / 0 }}{% endif %}" + tiny.TEMPLATE, "ZeroDivisionError"),
        ("{% for m in messages %}{% unheard %}{% endfor %}", "unheard"),
        ("{{ messages[0]['content'].wrong }}", "leaves out what the user says"),
        (
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
            "out the system message; other",
        ),
        (
            "{{ messages[-1].content }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}",
            "leaves out what the assistant said",
        ),
        ("{% if enable_thinking is false %}{{ 1 / 0 }}{% endif %}" + tiny.TEMPLATE, "Chats with reasoning off"),
        (TOOLS + tiny.TEMPLATE, None),
        (TOOLS.replace("| tojson", "| nothing") + tiny.TEMPLATE, "fails with tools"),
        (TOOLS.replace("<tool_call>", "<unheard>") + tiny.TEMPLATE, "in a form that is not known"),
        (
            TOOLS + tiny.TEMPLATE.replace("message['content']", "message['content'] if message.role != 'tool'"),
            None,
        ),
        (
            TOOLS + "{% if 'Qzvgave' in messages[-1].content %}{{ 1 / 0 }}{% endif %}" + tiny.TEMPLATE,
            "Tools with this model will fail",
        ),
        (
            TOOLS
            + "{% if messages | length == 3 and tools %}{{ raise_exception('too long') }}{% endif %}"
            + tiny.TEMPLATE,
            "too long",
        ),
        ("", "no chat template"),
    ],
)
def test_export_says_what_will_go_wrong_in_a_chat(
    template: str, words: str | None, renderer: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_check, "TemplateProcess", lambda: renderer)
    monkeypatch.setattr(template_check, "closing", nullcontext)
    stated = tiny.GGUF_TOKENIZER | {"tokenizer.chat_template": template}
    vocabulary = vocabulary_from_gguf("a.gguf", stated)
    lines: list[str] = []
    report_template(vocabulary, Tokenizer.from_str(vocabulary.tokenizer_json), lines.append)
    assert len(lines) == (words is not None)
    assert all(words in line for line in lines if words)
