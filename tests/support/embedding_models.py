"""A tiny model that was trained for embeddings, in the formats that users bring."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import tiny

END = 2  # the token that is put behind texts
POOLING = {
    "word_embedding_dimension": tiny.HIDDEN,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_lasttoken": True,
}
MODULES = ("Transformer", "Pooling", "Normalize")


def write_folder(
    folder: Path,
    weights: dict[str, np.ndarray],
    *,
    modules: tuple[str, ...] = MODULES,
    pooling: dict[str, Any] | None = POOLING,
    config: dict[str, Any] | None = None,
) -> None:
    """A sentence-transformers folder, whose tensors lack the prefix and the head of a model that writes text."""
    tiny.write_huggingface(folder, {name.removeprefix("model."): each for name, each in weights.items()})
    places = {"Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    listed = [
        {"idx": i, "name": str(i), "path": places.get(name, ""), "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    settings = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False} | (config or {})
    (folder / "config.json").write_text(json.dumps(settings))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    end = {"id": tiny.PIECES[END], "ids": [END], "tokens": [tiny.PIECES[END]]}
    single = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": end["id"], "type_id": 0}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {end["id"]: end},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def reference_vector(weights: dict[str, np.ndarray], tokens: list[int], kind: str = "last") -> np.ndarray:
    """The vector of a text's tokens, worked out in numpy, [HIDDEN]."""
    states = tiny.reference_states(weights, np.array(tokens))[-1]
    vector = states[-1] if kind == "last" else states.mean(axis=0)
    return vector / np.linalg.norm(vector)
