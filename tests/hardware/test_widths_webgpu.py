"""Passes that are padded to few widths on the WebGPU provider; a GPU in software pads nothing by itself."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from families import FAMILIES, weights_of

from edgespec import load
from edgespec.decoding.decoder import BEST, Pass
from edgespec.export.convert import export_model
from edgespec.manifest import read_manifest
from edgespec.runtimes.device_checks import DeviceChecks
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.pass_shapes import PassShapes
from edgespec.types import TokenIds

pytestmark = pytest.mark.webgpu
SHAPES = PassShapes((4, 8), (16,))
NUM_DIFFERENT = tiny.VOCAB // 2  # each token has another one that is always as likely


# Heads of 16 numbers: for those of 32 Mesa's lavapipe does not compile the attention of several tokens.
@pytest.fixture(params=["llama", "gemma3"])
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A model folder in the gpu form, in single precision, whose likeliest token is one of two each time."""
    family = request.param
    config, weights = {**FAMILIES[family]["config"], "max_position_embeddings": 256}, weights_of(family)
    if config["head_dim"] == 32:
        config["head_dim"], weights = 16, {name: with_half_heads(name, value) for name, value in weights.items()}
    for name in weights.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        weights[name][NUM_DIFFERENT : 2 * NUM_DIFFERENT] = weights[name][:NUM_DIFFERENT]
    tiny.write_huggingface(tmp_path / "hf", weights, config=config)
    export_model(tmp_path / "hf", tmp_path / "gpu", precision="fp32", form="gpu")
    return tmp_path / "gpu"


def with_half_heads(name: str, value: np.ndarray) -> np.ndarray:
    return np.split(value, 2, axis=1 if "o_proj" in name else 0)[0] if "self_attn" in name else value


def pad_passes(model: Path) -> None:
    """Have graphs opened with the widths of SHAPES from now on, as a GPU's own check would choose them."""
    checks = DeviceChecks(model, read_manifest(model), find_device("webgpu"))._file
    for key, found in checks.read().items():
        assert found.has_argmax
        checks.write(key, replace(found, shapes=(SHAPES, None)))


def test_padded_passes_give_the_rows_and_tokens_of_others(model: Path) -> None:
    manifest = read_manifest(model)
    others = [OnnxDecoder(model, manifest, find_device(name)) for name in ("webgpu", "cpu")]
    pad_passes(model)
    padded = OnnxDecoder(model, manifest, find_device("webgpu"))
    assert [each.can.widths for each in (padded, *others)] == [SHAPES.rows, (), ()]
    text = np.random.default_rng(3).integers(0, tiny.VOCAB, 256).astype(np.int32)
    # A prompt; plain decoding; drafts, of which some are given up; and the end of the context.
    for num_tokens, num_last in ((21, 1), (22, 1), (26, 4), (24, 1), (30, 6), (70, 1), (255, 3), (256, 2), (9, 9)):
        rows, *expected = (each.logits(text[:num_tokens], num_last).copy() for each in (padded, *others))
        tokens = [best_of(each, text[:num_tokens], num_last) for each in (padded, *others[:1])]
        for each in expected:
            assert np.abs(rows - each).max() < 1e-4 * expected[1].std(), (num_tokens, num_last)
            assert tokens == [each.argmax(1).tolist()] * 2
        assert all(token < NUM_DIFFERENT or token == 2 * NUM_DIFFERENT for token in tokens[0]), (
            "the first of equals"
        )


def best_of(decoder: OnnxDecoder, tokens: TokenIds, num_last: int) -> list[int]:
    found = decoder.run(Pass(tokens, num_last=num_last, wants=BEST)).best
    assert found
    assert found.is_sound.all()
    return found.ids.tolist()


def test_an_answer_of_padded_passes_is_that_of_others_with_and_without_drafts(model: Path) -> None:
    answers = []
    for widths in ((), SHAPES.rows):
        for drafter in ("none", "suffix", "lookahead"):
            length = "auto" if drafter == "none" else 4
            with load(model, device="webgpu", drafter=drafter, draft_length=length, deterministic=False) as engine:
                assert engine.target.can.widths == widths
                answers.append(engine.generate("the the the", max_tokens=40))
        pad_passes(model)
    assert [each.token_ids for each in answers] == [answers[0].token_ids] * 6
    assert [len(each.token_ids) for each in answers] == [40] * 6
    assert all(each.stats.num_drafted > 0 for each in answers if each is not answers[0] and each is not answers[3])
