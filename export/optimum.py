"""Models of architectures that the graph builder lacks, through optimum-onnx: traced from PyTorch, in fp32.

torch, transformers and optimum are imported where they are used. Code of a model repository is never run and
pickles are never read. What comes out is an ordinary model folder whose cache grows.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from tokenizers import Tokenizer

from edgespec.errors import EdgeSpecError, SourceError, UsageError
from edgespec.export.check import TEXT, compare, judge
from edgespec.export.convert import OpenDecoder, check_ids, finish
from edgespec.export.output import Report, expect_nothing, folder_in_the_making
from edgespec.export.safetensors import weight_files
from edgespec.export.sources import read_vocabulary
from edgespec.export.vocabulary import Vocabulary
from edgespec.manifest import KVCache, Manifest, Signature, Source, file_record
from edgespec.parts import as_text
from edgespec.tokenizer import vocabulary_sha256
from edgespec.types import Logits, TokenIds

INSTALL = 'pip install "edgespec[optimum]"'
_TASK = "text-generation-with-past"
_GRAPH, _WEIGHTS = "model.onnx", "model.onnx.data"
_SMALLEST_EXTERNAL_BYTES = 1024  # smaller constants stay in the graph, where shape inference reads them
# What configurations call the number of positions, learned or trained for.
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_ASSUMED_CONTEXT = 2048


@dataclass(frozen=True, kw_only=True)
class _Traced:
    """What the graph and its source say of themselves."""

    architecture: str
    context_length: int
    vocab_size: int
    kv_cache: KVCache
    signature: Signature


def import_model(
    source: Path,
    output: Path,
    *,
    precision: str = "source",
    repository: str | None = None,
    revision: str | None = None,
    license: str | None = None,
    open_decoder: OpenDecoder | None = None,
    report: Report = lambda line: None,
) -> Manifest:
    """Convert a local Hugging Face folder into a model folder at output; arguments as in export_model.

    Raises:
        UsageError: The precision is not fp32, or output is in the way.
        EdgeSpecError: optimum-onnx is not installed.
        SourceError: The source is broken, or of an architecture that optimum does not have either.
        ExportMismatch: The check failed.
    """
    if precision not in ("source", "fp32"):
        raise UsageError(f"--exporter optimum writes fp32, not {precision}; leave --precision out")
    expect_nothing(output)
    if not source.is_dir():
        raise SourceError(f"{source} is no folder; --exporter optimum reads folders with safetensors weights")
    report(f"reading {source}")
    files = weight_files(source)
    vocabulary = read_vocabulary(source)
    origin = Source(
        name=as_text(source.resolve().name),
        format="safetensors",
        sha256=",".join(file_record(path).sha256 for path in files),
        repository=repository,
        revision=revision,
        license=license,
    )
    # PyTorch's file and ours lie side by side for a while, each of four bytes a weight.
    needed_bytes = 4 * sum(path.stat().st_size for path in files)
    with folder_in_the_making(output, needed_bytes, report) as folder, _quiet():
        model = _load(source)
        tokenizer = Tokenizer.from_str(vocabulary.tokenizer_json)
        tokens = np.array(tokenizer.encode(TEXT, add_special_tokens=False).ids, np.int32)
        tokens = tokens[: _context_length(model.config, report)]
        reference = _logits(model, tokens) if open_decoder else None
        report("tracing it with optimum")
        traced = _trace(source, model, folder)
        check_ids(origin.name, vocabulary, traced.vocab_size, tokenizer)
        manifest = _finish(folder, output.name, traced, vocabulary, origin)
        report("hashing")
        manifest = replace(manifest, files={path.name: file_record(path) for path in sorted(folder.iterdir())})
        if open_decoder is not None and reference is not None:
            report("checking against PyTorch")
            check = compare(open_decoder(folder, manifest), tokens, reference)
            judge(check, manifest.precision)
            manifest = replace(manifest, check=check)
        return finish(folder, manifest)


@contextmanager
def _quiet() -> Iterator[None]:
    """The tracer's warnings and prints are for its developers."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


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
    except Exception as error:  # of transformers, safetensors or a model's own code
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


