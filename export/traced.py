"""Models of architectures that the graph builder lacks, through optimum-onnx: traced from PyTorch, in fp32.

torch, transformers and optimum are imported where they are used. Code of a model repository is never run and
pickles are never read. The result is an ordinary model folder with a growing cache.
"""

import io
import shutil
import warnings
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from tokenizers import Tokenizer

from edgespec.errors import EdgeSpecError, SourceError, UsageError
from edgespec.export.check import TEXT, compare, judge
from edgespec.export.folder_check import OpenDecoder
from edgespec.export.layout import require_ids
from edgespec.export.output import atomic_folder, finish, hash_files, require_absent, write_text
from edgespec.export.safetensors import weight_files
from edgespec.export.sources import join_hashes, read_sampling, read_vocabulary
from edgespec.manifest import Manifest, Origin, Signature, Source
from edgespec.manifest.caches import KVCache
from edgespec.system.split_files import utf8_name
from edgespec.text.tokenizer import vocabulary_sha256
from edgespec.types import Logits, Report, TokenIds

INSTALL = 'pip install "edgespec[optimum]"'
_TASK = "text-generation-with-past"
_GRAPH, _WEIGHTS = "model.onnx", "model.onnx.data"
_SMALLEST_EXTERNAL_BYTES = 1024  # smaller constants stay in the graph, where shape inference reads them
# Keys of configurations for the number of positions.
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_ASSUMED_CONTEXT = 2048


def import_model(
    source: Path,
    output: Path,
    *,
    precision: str = "source",
    origin: Origin = Origin(),  # noqa: B008  frozen
    open_decoder: OpenDecoder | None = None,
    report: Report = lambda line: None,
) -> Manifest:
    """Convert a local Hugging Face folder into a model folder at output; arguments as in export_model.

    Raises:
        UsageError: The precision is not fp32, or output exists already.
        EdgeSpecError: optimum-onnx is not installed.
        SourceError: The source is damaged, or its architecture is unknown to optimum too.
        ExportMismatch: The check failed.
    """
    if precision not in ("source", "fp32"):
        raise UsageError(f"--exporter optimum writes fp32, not {precision}; leave --precision out")
    require_absent(output)
    if not source.is_dir():
        raise SourceError(f"{source} is not a folder; --exporter optimum reads folders with safetensors weights")
    report(f"reading {source}")
    files = weight_files(source)
    vocabulary = read_vocabulary(source)
    for note in vocabulary.notes:
        report(note)
    stated = Source(name=utf8_name(source.resolve().name), format="safetensors", sha256=join_hashes(files))
    stated = stated.fetched_from(origin)
    # PyTorch's file and the export exist side by side for a while, each with four bytes a weight.
    needed_bytes = 4 * sum(path.stat().st_size for path in files)
    with (
        atomic_folder(output, needed_bytes, report) as folder,
        warnings.catch_warnings(action="ignore"),  # of the tracer, as its prints, for its developers
        redirect_stdout(io.StringIO()),
    ):
        model = _load(source)
        tokenizer = Tokenizer.from_str(vocabulary.tokenizer_json)
        context_length = _context_length(model.config, report)
        tokens = np.array(tokenizer.encode(TEXT, add_special_tokens=False).ids, np.int32)[:context_length]
        reference = _logits(model, tokens) if open_decoder else None
        report("tracing it with optimum")
        traced = _read_graph(source, _trace(source, model, folder))
        require_ids(stated.name, vocabulary, traced["vocab_size"], tokenizer)
        manifest = Manifest(
            name=output.name,
            architecture=model.config.model_type,
            precision="fp32",
            context_length=context_length,
            **traced,
            vocab_sha256=vocabulary_sha256(tokenizer),
            bos_token_id=vocabulary.bos_token_id,
            eos_token_ids=vocabulary.eos_token_ids,
            add_bos=vocabulary.add_bos,
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


def _load(source: Path) -> Any:
    """The PyTorch model, in fp32."""
    try:
        import optimum.exporters.onnx  # noqa: F401 - before the weights are read
        import torch
        import transformers
    except ImportError as error:
        raise EdgeSpecError(
            f"--exporter optimum needs optimum-onnx, torch and transformers below 4.58 ({error}); "
            f"make an environment of its own and run there: {INSTALL}"
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            torch_dtype=torch.float32,
            attn_implementation="eager",
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


def _trace(source: Path, model: Any, folder: Path) -> ir.Graph:
    """Write graph and weights into folder."""
    from optimum.exporters.onnx import onnx_export_from_model

    raw = folder / "traced"
    try:
        onnx_export_from_model(model, raw, task=_TASK, do_validation=False)
    except Exception as error:  # from torch, onnx or optimum
        raise SourceError(f"optimum cannot export {source} ({model.config.model_type}): {error}") from None
    graph = ir.load(raw / _GRAPH)
    ir.save(graph, folder / _GRAPH, external_data=_WEIGHTS, size_threshold_bytes=_SMALLEST_EXTERNAL_BYTES)
    shutil.rmtree(raw)
    return graph.graph


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
        raise SourceError(f"optimum's graph of {source} takes {', '.join(unknown[:3])}, which is not supported")
    past = inputs.get("past_key_values.0.key")
    if past is None or past.shape is None or len(past.shape) != 4 or "logits" not in outputs:
        raise SourceError(f"optimum's graph of {source} has no key-value cache in a known form")
    logits = outputs["logits"].shape
    sizes: dict[str, Any] = {
        "heads": past.shape[1],
        "head size": past.shape[3],
        "vocabulary": logits[2] if logits and len(logits) == 3 else None,
    }
    for what, size in sizes.items():
        if not isinstance(size, int):
            raise SourceError(f"optimum's graph of {source} does not fix its {what} ({size}), wanted a number")
    num_kv_heads, head_dim, vocab_size = sizes.values()
    return {
        "signature": names,
        "vocab_size": vocab_size,
        "kv_cache": KVCache(form="growing", num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim),
    }
