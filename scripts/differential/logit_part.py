"""First logits of small random models of each family: edgespec in fp32 beside transformers and llama.cpp."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from families import CONTEXT_LENGTHS, FAMILIES, SOURCES, TOKENS, write_source

from differential.difference import Difference, Row
from differential.llama_cpp import LlamaCpp, NoPeer
from edgespec.decoding.logprobs import log_softmax
from edgespec.errors import EdgeSpecError
from edgespec.export.convert import export_model
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder

_MOST = 1e-3

# Why logits of a GGUF file may differ from those of llama.cpp, and by how much.
_REASONS = {
    **dict.fromkeys(
        ("gemma2", "gemma3", "gemma4", "gemma4-shared"), (1e-2, "llama.cpp takes GELU from a table of half floats")
    ),
    "phi3": (np.inf, "llama.cpp leaves the window of phi3 out"),
    "gpt_oss": (np.inf, "llama.cpp rounds the borders of YaRN, which gpt_oss does not"),
    "exaone4": (np.inf, "llama.cpp takes exaone4 to have a window if it has 64 layers"),
    "phi3-longrope": (np.inf, "llama.cpp has contexts of 256 tokens at least, and then the factors of long texts"),
}
Rows = npt.NDArray[np.floating[Any]]


def _lengths(family: str) -> tuple[int, ...]:
    """How many tokens the compared prompts have; each fits the context of the family's model.

    A model with longrope is exported for one length; the others change their positions behind a length.
    """
    if family in CONTEXT_LENGTHS:
        return (len(TOKENS),)
    context: int = FAMILIES[family]["config"]["max_position_embeddings"]
    return tuple(length for length in (1, 2, 9, len(TOKENS)) if length < context)


def logit_rows(folder: Path) -> Iterator[Row]:
    for family, form in SOURCES:
        peer = "transformers" if form == "huggingface" else "llama.cpp"
        where = f"logits, {'safetensors' if form == 'huggingface' else 'GGUF'}, {family}, beside {peer}"
        place = folder / f"{family}-{form}"
        place.mkdir()
        try:
            source = write_source(place, family, form)
            found = _ours(source, place / "out", family)
            wanted = (_transformers if form == "huggingface" else _llama_cpp)(source, family)
        except (NoPeer, EdgeSpecError) as error:
            yield Row(where, 0, skipped=str(error))
            continue
        yield _compare(where, family, found, wanted, _REASONS.get(family) if form == "gguf" else None)


def _compare(
    where: str, family: str, found: list[Rows], wanted: list[Rows], known: tuple[float, str] | None
) -> Row:
    """known: The largest difference that a reason explains, and the reason."""
    for length, ours, theirs in zip(_lengths(family), found, wanted, strict=True):
        apart = np.abs(ours - theirs)
        at = int(np.nanargmax(apart))
        if apart[at] < _MOST:
            continue
        if known and apart[at] < known[0]:
            return Row(where, len(found), explained={known[1]: 1})
        said = [f"token {at}: {rows[at]:.4f}" for rows in (ours, theirs)]
        return Row(where, len(found), (Difference(where, str(TOKENS[:length].tolist()), *said),))
    return Row(where, len(found))


def _ours(source: Path, output: Path, family: str) -> list[Rows]:
    length = CONTEXT_LENGTHS.get(family)
    manifest = export_model(source, output, precision="fp32", context_length=length)
    decoder = OnnxDecoder(output, manifest, find_device("cpu"))
    return [log_softmax(decoder.logits(TOKENS[:length], 1)[-1]) for length in _lengths(family)]


def _transformers(source: Path, family: str) -> list[Rows]:
    """Log-probabilities behind each prompt, by transformers. Raises NoPeer: It is not installed."""
    if find_spec("transformers") is None or find_spec("torch") is None:
        raise NoPeer("transformers or torch is not installed")
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        rows = [
            model(torch.tensor(TOKENS[None, :length]), use_cache=False).logits[0, -1]
            for length in _lengths(family)
        ]
    return [log_softmax(row.numpy()) for row in rows]


def _llama_cpp(source: Path, family: str) -> list[Rows]:
    peer = LlamaCpp(source)
    try:
        return [
            peer.log_probs(TOKENS[:length].tolist(), FAMILIES[family]["config"]["vocab_size"])
            for length in _lengths(family)
        ]
    finally:
        peer.close()