def _trace(source: Path, model: Any, folder: Path) -> _Traced:
    """Write graph and weights, and read off what they are."""
    from optimum.exporters.onnx import onnx_export_from_model

    raw = folder / "traced"
    try:
        onnx_export_from_model(model, raw, task=_TASK, do_validation=False)
    except Exception as error:  # of torch, onnx or optimum
        raise SourceError(f"optimum cannot export {source} ({model.config.model_type}): {error}") from None
    graph = ir.load(raw / _GRAPH)
    traced = _Traced(
        architecture=model.config.model_type,
        context_length=_context_length(model.config, lambda line: None),
        **_read_graph(source, graph.graph),
    )
    ir.save(graph, folder / _GRAPH, external_data=_WEIGHTS, size_threshold_bytes=_SMALLEST_EXTERNAL_BYTES)
    for file in raw.iterdir():
        file.unlink()
    raw.rmdir()
    return traced


def _read_graph(source: Path, graph: ir.Graph) -> dict[str, Any]:
    inputs = {value.name: value for value in graph.inputs}
    outputs = {value.name: value for value in graph.outputs}
    names = Signature(
        attention_mask="attention_mask" if "attention_mask" in inputs else None,
        position_ids="position_ids" if "position_ids" in inputs else None,
        num_logits_to_keep=None,
    )
    num_layers = sum(name.endswith(".key") for name in inputs if name)
    known = {names.input_ids, names.attention_mask, names.position_ids}
    known |= {past for past, _ in names.caches(num_layers)}
    if unknown := sorted(name for name in inputs if name and name not in known):
        raise SourceError(f"optimum's graph of {source} takes {', '.join(unknown[:3])}, which is not supported")
    past = inputs.get("past_key_values.0.key")
    if past is None or past.shape is None or len(past.shape) != 4 or "logits" not in outputs:
        raise SourceError(f"optimum's graph of {source} has no cache of keys and values that is known")
    logits = outputs["logits"].shape
    sizes = {
        "heads": past.shape[1],
        "head size": past.shape[3],
        "vocabulary": logits[2] if logits and len(logits) == 3 else None,
    }
    num_kv_heads, head_dim, vocab_size = (_known(source, what, size) for what, size in sizes.items())
    return {
        "signature": names,
        "vocab_size": vocab_size,
        "kv_cache": KVCache(form="growing", num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim),
    }


def _known(source: Path, what: str, size: object) -> int:
    if not isinstance(size, int):
        raise SourceError(f"optimum's graph of {source} leaves open its {what} ({size})")
    return size


def _finish(folder: Path, name: str, traced: _Traced, vocabulary: Vocabulary, origin: Source) -> Manifest:
    """Tokenizer and template beside the graph, and the manifest but for its hashes."""
    template = "chat_template.jinja" if vocabulary.chat_template else None
    try:
        (folder / "tokenizer.json").write_text(vocabulary.tokenizer_json)
        if template:
            (folder / template).write_text(vocabulary.chat_template or "")
    except OSError as error:
        raise EdgeSpecError(f"cannot finish {folder}: {error.strerror}; free some space and try again") from None
    return Manifest(
        name=name,
        architecture=traced.architecture,
        precision="fp32",
        context_length=traced.context_length,
        kv_cache=traced.kv_cache,
        signature=traced.signature,
        vocab_size=traced.vocab_size,
        vocab_sha256=vocabulary_sha256(Tokenizer.from_str(vocabulary.tokenizer_json)),
        bos_token_id=vocabulary.bos_token_id,
        eos_token_ids=vocabulary.eos_token_ids,
        add_bos=vocabulary.add_bos,
        source=origin,
        graph=_GRAPH,
        weights=_WEIGHTS,
        chat_template=template,
    )
