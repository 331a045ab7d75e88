"""Folders of drafting heads for a tiny target, and the hidden states that its decoder would have stored."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from edgespec.decoding.hidden_states import HiddenStates
from edgespec.export.heads.dialects import find_dialect
from edgespec.export.heads.head_source import read_head
from edgespec.export.precision import Rule
from edgespec.export.sources import read_source
from edgespec.export.weights import WeightsFile
from edgespec.manifest import Manifest, Source
from edgespec.types import TokenIds


def write_head_folder(
    folder: Path, head: Path, target: Path, precision: str = "fp32", *, is_half: bool = False
) -> Manifest:
    """Write graphs and weights alone; returns the manifest of the folder, without hashes."""
    loaded = read_source(target)
    source = read_head(head)
    plan = find_dialect(source).plan(source, loaded)
    rule = Rule(precision, 32, is_half=is_half, has_fused_products=not is_half)
    manifest = Manifest(
        name="head",
        architecture=plan.head.method,
        precision=precision,
        context_length=loaded.config.context_length,
        kv_cache=replace(plan.kv_cache, dtype="float16" if is_half else "float32"),
        vocab_size=loaded.config.vocab_size,
        vocab_sha256="",
        bos_token_id=None,
        eos_token_ids=(),
        add_bos=False,
        source=Source(name="head", format="safetensors", sha256=""),
        graph=plan.graph,
        head=plan.head,
        vocab_subset="vocab_subset.npy" if plan.tokens is not None else None,
    )
    folder.mkdir(parents=True)
    with WeightsFile(folder / manifest.weights) as weights:
        graphs = plan.write_graphs(manifest, plan.tensors, weights, rule)
    for file, graph in graphs.items():
        ir.save(graph, folder / file)
    if plan.tokens is not None:
        np.save(folder / "vocab_subset.npy", plan.tokens)
    return manifest


def read_subset_of(folder: Path, manifest: Manifest) -> TokenIds | None:
    return None if manifest.vocab_subset is None else np.load(folder / manifest.vocab_subset)


def random_features(layers: tuple[int, ...], size: int, num_tokens: int, seed: int = 0) -> np.ndarray:
    """Hidden states of a text, [num_tokens, layers * size]."""
    return np.random.default_rng(seed).normal(size=(num_tokens, len(layers) * size)).astype(np.float32)


def store_of(manifest: Manifest, tokens: TokenIds, features: np.ndarray) -> HiddenStates:
    """A store that holds the hidden states of all of tokens but the newest."""
    assert manifest.head is not None
    store = HiddenStates(manifest.head.target_layers, manifest.head.target_hidden_size)
    store.put(0, tokens[:-1], features[: len(tokens) - 1])
    return store
