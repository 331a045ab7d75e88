"""The text decoder within a checkpoint: settings and tensors, with what files omit or name otherwise."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgespec.export.families import with_defaults
from edgespec.export.gguf import GGUF
from edgespec.export.tensors import StoredTensor, Tensors
from edgespec.system.tables import read_table

_PARTS = read_table(__file__, "text_parts.toml")
_OLLAMA = read_table(__file__, "ollama_names.toml")
_ADDS_BOS = "tokenizer.ggml.add_bos_token"
_LONG_GEMMA3 = 131072  # tokens, by linear scaling, which ollama's files leave out


def decoder_part(settings: Mapping[str, Any], stored: Tensors) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Settings and tensors of the text decoder.

    Fills in the settings that config.json omits, and leaves out the parts that see or hear and the layers for
    multi-token prediction, of which those of a mimo are read as a drafting head.
    """
    architecture = str(settings.get("model_type")).removesuffix("_text")
    inner = settings.get("text_config") if architecture in _PARTS["seeing"] else None
    if architecture == "gemma4_unified":  # without towers, which changes nothing for text
        architecture = "gemma4"
        inner = {**(settings if inner is None else inner), "model_type": architecture}
    if family := _PARTS["text_of"].get(architecture):
        inner = {**(settings.get("text_config") or settings), "model_type": family}
    # Fine-tunes of the text alone may keep this part of a name, and some of transformers 5 wrote it three times.
    stored = {
        name.replace("language_model.", ""): tensor
        for name, tensor in stored.items()
        if not (inner and name.removeprefix("model.").startswith(_PARTS["senses"]))
    }
    given = {**settings, **(inner or {})}
    family = str(given.get("model_type")).removesuffix("_text")
    given = with_defaults(family, given)
    further = _PARTS["further"].get(architecture, "").format_map(given)
    stored = {
        name: tensor
        for name, tensor in stored.items()
        if not (further and name.removeprefix("model.").startswith(further))
    }
    return given | (_lfm2_settings(given) if family in ("lfm2", "lfm2_moe") else {}), stored


def in_usual_names(file: GGUF) -> GGUF:
    """A header under the names of llama.cpp, where ollama's own converter wrote it; any other as it is.

    Parts that see, hear or draft are left out.
    """
    stored = str(file.metadata.get("general.architecture"))
    own, metadata = _OLLAMA.get(stored, {}), dict(file.metadata)
    prefix = f"{stored}."
    if family := own.get("family"):
        metadata = {name.replace(prefix, f"{family}."): value for name, value in metadata.items()}
        metadata["general.architecture"], prefix = family, f"{family}."
    for theirs, ours in ((prefix + theirs, prefix + ours) for theirs, ours in _OLLAMA["keys"].items()):
        # One that contradicts another stays, and is refused.
        if theirs in metadata and metadata.get(ours, metadata[theirs]) == metadata[theirs]:
            metadata[ours] = metadata.pop(theirs)
    metadata = {prefix + key: value for key, value in own.get("assumed", {}).items()} | metadata
    for name, (theirs, ours) in own.get("replaced", {}).items():
        metadata[name] = ours if metadata.get(name, theirs) == theirs else metadata[name]
    tensors = {name: each for name, each in file.tensors.items() if not name.startswith(_PARTS["beside_text"])}
    for theirs, ours in own.get("tensors", {}).items():
        named = {name: name.removesuffix(theirs) + ours for name in tensors if name.endswith(theirs)}
        named = {name: usual for name, usual in named.items() if usual not in tensors}
        tensors = {named.get(name, name): each for name, each in tensors.items()}
    if metadata == file.metadata and tensors.keys() == file.tensors.keys():
        return file
    if not metadata.get(_ADDS_BOS):  # false also where tokenizer_config.json says nothing
        metadata.pop(_ADDS_BOS, None)
    metadata |= {prefix + key: tensors[name].rows for key, name in own.get("rows", {}).items() if name in tensors}
    if stored == "gemma3" and metadata.get("gemma3.context_length", 0) >= _LONG_GEMMA3:
        metadata = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0} | metadata
    return replace(file, metadata=metadata, tensors=tensors)


def _lfm2_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names of other families; a width may be stated as that of an MLP of two matrices."""
    inner = given.get("block_ff_dim", given.get("intermediate_size", 12288))
    if given["block_auto_adjust_ff_dim"]:
        inner = int(2 * inner / 3)
        if (factor := given["block_ffn_dim_multiplier"]) is not None:
            unit = given["block_multiple_of"]
            inner = -(-int(factor * inner) // unit) * unit
    numbers = range(given["num_hidden_layers"])
    attending = given.get("full_attn_idxs") or numbers
    types = given.get("layer_types") or ["full_attention" if i in attending else "conv" for i in numbers]
    return {"intermediate_size": inner, "rms_norm_eps": given.get("norm_eps", 1e-5), "layer_types": types}
