"""Check a new model folder against its source: its weights, its graph and its loss."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx_ir as ir
from tokenizers import Tokenizer

from edgespec.decoding.decoder import Decoder
from edgespec.errors import SourceError
from edgespec.export.blocks import Floats
from edgespec.export.check import NOISE, NUM_STEPS, TEXT, compare, compare_structure, judge, one_row_difference
from edgespec.export.reference import Matrix, Stream, reference_logits, stream_logits
from edgespec.export.sources import LoadedSource
from edgespec.export.written import WeightErrors, read_written
from edgespec.manifest import Check, Manifest
from edgespec.system.console import show_progress
from edgespec.system.context_managers import contextmanager
from edgespec.system.processes import environment_variable
from edgespec.text.tokenizer import translate_errors
from edgespec.types import Logits, TokenIds

_EXACT = "exact.onnx"  # in the folder while it is checked
# Read by ONNX Runtime when it makes a QMoE kernel: 8 bits have no accuracy_level with activations in floats.
_QMOE_PRODUCTS, _IN_FLOATS = "ORT_QMOE_CPU_QNBIT_GEMM", "fp32"
# Tokens of the text for the weights as they were written, and with noise on the embedding. On a first use the text
# is cut too, for decoding the weights takes most of the time then.
_WRITTEN_TOKENS, _NOISY_TOKENS, _QUICK_TOKENS = 96, 32, 48


class OpenDecoder(Protocol):
    """Opens the model of a folder that has no manifest file yet."""

    def __call__(self, folder: Path, manifest: Manifest, *, deterministic: bool = True) -> Decoder: ...


def check_folder(
    loaded: LoadedSource,
    tokenizer: Tokenizer,
    manifest: Manifest,
    folder: Path,
    open_decoder: OpenDecoder,
    *,
    is_quick: bool,
) -> Check:
    """Compare a folder with its source. Raises as judge does.

    is_quick: Compare fewer tokens, and no passes of one token beside others, for a first use.
    """
    with translate_errors(loaded.source.name, SourceError, "it cannot be used"):
        ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    tokens = np.array(ids, np.int32)[: manifest.context_length]
    if is_quick:
        tokens = tokens[:_QUICK_TOKENS]
    if manifest.kv_cache.form == "static":  # whose weights have other layouts
        reference = reference_logits(loaded.config, loaded.tensors, tokens)
        check = _compare(manifest, folder, open_decoder, tokens, reference, None, is_quick=is_quick)
        judge(check, manifest.precision)
        return check
    written = read_written(folder / manifest.graph, loaded.tensors)
    errors, num_layers = WeightErrors(written), loaded.config.num_layers

    def observe(role: str, parts: Sequence[Floats]) -> None:
        layer = role.partition(".")[0]
        number = int(layer) if layer.isdigit() else num_layers
        show_progress("comparing the weights with the source", number / (num_layers + 1))
        errors(role, parts)

    streams = [Stream(0), Stream(1, _WRITTEN_TOKENS), Stream(1, _NOISY_TOKENS, NOISE)]
    models: list[Mapping[str, Matrix]] = [loaded.tensors, written]
    with np.errstate(over="ignore", invalid="ignore"):  # reported below
        reference, own, noisy = stream_logits(loaded.config, loaded.tensors, models, streams, tokens, observe)
    _require_logits(loaded.source.name, reference)
    is_half = manifest.kv_cache.dtype == "float16"
    with _exact_graph(folder, manifest) as exact:
        show_progress("comparing the graph with the source")
        # A QMoE kernel that another thread makes meanwhile does not round either, which costs it nothing but time.
        with environment_variable(_QMOE_PRODUCTS, _IN_FLOATS):
            decoder = open_decoder(folder, exact, deterministic=True)
        structure = compare_structure(decoder, tokens, own, noisy, is_half=is_half)
        del decoder  # one at a time is in memory
    check = _compare(manifest, folder, open_decoder, tokens, reference, own, is_quick=is_quick)
    check = replace(check, weights_error=errors.largest, structure=structure)
    judge(check, manifest.precision, errors.wrong)
    return check


def _require_logits(name: str, reference: Logits) -> None:
    """Raises SourceError: A source's logits are no numbers, or prefer no token to another."""
    if not np.isfinite(reference).all():
        raise SourceError(
            f"the weights of {name} give logits that are not finite numbers, since some are too large for "
            "activations of 32 bits; the file is damaged, fetch it again; nothing was installed"
        )
    if (reference == reference[:, :1]).all():
        raise SourceError(
            f"the weights of {name} give all tokens the same logit, as zeros do; the file is damaged or its "
            "download is not complete, fetch it again; nothing was installed"
        )


def _compare(
    manifest: Manifest,
    folder: Path,
    open_decoder: OpenDecoder,
    tokens: TokenIds,
    reference: Logits,
    written: Logits | None,
    *,
    is_quick: bool,
) -> Check:
    show_progress("comparing the answers with the source")
    decoder = open_decoder(folder, manifest, deterministic=True)
    check = compare(decoder, tokens, reference, written)
    some = tokens[: len(tokens) // 2]
    if is_quick or len(some) < 2:  # a context of three tokens
        return check
    rows = decoder.logits(some, min(NUM_STEPS, len(some) - 1)).copy()
    del decoder  # one at a time is in memory
    narrow = open_decoder(folder, manifest, deterministic=False)
    return replace(check, one_row_difference=one_row_difference(narrow, some, rows))


@contextmanager
def _exact_graph(folder: Path, manifest: Manifest) -> Iterator[Manifest]:
    """The manifest of a graph over the folder's weights whose MatMulNBits do not round their activations."""
    model = ir.load(folder / manifest.graph)
    products = [node for node in model.graph if node.op_type == "MatMulNBits"]
    if not any(node.attributes["accuracy_level"].as_int() for node in products):
        yield manifest
        return
    for node in products:
        node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)
    ir.save(model, folder / _EXACT)
    try:
        yield replace(manifest, graph=_EXACT, tree_graph=None)
    finally:
        (folder / _EXACT).unlink()
