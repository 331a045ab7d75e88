"""A folder that onnxruntime-genai and dejavuu can load, with the weights of a model folder of edgespec.

    python bench/peer_folder.py MODEL_FOLDER OUTPUT

The graph gives the logits of all tokens of a pass, where edgespec asks for those that it needs. Weights and
tokenizer are linked, not copied, where the file system allows it.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from edgespec.errors import EdgeSpecError, UsageError
from edgespec.manifest import Manifest, read_manifest

# More than any pass has tokens.
_ALL_LOGITS = 1 << 30


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("peer_folder.py", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a model folder of edgespec")
    parser.add_argument("output", type=Path, help="a new folder")
    options = parser.parse_args(arguments)
    try:
        write_folder(options.model, options.output)
    except EdgeSpecError as error:
        print(f"peer_folder: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def write_folder(folder: Path, output: Path) -> None:
    """Raises UsageError: The output exists, or the model is for another device than the CPU."""
    manifest = read_manifest(folder)
    if output.exists():
        raise UsageError(f"{output} exists; name a new folder")
    if manifest.form != "cpu":
        raise UsageError(f"{manifest.name} was exported for {manifest.form}; wanted one for the CPU")
    graph = onnx.load(str(folder / manifest.graph), load_external_data=False)
    names = [each.name for each in graph.graph.input]
    del graph.graph.input[names.index("num_logits_to_keep")]
    graph.graph.initializer.append(
        onnx.numpy_helper.from_array(np.array([_ALL_LOGITS], np.int64), "num_logits_to_keep")
    )
    output.mkdir(parents=True)
    onnx.save(graph, str(output / "model.onnx"))
    for name in {manifest.weights, manifest.tokenizer}:
        _link(folder / name, output / name)
    _write_json(output / "genai_config.json", _genai_config(manifest))
    _write_json(output / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    # Where dejavuu looks for the graph.
    _write_json(output / "manifest.json", {"provenance": {"variants": {"q4": {"file": "model.onnx"}}}})


def _genai_config(manifest: Manifest) -> dict[str, Any]:
    cache = manifest.kv_cache
    eos = list(manifest.eos_token_ids)
    return {
        "model": {
            "type": "llama",
            "vocab_size": manifest.vocab_size,
            "context_length": manifest.context_length,
            "bos_token_id": manifest.bos_token_id if manifest.bos_token_id is not None else eos[0],
            "eos_token_id": eos,
            "pad_token_id": eos[0],
            "decoder": {
                "session_options": {"provider_options": []},
                "filename": "model.onnx",
                "head_size": cache.head_dim,
                # Of attention as a whole; the runtime reads the cache's shape from the three others.
                "hidden_size": cache.head_dim * cache.num_kv_heads,
                "num_attention_heads": cache.num_kv_heads,
                "num_key_value_heads": cache.num_kv_heads,
                "num_hidden_layers": cache.num_layers,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {"do_sample": False, "max_length": manifest.context_length, "past_present_share_buffer": True},
    }


def _link(source: Path, output: Path) -> None:
    try:
        os.link(source, output)
    except OSError:
        shutil.copyfile(source, output)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
