"""Families with other layers than attention and one MLP, on the WebGPU provider: a GPU, or one in software."""

from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
import tiny
from families import FAMILIES, weights_of

from edgespec import SamplingParams, load
from edgespec.export.convert import export_model
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.node_placement import find_strays, read_node_placement
from edgespec.runtimes.onnx import OnnxDecoder

pytestmark = pytest.mark.webgpu
TOKENS = np.random.default_rng(3).integers(0, tiny.VOCAB, 80).astype(np.int32)


SAME_ROWS = ["lfm2", "granitemoehybrid-mamba", "qwen3_5"]  # however the text is cut into passes


# Of heads of 16 numbers: for those of 32 Mesa's lavapipe does not compile the attention of several tokens. Of four
# such heads, as other tests have them: each number of heads has a shader of its own, of 6 s of compiling.
@pytest.fixture(scope="module", params=[*SAME_ROWS, "gemma4-shared"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A model folder in the gpu form, in single precision, which every adapter runs."""
    family = request.param
    config = {**FAMILIES[family]["config"], "max_position_embeddings": 256}
    weights = weights_of(family)
    if family == "qwen3_5":
        config |= {"head_dim": 16, "rope_parameters": None, "partial_rotary_factor": 1.0, "rope_theta": 10000.0}
        weights = {name: _halved(name, value, "13") for name, value in weights.items()}
    if family == "gemma4-shared":
        wide = config["per_layer_config"].keys()
        config["per_layer_config"] = {number: {"head_dim": 16} for number in wide}
        weights = {name: _halved(name, value, wide) for name, value in weights.items()}
    folder = tmp_path_factory.mktemp("models")
    tiny.write_huggingface(folder / "hf", weights, config=config)
    export_model(folder / "hf", folder / "gpu", precision="fp32", form="gpu")
    return folder / "gpu"


def _halved(name: str, value: np.ndarray, wide: Collection[str]) -> np.ndarray:
    """Half of each matrix of attention in the layers with wide heads."""
    if "self_attn" not in name or name.split(".")[2] not in wide:
        return value
    return np.split(value, 2, axis=1 if "o_proj" in name else 0)[0]


def test_rows_are_those_of_the_cpu_also_after_going_back(model: Path) -> None:
    manifest, device = read_manifest(model), find_device("webgpu")
    there, here = OnnxDecoder(model, manifest, device), OnnxDecoder(model, manifest, find_device("cpu"))
    assert find_strays(read_node_placement(there._passes._session), device, 5) is None  # four count lengths
    there.logits(TOKENS[:40], 1)
    for kept, num_new in ((40, 1), (41, 5), (43, 4), (44, 3), (20, 2), (21, 40), (7, 1), (0, 3)):
        tokens = np.append(TOKENS[:kept], TOKENS[80 - num_new :])
        found, expected = there.logits(tokens, num_new), here.logits(tokens, num_new)
        errors = (found - expected).std(axis=1) / expected.std()
        assert errors.max() < 1e-4, (kept, num_new)


@pytest.mark.parametrize("model", SAME_ROWS, indirect=True)
def test_drafts_give_the_text_of_plain_decoding(model: Path, tiny_drafter: Path) -> None:
    sampling = SamplingParams(temperature=0.8, seed=3)
    texts = []
    for options in (
        {"drafter": "none"},
        {"drafter": "suffix", "draft_length": 5},
        {"drafter": str(tiny_drafter), "draft_length": 3, "schedule": "pipelined"},
    ):
        with load(model, device="webgpu", deterministic=True, **options) as engine:  # type: ignore[arg-type]
            answer = engine.generate("the hen in the the hen in", sampling=sampling, max_tokens=40)
            assert answer.stats.downgrades == ()
            assert (answer.stats.num_drafted > 0) == (options["drafter"] != "none")
            texts.append(answer.token_ids)
    assert texts[1:] == texts[:1] * 2
