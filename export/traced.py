"""Models of architectures that the graph builder lacks, traced from PyTorch in fp32.

By transformers or optimum-onnx: each takes an environment of its own, with another transformers, and is imported
where it is used. Code of a model repository is never run and pickles are never read. The result is an ordinary
model folder with a growing cache.
"""

import inspect
import io
import logging
import shutil
import warnings
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from tokenizers import Tokenizer

from edgespec.errors import EdgeSpecError, SourceError, UsageError
from edgespec.export.check import TEXT, compare, judge
from edgespec.export.folder_check import OpenDecoder
from edgespec.export.output import atomic_folder, finish, hash_files, require_absent, write_text
from edgespec.export.safetensors import weight_files
from edgespec.export.sources import join_hashes, read_sampling, read_vocabulary
from edgespec.export.vocabulary import require_ids
from edgespec.manifest import Manifest, Origin, Signature, Source
from edgespec.manifest.caches import KVCache
from edgespec.system.split_files import source_name
from edgespec.text.tokenizer import vocabulary_sha256
from edgespec.types import Logits, Report, TokenIds

Exporter = Literal["transformers", "optimum"]
INSTALL = 'pip install "edgespec[{}]"'
_NEEDED = {
    "transformers": "transformers of 5.24 or newer, torch, onnx and onnxscript",
    "optimum": "optimum-onnx, torch and transformers below 4.58",
}
_TASK = "text-generation-with-past"
_GRAPH, _WEIGHTS = "model.onnx", "model.onnx.data"
_SMALLEST_EXTERNAL_BYTES = 1024  # smaller constants stay in the graph, where shape inference reads them
# Keys of configurations for the number of positions.
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_ASSUMED_CONTEXT = 2048
# Tokens before the traced ones, and those: numbers that no other size of a graph has for one that grows.
_TRACED_PAST, _TRACED_TOKENS = 5, 4


def import_model(
    source: Path,
    output: Path,
    exporter: Exporter,
    *,
    precision: str = "source",
    origin: Origin = Origin(),  # noqa: B008  frozen
    open_decoder: OpenDecoder | None = None,
    report: Report = lambda line: None,
) -> Manifest:
    """Convert a local Hugging Face folder into a model folder at output; arguments as in export_model.

    Raises:
        UsageError: The precision is not fp32, or output exists already.
        EdgeSpecError: The exporter is not installed.
        SourceError: The source is damaged, or its architecture is one that the exporter does not take either.
        ExportMismatch: The check failed.
    """
    require_absent(output)
    _require_possible(source, exporter, precision)
    report(f"reading {source}")
    files = weight_files(source)
    vocabulary = read_vocabulary(source)
    for note in vocabulary.notes:
        report(note)
    stated = Source(name=source_name(source), format="safetensors", sha256=join_hashes(files))
    stated = stated.fetched_from(origin)
    # PyTorch's file and the export exist side by side for a while, each with four bytes a weight.
    needed_bytes = 4 * sum(path.stat().st_size for path in files)
    with (
        atomic_folder(output, needed_bytes, report) as folder,
        warnings.catch_warnings(action="ignore"),  # of the tracer, as its prints, for its developers
        redirect_stdout(io.StringIO()),
    ):
        model = _load(source, exporter)
        tokenizer = Tokenizer.from_str(vocabulary.tokenizer_json)
        context_length = _context_length(model.config, report)
        tokens = np.array(tokenizer.encode(TEXT, add_special_tokens=False).ids, np.int32)[:context_length]
        reference = _logits(model, tokens) if open_decoder else None
        report(f"tracing it with {exporter}")
        trace = _trace_with_optimum if exporter == "optimum" else _trace_with_transformers
        traced = _read_graph(source, trace(source, model, folder))
        require_ids(stated.name, vocabulary, traced["vocab_size"], tokenizer)
        manifest = Manifest(
            name=output.name,
            architecture=model.config.model_type,
            precision="fp32",
            context_length=context_length,
            **traced,
            vocab_sha256=vocabulary_sha256(tokenizer),
            **vocabulary.special_tokens,
            source=stated,
            graph=_GRAPH,
            weights=_WEIGHTS,
            chat_template="chat_template.jinja" if vocabulary.chat_template else None,
            sampling=read_sampling(source),
        )
        write_text(folder, vocabulary, manifest)
        manifest = hash_files(folder, manifest, report)
        if open_decoder is not None and reference is not None:
            report("checking against PyTorch")
            check = compare(open_decoder(folder, manifest), tokens, reference)
            judge(check, manifest.precision)
            manifest = replace(manifest, check=check)
        return finish(folder, manifest)


def _require_possible(source: Path, exporter: Exporter, precision: str) -> None:
    """Raises UsageError or SourceError: The exporter does not write the precision, or does not read the source."""
    if precision not in ("source", "fp32"):
        raise UsageError(f"--exporter {exporter} writes fp32, not {precision}; leave --precision out")
    if not source.is_dir():
        raise SourceError(
            f"{source} is not a folder; --exporter {exporter} reads folders with safetensors weights"
        )


def _load(source: Path, exporter: Exporter) -> Any:
    """The PyTorch model, in fp32."""
    try:
        if exporter == "optimum":
            import optimum.exporters.onnx  # noqa: F401 - before the weights are read
        else:
            import transformers.exporters.exporter_onnx
        import torch
        import transformers
    except ImportError as error:
        raise EdgeSpecError(
            f"--exporter {exporter} needs {_NEEDED[exporter]} ({error}); "
            f"make an environment of its own and run there: {INSTALL.format(exporter)}"
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("torch").setLevel(logging.ERROR)
    older = {"torch_dtype": torch.float32, "attn_implementation": "eager"}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            **(older if exporter == "optimum" else {"dtype": torch.float32}),
        )
    except Exception as error:  # from transformers, safetensors or the code of a model
        raise SourceError(f"transformers cannot load {source}: {error}") from None
    return model.eval()


