"""Vectors of texts beside those of sentence-transformers, over random weights of real shapes.

    pip install sentence-transformers    (in an environment of its own that has edgespec)
    python bench/embedding_reference.py --tokenizer FOLDER/tokenizer.json

Prints a row for each family and precision: the largest difference of a number, and the smallest cosine.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer

from edgespec import load
from edgespec.export.convert import export_model

_END = "<|endoftext|>"
_TEXTS = ["Paris is the capital of France.", "Instruct: Find the answer\nQuery: Which city?", "x", "word " * 700]
_SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
# Family -> how a vector is made, and settings of its own.
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3": ("lasttoken", {"head_dim": 128}),
    "Mistral": ("mean", {"sliding_window": None}),
    "Qwen2": ("lasttoken", {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help=f"a tokenizer.json that has {_END}")
    options = parser.parse_args()
    print("family   precision  largest difference  smallest cosine")
    with TemporaryDirectory() as place:
        for family in _FAMILIES:
            source = Path(place, family)
            wanted = write_model(family, options.tokenizer, source)
            for precision in ("fp32", "int8", "int4"):
                folder = Path(place, f"{family}-{precision}")
                export_model(source, folder, precision=precision)
                with load(folder, home=place) as engine:
                    found = engine.embed(_TEXTS)
                difference, cosine = np.abs(found - wanted).max(), (found * wanted).sum(axis=1).min()
                print(f"{family:8} {precision:9} {difference:19.7f} {cosine:16.5f}", flush=True)


def write_model(family: str, tokenizer: Path, folder: Path) -> np.ndarray:
    """Save a model with random weights as the library does; gives its vectors of the texts, [num_texts, size]."""
    kind, own = _FAMILIES[family]
    base = folder.with_name(f"{folder.name}-base")
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_file=_with_end(tokenizer, folder), eos_token=_END, pad_token=_END
    )
    config = getattr(transformers, f"{family}Config")(vocab_size=len(words), **_SIZES, **own)
    model = getattr(transformers, f"{family}Model")(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim == 1:
                weights.uniform_(0.5, 1.5)
            else:
                weights.normal_(0, 0.5 if "embed" in name else weights.shape[1] ** -0.5)
    model.save_pretrained(base)
    words.save_pretrained(base)
    read = Transformer(str(base))
    whole = SentenceTransformer(
        modules=[read, Pooling(_SIZES["hidden_size"], pooling_mode=kind), Normalize()], device="cpu"
    )
    whole.save(str(folder))
    vectors: np.ndarray = whole.encode(_TEXTS, batch_size=1)
    return vectors


def _with_end(tokenizer: Path, folder: Path) -> str:
    """A tokenizer that puts its end token behind a text, as those of embedding models do."""
    stated = json.loads(tokenizer.read_text(encoding="utf-8"))
    (end,) = (each["id"] for each in stated["added_tokens"] if each["content"] == _END)
    single = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": _END, "type_id": 0}}]
    special = {_END: {"id": _END, "ids": [end], "tokens": [_END]}}
    stated["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special,
    }  # fmt: skip
    path = folder.with_name(f"{folder.name}-tokenizer.json")
    path.write_text(json.dumps(stated), encoding="utf-8")
    return str(path)


if __name__ == "__main__":
    main()
