"""Each family against transformers' own logits, drawn from tests/make_references.py."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
from reference_weights import draw

from edgespec.errors import SourceError
from edgespec.export.convert import export_model
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder

DATA = Path(__file__).parent / "data"
REFERENCES = json.loads((DATA / "references.json").read_text())
FAMILIES = REFERENCES["families"]
LOGITS = np.load(DATA / "references.npz")
TOKENS = np.array(REFERENCES["tokens"], np.int32)

# What a GGUF file of a family says beside the common keys.
GGUF_KEYS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"qwen3.attention.key_length": 32, "qwen3.attention.value_length": 32},
    "granite": {
        "granite.embedding_scale": 6.0,
        "granite.attention.scale": 0.2,
        "granite.residual_scale": 0.4,
        "granite.logit_scale": 3.0,
    },
    "smollm3": {"smollm3.rope.freq_base": 2000000.0},
}


def weights_of(family: str) -> dict[str, np.ndarray]:
    return {name: draw(name, shape) for name, shape in FAMILIES[family]["shapes"].items()}


def largest_difference(source: Path, output: Path, family: str) -> float:
    manifest = export_model(source, output, precision="fp32")
    decoder = OnnxDecoder(output, manifest, find_device("cpu"))
    wanted = LOGITS[family]
    decoder.logits(TOKENS[:23], 1)  # the rest goes on from a cache
    return float(np.abs(decoder.logits(TOKENS, len(wanted)) - wanted).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_huggingface_folder_gives_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    tiny.write_huggingface(tmp_path / "hf", weights_of(family), config=FAMILIES[family]["config"])
    assert largest_difference(tmp_path / "hf", tmp_path / "out", family) < 1e-4


@pytest.mark.parametrize("family", GGUF_KEYS)
def test_gguf_gives_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    config = FAMILIES[family]["config"]
    keys = {f"{family}.block_count": config["num_hidden_layers"], **GGUF_KEYS[family]}
    tiny.write_gguf(tmp_path / "a.gguf", weights_of(family), architecture=family, override=keys)
    assert largest_difference(tmp_path / "a.gguf", tmp_path / "out", family) < 1e-4


def test_query_norms_in_a_family_without_them_are_refused(tmp_path: Path) -> None:
    config = FAMILIES["qwen3"]["config"] | {"model_type": "llama"}
    tiny.write_huggingface(tmp_path / "hf", weights_of("qwen3"), config=config)
    with pytest.raises(SourceError, match="query and key norms"):
        export_model(tmp_path / "hf", tmp_path / "out")
