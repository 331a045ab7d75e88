"""Folders of drafting heads for a tiny target, and the hidden states that its decoder would have stored."""

from pathlib import Path

import numpy as np

from edgespec.decoding.hidden_states import HiddenStates
from edgespec.export.heads.convert import export_head, plan_head
from edgespec.export.heads.head_source import read_head
from edgespec.export.options import Trimming
from edgespec.export.sources import read_source
from edgespec.manifest import Manifest
from edgespec.types import TokenIds


def write_head_folder(
    folder: Path,
    head: Path,
    target: Path,
    precision: str = "fp32",
    *,
    trimming: Trimming | None = None,
    block_size: int = 32,
    form: str = "cpu",
) -> Manifest:
    source, trimming = read_source(target), trimming or Trimming()
    planned = plan_head(source, read_head(head), precision, form=form, trimming=trimming, block_size=block_size)
    return export_head(planned, folder, "head")


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
