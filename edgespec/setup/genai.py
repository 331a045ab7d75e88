"""Folders of ONNX Runtime GenAI's model builder: their genai_config.json read as a manifest.

Such a folder records no hashes, so its files cannot be verified. runtimes/foreign checks the graph.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgespec.errors import ManifestError, SourceError
from edgespec.export.settings import read_text, sampling_from_json
from edgespec.manifest import Manifest, Signature, Source, SuggestedSampling, parse_manifest
from edgespec.manifest.caches import KVCache
from edgespec.system.typed_json import read_json
from edgespec.text.stored_template import join_templates
from edgespec.text.tokenizer import open_tokenizer, translate_errors, vocabulary_sha256

_ADVICE = "build the folder again"
FILE_NAME = "genai_config.json"
FORMAT = "onnxruntime-genai"
# Parts that the settings of a decoder may have; any other changes how the model has to be run.
_PARTS = {"session_options", "run_options", "inputs", "outputs", "sliding_window"}
_INPUTS = {"input_ids", "attention_mask", "position_ids", "past_key_names", "past_value_names"}
_OUTPUTS = {"logits", "present_key_names", "present_value_names"}


def read_genai(folder: Path) -> Manifest:
    """A manifest without files; the cache is stated as float32, since its type is known only from the graph.

    Raises ManifestError: the file is damaged, or describes a model that is not supported.
    """
    path = folder / FILE_NAME
    try:
        return _manifest(path, _read(path))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"{path} has a missing or damaged setting ({error}); build the folder again") from None


def chat_template(folder: Path) -> str | None:
    """The template in chat_template.jinja or, from older builders, in tokenizer_config.json."""
    path = folder / "tokenizer_config.json"
    if (own := folder / "chat_template.jinja").is_file():
        try:
            return read_text(own)
        except SourceError as error:
            raise ManifestError(f"{own} cannot be read as a template ({error}); {_ADVICE}") from None
    template = join_templates(_read(path).get("chat_template")) if path.is_file() else None
    if template is not None and not isinstance(template, str):
        raise ManifestError(f"{path} has a chat template that is not text; put one into chat_template.jinja")
    return template


def _read(path: Path) -> dict[str, Any]:
    try:
        stated = read_json(path)
    except (ValueError, OSError) as error:
        raise ManifestError(f"{path} cannot be read as JSON ({error}); build the folder again") from None
    if not isinstance(stated, dict):
        raise ManifestError(f"{path} holds {type(stated).__name__}, wanted a JSON object; build the folder again")
    return stated


def _manifest(path: Path, stated: dict[str, Any]) -> Manifest:
    folder, model = path.parent, stated.get("model")
    decoder = model.get("decoder") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(decoder, dict):
        raise ManifestError(f"{path} has no model.decoder; only decoder-only models are supported")
    _refuse_unsupported(path, model, decoder)
    search = stated.get("search", {})
    shares_buffer = search.get("past_present_share_buffer", False)
    tokenizer_file = folder / "tokenizer.json"
    if not tokenizer_file.exists():
        raise ManifestError(f"{tokenizer_file} does not exist; copy it from the model that the folder was made of")
    tokenizer = open_tokenizer(tokenizer_file, ManifestError, _ADVICE)
    bos, ends = model.get("bos_token_id"), model.get("eos_token_id")
    with translate_errors(tokenizer_file, ManifestError, _ADVICE):
        add_bos = bos is not None and tokenizer.encode("a").ids[:1] == [bos]
    manifest = Manifest(
        name=folder.resolve().name,
        architecture=str(model["type"]),
        precision="as built",
        context_length=model["context_length"],
        kv_cache=KVCache(
            form="shared_buffer" if shares_buffer else "growing",
            num_layers=decoder["num_hidden_layers"],
            num_kv_heads=decoder["num_key_value_heads"],
            head_dim=decoder["head_size"],
        ),
        signature=_signature(path, decoder["inputs"], decoder["outputs"]),
        vocab_size=model["vocab_size"],
        vocab_sha256=vocabulary_sha256(tokenizer),
        bos_token_id=bos,
        eos_token_ids=tuple(ends if isinstance(ends, list) else [] if ends is None else [ends]),
        add_bos=add_bos,
        source=Source(name=folder.resolve().name, format=FORMAT, sha256=""),
        graph=_graph_name(path, decoder["filename"]),
        chat_template=None,
        sampling=_sampling(path, search),
    )
    return parse_manifest(path, asdict(manifest))


def _sampling(path: Path, search: dict[str, Any]) -> SuggestedSampling | None:
    try:
        return sampling_from_json(path, search)
    except SourceError as error:
        raise ManifestError(str(error)) from None


def _refuse_unsupported(path: Path, model: dict[str, Any], decoder: dict[str, Any]) -> None:
    parts = sorted(name for name, value in model.items() if isinstance(value, (dict, list)))
    if parts := [name for name in parts if name not in ("decoder", "eos_token_id")]:
        raise ManifestError(
            f"{path}: the model has the parts {', '.join(parts)} beside its decoder; only text models in one "
            "graph are supported (no images or sound, no encoder)"
        )
    if "pipeline" in decoder:
        raise ManifestError(f"{path}: the model is a pipeline of graphs; only models in one graph are supported")
    unknown = sorted(name for name, value in decoder.items() if isinstance(value, (dict, list)))
    if unknown := [name for name in unknown if name not in _PARTS]:
        raise ManifestError(f"{path}: settings {', '.join(unknown)} of the decoder are not supported")
    if "custom_ops_library" in decoder.get("session_options", {}):
        raise ManifestError(
            f"{path} asks for a library of custom operators, which is never loaded; build the model without it"
        )
    window = decoder.get("sliding_window") or {}
    if window and window.get("slide_key_value_cache", True):
        raise ManifestError(
            f"{path}: its cache slides and cannot be rewound; build it with slide_key_value_cache false"
        )


def _signature(path: Path, inputs: dict[str, Any], outputs: dict[str, Any]) -> Signature:
    if unknown := sorted((inputs.keys() - _INPUTS) | (outputs.keys() - _OUTPUTS)):
        raise ManifestError(f"{path}: the graph has {', '.join(unknown)}, which is not supported")
    patterns = {name: inputs[f"{name}_names"] for name in ("past_key", "past_value")}
    patterns |= {name: outputs[f"{name}_names"] for name in ("present_key", "present_value")}
    for name, pattern in patterns.items():
        if pattern.count("%d") != 1:
            raise ManifestError(f"{path}: {name}_names is {pattern!r}, wanted one %d for the number of the layer")
    return Signature(
        input_ids=inputs["input_ids"],
        attention_mask=inputs.get("attention_mask"),
        position_ids=inputs.get("position_ids"),
        num_logits_to_keep=None,
        logits=outputs["logits"],
        **patterns,
    )


def _graph_name(path: Path, name: str) -> str:
    if Path(name).name != name or not name.endswith(".onnx"):
        raise ManifestError(f"{path} names the graph '{name}', wanted an .onnx file of its own folder")
    return name
