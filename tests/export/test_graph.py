"""The graphs that one weights file serves: fewer layers, trees of drafts, hidden states."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import tiny
from families import CONVOLVED, FAMILIES, write_source

from edgespec.export.graph import Variant, build_graph
from edgespec.export.precision import Rule
from edgespec.export.sources import LoadedSource, read_source
from edgespec.export.weights import WeightsFile

HIDDEN = -1e9


class Graphs:
    """Several variants over one weights file."""

    def __init__(
        self, folder: Path, source: LoadedSource, precision: str, *variants: Variant, **how: bool
    ) -> None:
        folder.mkdir()
        self.source = source
        with WeightsFile(folder / "weights") as weights:
            for number, variant in enumerate(variants):
                graph = build_graph(source.config, source.tensors, weights, Rule(precision, 32, **how), variant)
                ir.save(graph, folder / f"{number}.onnx")
        self.weights_bytes = (folder / "weights").stat().st_size
        provider = ["CPUExecutionProvider"]
        paths = [folder / f"{number}.onnx" for number in range(len(variants))]
        self.sessions = [onnxruntime.InferenceSession(str(path), providers=provider) for path in paths]

    def run(
        self, number: int, tokens: np.ndarray, past: dict[str, np.ndarray] | None = None, **more: np.ndarray
    ) -> dict[str, np.ndarray]:
        """One pass over tokens behind what an earlier one gave."""
        session = self.sessions[number]
        num_past = next(iter(past.values())).shape[1] if past else 0
        feeds: dict[str, Any] = {
            "input_ids": tokens[None].astype(np.int64),
            "attention_mask": np.ones((1, num_past + len(tokens)), np.int64),
            "num_logits_to_keep": np.array([len(tokens)], np.int64),
            **more,
        }
        for value in session.get_inputs():
            if (name := value.name).startswith("past_key_values"):
                empty = np.zeros((value.shape[1], 0, value.shape[3]), np.float32)
                held = past[name.replace("past_key_values", "present")] if past else empty
                feeds[name] = held[None]
        outputs = [value.name for value in session.get_outputs()]
        return dict(zip(outputs, (value[0] for value in session.run(outputs, feeds)), strict=True))


@pytest.mark.parametrize("precision", ["fp32", "int4"])
@pytest.mark.parametrize("kept", [0, 1])
def test_kept_layers_are_the_model_that_has_no_others(tmp_path: Path, precision: str, kept: int) -> None:
    weights = tiny.random_weights()
    other = f"layers.{1 - kept}."
    fewer = {name.replace(f"layers.{kept}.", "layers.0."): w for name, w in weights.items() if other not in name}
    tiny.write_gguf(tmp_path / "whole.gguf", weights)
    tiny.write_gguf(tmp_path / "fewer.gguf", fewer, override={"llama.block_count": 1})
    tokens = np.arange(20) + 5
    whole = read_source(tmp_path / "whole.gguf")
    both = Graphs(tmp_path / "both", whole, precision, Variant(), Variant(layers=(kept,)))
    alone = Graphs(tmp_path / "alone", whole, precision, Variant())
    one = Graphs(tmp_path / "one", read_source(tmp_path / "fewer.gguf"), precision, Variant())
    assert both.weights_bytes == alone.weights_bytes
    assert np.array_equal(both.run(0, tokens)["logits"], alone.run(0, tokens)["logits"])
    assert np.array_equal(both.run(1, tokens)["logits"], one.run(0, tokens)["logits"])


@pytest.mark.parametrize(
    ("family", "is_of_gpu"),
    [*((name, False) for name in FAMILIES if name not in CONVOLVED), ("llama", True), ("phi3-partial", True)],
)
def test_tree_of_drafts_gives_each_branch_its_own_logits(tmp_path: Path, family: str, is_of_gpu: bool) -> None:
    """Two branches behind a common prompt in one pass, against each branch alone."""
    write_source(tmp_path, family, "huggingface")
    source, tree = read_source(tmp_path / "hf"), Variant(has_tree_inputs=True)
    graphs = Graphs(tmp_path / "out", source, "fp32", Variant(), tree, has_fused_products=not is_of_gpu)
    prompt, one, other = np.arange(5) + 9, np.array([30, 31]), np.array([40, 41, 42])
    past = {name: value for name, value in graphs.run(0, prompt).items() if name.startswith("present")}
    tokens = np.concatenate([one, other])
    positions = np.array([[5, 6, 5, 6, 7]])
    bias = np.triu(np.full((5, 10), HIDDEN, np.float32), 6)
    bias[2:, 5:7] = HIDDEN  # the second branch does not see the first
    behind = positions.T - np.concatenate([np.arange(5), positions[0]])
    windows = [layer.sliding_window for layer in graphs.source.config.layers if layer.sliding_window]
    local = np.where(behind >= min(windows, default=99), HIDDEN, bias)
    inputs = {"position_ids": positions, "attention_bias": bias[None, None]}
    inputs["local_attention_bias"] = local[None, None].astype(np.float32)
    taken = {value.name for value in graphs.sessions[1].get_inputs()} & set(inputs)
    found = graphs.run(1, tokens, past, **{name: inputs[name] for name in taken})["logits"]
    first = graphs.run(0, np.concatenate([prompt, one]))["logits"][5:]
    second = graphs.run(0, np.concatenate([prompt, other]))["logits"][5:]
    assert np.abs(found[:2] - first).max() < 1e-4
    assert np.abs(found[2:] - second).max() < 1e-4


def test_hidden_states_are_those_that_the_next_layers_make_logits_of(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "a.gguf", tiny.random_weights())
    source = read_source(tmp_path / "a.gguf")
    graphs = Graphs(tmp_path / "out", source, "fp32", Variant(), Variant(hidden_layers=(0, 1)))
    tokens = np.arange(12) + 5
    found = graphs.run(1, tokens)
    assert np.array_equal(found["logits"], graphs.run(0, tokens)["logits"])
    last = found["hidden_states.1"]
    normed = last / np.sqrt(np.square(last).mean(axis=1, keepdims=True) + tiny.EPS)
    normed *= source.tensors["final_norm"].vector()
    (embedding,) = source.tensors["embedding"].floats()
    assert np.abs(normed @ embedding.T - found["logits"]).max() < 1e-4
    assert found["hidden_states.0"].shape == (12, tiny.HIDDEN)
