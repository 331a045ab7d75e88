"""Folders that ONNX Runtime GenAI's model builder makes: genai_config.json read as a manifest.

Nothing is copied or written. Such a folder records no hashes, so its files cannot be verified. Knows nothing of
the graph itself: runtimes/foreign looks at that before it is opened.
"""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from edgespec.errors import ManifestError
from edgespec.json_file import read_json
from edgespec.manifest import KVCache, Manifest, Signature, Source, check_values
from edgespec.tokenizer import vocabulary_sha256

FILE_NAME = "genai_config.json"
FORMAT = "onnxruntime-genai"
_MAX_BYTES = 1 << 20  # a real one has 2 kB
# What the settings of a decoder may hold beside numbers; anything else changes how the model has to be run.
_PARTS = {"session_options", "run_options", "inputs", "outputs", "sliding_window"}
_INPUTS = {"input_ids", "attention_mask", "position_ids", "past_key_names", "past_value_names"}
_OUTPUTS = {"logits", "present_key_names", "present_value_names"}


def read_genai(folder: Path) -> Manifest:
    """The manifest that genai_config.json amounts to; files is empty.

    The cache is stated as float32; what the graph has is known once it is read.

    Raises:
        ManifestError: It is damaged, or describes a model that is not supported.
    """
    path = folder / FILE_NAME
    try:
        return _manifest(path, _read(path))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"{path} lacks or garbles a setting ({error}); build the folder again") from None


def chat_template(folder: Path) -> str | None:
    """The template of a file of its own or, from older builders, of tokenizer_config.json."""
    path = folder / "tokenizer_config.json"
    if (own := folder / "chat_template.jinja").is_file():
        return own.read_text(encoding="utf-8")
    template = _read(path).get("chat_template") if path.is_file() else None
    if template is not None and not isinstance(template, str):
        raise ManifestError(f"{path} has a chat template that is no text; give one in chat_template.jinja")
    return template


def _read(path: Path) -> dict[str, Any]:
    try:
        stated = read_json(path, _MAX_BYTES)
    except (ValueError, OSError) as error:
        raise ManifestError(f"{path} cannot be read as JSON ({error}); build the folder again") from None
    if not isinstance(stated, dict):
        raise ManifestError(f"{path} holds no JSON object; build the folder again")
    return stated


def _manifest(path: Path, stated: dict[str, Any]) -> Manifest:
    folder, model = path.parent, stated.get("model")
    decoder = model.get("decoder") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(decoder, dict):
        raise ManifestError(f"{path} has no model.decoder; models of a decoder alone are supported")
    _refuse_unsupported(path, model, decoder)
    shares_buffer = stated.get("search", {}).get("past_present_share_buffer", False)
    ends = model.get("eos_token_id")
    tokenizer = _tokenizer(folder / "tokenizer.json")
    bos = model.get("bos_token_id")
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
        add_bos=bos is not None and tokenizer.encode("a").ids[:1] == [bos],
        source=Source(name=folder.resolve().name, format=FORMAT, sha256=""),
        graph=_graph_name(path, decoder["filename"]),
        chat_template=None,
    )
    check_values(path, manifest)
    return manifest


def _refuse_unsupported(path: Path, model: dict[str, Any], decoder: dict[str, Any]) -> None:
    parts = sorted(name for name, value in model.items() if isinstance(value, (dict, list)))
    if parts := [name for name in parts if name not in ("decoder", "eos_token_id")]:
        raise ManifestError(
            f"{path}: the model has the parts {', '.join(parts)} beside its decoder; models of text alone, "
            "in one graph, are supported (no images or sound, no encoder)"
        )
    if "pipeline" in decoder:
        raise ManifestError(f"{path}: the model is a pipeline of graphs; models in one graph are supported")
    unknown = sorted(name for name, value in decoder.items() if isinstance(value, (dict, list)))
    if unknown := [name for name in unknown if name not in _PARTS]:
        raise ManifestError(f"{path}: settings {', '.join(unknown)} of the decoder are not supported")
    if "custom_ops_library" in decoder.get("session_options", {}):
        raise ManifestError(f"{path} asks for a library of custom operators; foreign code is not loaded")
    window = decoder.get("sliding_window") or {}
    if window and window.get("slide_key_value_cache", True):
        raise ManifestError(f"{path}: its cache slides along, and cannot be rewound; build it without that")


def _signature(path: Path, inputs: dict[str, Any], outputs: dict[str, Any]) -> Signature:
    if unknown := sorted((inputs.keys() - _INPUTS) | (outputs.keys() - _OUTPUTS)):
        raise ManifestError(f"{path}: the graph has {', '.join(unknown)}, which is not supported")
    patterns = {
        "past_key": inputs["past_key_names"],
        "past_value": inputs["past_value_names"],
        "present_key": outputs["present_key_names"],
        "present_value": outputs["present_value_names"],
    }
    for name, pattern in patterns.items():
        if pattern.count("%d") != 1:
            raise ManifestError(f"{path}: {name}_names is {pattern!r}, wanted one %d in it for the layer")
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
        raise ManifestError(f"{path} names '{name}', which is no .onnx file of its own folder")
    return name


def _tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ManifestError(f"{path} is not there; convert the tokenizer to the fast form first")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises its own bare Exception
        raise ManifestError(f"{path} is no tokenizer ({error}); build the folder again") from None