def _logits(model: Any, tokens: TokenIds) -> Logits:
    import torch

    with torch.no_grad():
        rows: Logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].float().numpy()
    return rows


def _context_length(config: Any, report: Report) -> int:
    for key in _CONTEXT_KEYS:
        stated = getattr(config, key, None)
        if isinstance(stated, int) and stated > 0:
            return stated
    report(f"config.json states no context length; {_ASSUMED_CONTEXT} is assumed")
    return _ASSUMED_CONTEXT


def _trace_with_optimum(source: Path, model: Any, folder: Path) -> ir.Graph:
    """Write graph and weights into folder."""
    from optimum.exporters.onnx import onnx_export_from_model

    raw = folder / "traced"
    try:
        onnx_export_from_model(model, raw, task=_TASK, do_validation=False)
    except Exception as error:  # from torch, onnx or optimum
        raise SourceError(f"optimum cannot export {source} ({model.config.model_type}): {error}") from None
    graph = ir.load(raw / _GRAPH)
    _save(graph, folder)
    shutil.rmtree(raw)
    return graph.graph


def _trace_with_transformers(source: Path, model: Any, folder: Path) -> ir.Graph:
    """Write graph and weights into folder: traced with tokens that others precede, in sizes that may change."""
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    try:
        inputs = _traced_inputs(model)
        exported = OnnxExporter().export(model, inputs, config=OnnxConfig(dynamic=True))
    except Exception as error:  # from torch, onnx or transformers
        raise SourceError(f"transformers cannot export {source} ({model.config.model_type}): {error}") from None
    graph: ir.Graph = exported.program.graph
    for value in (*graph.inputs, *graph.outputs):
        name = (value.name or "").replace(".layers.", ".").removesuffix("s")
        if name.endswith((".key", ".value")):
            value.name = name.replace("cache.", "present.")
    _save(exported.program, folder)
    return graph


def _traced_inputs(model: Any) -> dict[str, Any]:
    """Raises ValueError: The model keeps something else than all keys and values."""
    import torch

    length = _TRACED_PAST + _TRACED_TOKENS
    tokens = torch.arange(length)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        past = model(tokens[:, :_TRACED_PAST], use_cache=True).get("past_key_values")
    kinds = {type(layer).__name__ for layer in getattr(past, "layers", ())}
    if kinds != {"DynamicLayer"}:
        kept = ", ".join(sorted(kinds)) or type(past).__name__
        raise ValueError(f"its layers keep {kept}; wanted keys and values of all tokens in each layer")
    stated = {
        "attention_mask": torch.ones(1, length, dtype=torch.int64),
        "position_ids": torch.arange(_TRACED_PAST, length)[None],
    }
    taken = inspect.signature(model.forward).parameters
    inputs = {name: value for name, value in stated.items() if name in taken}
    return {"input_ids": tokens[:, _TRACED_PAST:], **inputs, "past_key_values": past}


def _save(graph: ir.Model, folder: Path) -> None:
    ir.save(graph, folder / _GRAPH, external_data=_WEIGHTS, size_threshold_bytes=_SMALLEST_EXTERNAL_BYTES)


def _size(size: object) -> int | None:
    """A size that a graph fixes, as a number or as the name of one."""
    name = str(getattr(size, "value", size))
    return int(name) if name.isdigit() else None


def _read_graph(source: Path, graph: ir.Graph) -> dict[str, Any]:
    """Signature, vocabulary size and cache of a traced graph, as fields of the manifest."""
    inputs = {value.name: value for value in graph.inputs}
    outputs = {value.name: value for value in graph.outputs}
    names = Signature(
        attention_mask="attention_mask" if "attention_mask" in inputs else None,
        position_ids="position_ids" if "position_ids" in inputs else None,
        num_logits_to_keep=None,
    )
    num_layers = sum(name.endswith(".key") for name in inputs if name)
    known = {names.input_ids, names.attention_mask, names.position_ids}
    known |= {past for past, _ in names.caches(range(num_layers))}
    if unknown := sorted(name for name in inputs if name and name not in known):
        raise SourceError(f"the graph of {source} takes {', '.join(unknown[:3])}, which is not supported")
    past = inputs.get("past_key_values.0.key")
    if past is None or past.shape is None or len(past.shape) != 4 or "logits" not in outputs:
        raise SourceError(f"the graph of {source} has no key-value cache in a known form")
    logits = outputs["logits"].shape
    sizes: dict[str, Any] = {
        "heads": _size(past.shape[1]),
        "head size": _size(past.shape[3]),
        "vocabulary": _size(logits[2]) if logits and len(logits) == 3 else None,
    }
    for what, size in sizes.items():
        if size is None:
            raise SourceError(f"the graph of {source} does not fix its {what}, wanted a number")
    values = inputs["past_key_values.0.value"].shape
    if values is None or _size(values[3]) != sizes["head size"]:
        raise SourceError(f"the values in {source} have another size than its keys, which is not supported")
    num_kv_heads, head_dim, vocab_size = sizes.values()
    return {
        "signature": names,
        "vocab_size": vocab_size,
        "kv_cache": KVCache(form="growing", num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim),
    }
