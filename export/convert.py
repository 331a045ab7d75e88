"""From a source to a model folder, whole or not at all.

`export_model` is the one entry; a source is a GGUF file or a local Hugging Face folder.
"""

import glob
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any

import onnx_ir as ir
from tokenizers import Tokenizer

from edgespec.errors import EdgeSpecError, SourceError, UsageError
from edgespec.export.families import (
    DecoderConfig,
    config_from_gguf,
    config_from_huggingface,
    tensors_by_role,
)
from edgespec.export.gguf import read_gguf
from edgespec.export.graph import build_graph
from edgespec.export.linear import PRECISIONS
from edgespec.export.safetensors import read_safetensors
from edgespec.export.tensors import StoredTensor
from edgespec.export.vocabulary import Vocabulary, vocabulary_from_gguf
from edgespec.export.weights import WeightsFile
from edgespec.manifest import KVCache, Manifest, Source, file_record, write_manifest
from edgespec.tokenizer import vocabulary_sha256

_RESERVE_BYTES = 64 << 20
_STALE_S = 600.0
Report = Callable[[str], None]
# What reading a setting of an unexpected type comes to; sources are other people's files.
_UNUSUAL = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, OSError)


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """A source as read: nothing but headers and the tokenizer is in memory."""

    config: DecoderConfig
    tensors: dict[str, StoredTensor]
    vocabulary: Vocabulary
    source: Source


def export_model(
    source: Path,
    output: Path,
    *,
    precision: str = "source",
    repository: str | None = None,
    revision: str | None = None,
    report: Report = lambda line: None,
) -> Manifest:
    """Convert source into a model folder at output.

    The folder is written beside its place under a temporary name and moved there complete.

    Args:
        source: A .gguf file, or a folder with config.json, tokenizer.json and safetensors weights.
        output: Must not exist.
        precision: One of PRECISIONS.
        repository: Where the source was fetched from, for the manifest.
        revision: The commit or release of that repository.
        report: Takes one line a stage.

    Raises:
        UsageError: The precision is unknown, or output is in the way.
        SourceError: The source is missing, broken, foreign or unsupported.
        EdgeSpecError: The disk is full.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"unknown precision '{precision}'; choose one of {', '.join(PRECISIONS)}")
    if os.path.lexists(output):
        raise UsageError(f"{output} already exists; remove it or choose another --output")
    report(f"reading {source}")
    try:
        loaded = _load(source)
    except _UNUSUAL as error:
        raise SourceError(
            f"{source} cannot be understood ({type(error).__name__}: {error}); "
            "it is damaged or of a kind that is not known"
        ) from error
    loaded = replace(loaded, source=replace(loaded.source, repository=repository, revision=revision))
    with _folder_in_the_making(output, _estimated_bytes(loaded, precision)) as folder:
        report(f"writing {loaded.config.num_layers} layers in {precision} precision")
        manifest = _write(folder, output.name, loaded, precision)
        report("hashing")
        manifest = replace(manifest, files={path.name: file_record(path) for path in sorted(folder.iterdir())})
        write_manifest(folder, manifest)
    return manifest


def _load(source: Path) -> _Loaded:
    if not source.exists():
        raise SourceError(f"{source} does not exist; name a .gguf file or a folder with safetensors weights")
    loaded = _load_huggingface(source) if source.is_dir() else _load_gguf(source)
    vocabulary = loaded.vocabulary
    if not isinstance(vocabulary.chat_template, (str, NoneType)):
        raise SourceError(f"{source} has a chat template that is no text; it is damaged")
    ids = (*vocabulary.eos_token_ids, 0 if vocabulary.bos_token_id is None else vocabulary.bos_token_id)
    if not all(isinstance(token, int) for token in ids):
        raise SourceError(f"{source} has special token ids {ids}, wanted whole numbers; it is damaged")
    return loaded


def _load_gguf(path: Path) -> _Loaded:
    file = read_gguf(path)
    config = config_from_gguf(path, file.metadata, file.tensors)
    return _Loaded(
        config=config,
        tensors=tensors_by_role(path, config, file.tensors, is_gguf=True),
        vocabulary=vocabulary_from_gguf(path, file.metadata),
        source=Source(
            name=path.name,
            format="gguf",
            sha256=file_record(path).sha256,
            license=file.metadata.get("general.license"),
        ),
    )


def _load_huggingface(folder: Path) -> _Loaded:
    stated = _read_json(folder / "config.json")
    stored = read_safetensors(folder)
    config = config_from_huggingface(folder, stated, stored)
    if stated.get("tie_word_embeddings"):
        stored.pop("lm_head.weight", None)
    paths = sorted({tensor.path for tensor in stored.values()})
    return _Loaded(
        config=config,
        tensors=tensors_by_role(folder, config, stored, is_gguf=False),
        vocabulary=_huggingface_vocabulary(folder, stated),
        source=Source(
            name=folder.resolve().name,
            format="safetensors",
            sha256=",".join(file_record(path).sha256 for path in paths),
        ),
    )


def _read_json(path: Path, *, needed: bool = True) -> dict[str, Any]:
    if not path.exists() and not needed:
        return {}
    try:
        stated = json.loads(path.read_text())
    except FileNotFoundError:
        raise SourceError(f"{path.parent} has no {path.name}; it is not a complete model folder") from None
    except ValueError as error:
        raise SourceError(f"{path} is not JSON ({error}); fetch it again") from None
    if not isinstance(stated, dict):
        raise SourceError(f"{path} holds no JSON object; fetch it again")
    return stated


def _huggingface_vocabulary(folder: Path, config: dict[str, Any]) -> Vocabulary:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise SourceError(f"{folder} has no tokenizer.json; convert its tokenizer to the fast form first")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises its own bare Exception
        raise SourceError(f"{path} is no tokenizer ({error}); fetch it again") from None
    settings = _read_json(folder / "tokenizer_config.json", needed=False)
    generation = _read_json(folder / "generation_config.json", needed=False)
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = {ends} if isinstance(ends, int) else set(ends or [])
    if isinstance(piece := _piece(settings.get("eos_token")), str):
        ids |= {tokenizer.token_to_id(piece)} - {None}
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    if (path := folder / "chat_template.jinja").exists():
        template = path.read_text(encoding="utf-8")
    bos = _piece(settings.get("bos_token"))
    return Vocabulary(
        tokenizer_json=tokenizer.to_str(),
        chat_template=template,
        bos_token_id=tokenizer.token_to_id(bos) if bos else None,
        eos_token_ids=tuple(sorted(ids)),
        add_bos=_adds_bos(tokenizer, tokenizer.token_to_id(bos) if bos else None),
    )


def _adds_bos(tokenizer: Tokenizer, bos: int | None) -> bool:
    """Whether the tokenizer's own post-processor puts bos first; the runtime adds it itself."""
    return bos is not None and tokenizer.encode("a").ids[:1] == [bos]


def _piece(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _check_ids(loaded: _Loaded, tokenizer: Tokenizer) -> None:
    """Ids past the embedding would read whatever lies behind it."""
    vocabulary, size = loaded.vocabulary, loaded.config.vocab_size
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    ends = [("eos", token) for token in vocabulary.eos_token_ids]
    for what, token in [("largest", largest), ("bos", vocabulary.bos_token_id), *ends]:
        if token is not None and not 0 <= token < size:
            raise SourceError(
                f"{loaded.source.name}: the {what} token id of its tokenizer is {token}, "
                f"but its embedding has {size} rows; tokenizer and weights do not belong together"
            )


def _estimated_bytes(loaded: _Loaded, precision: str) -> int:
    weights = sum(tensor.rows * tensor.columns for tensor in loaded.tensors.values())
    stored = sum(tensor.num_bytes for tensor in loaded.tensors.values())
    per_weight = {"fp32": 4.0, "int8": 1.125, "int4": 0.625}
    return int(per_weight[precision] * weights if precision in per_weight else 1.3 * stored)


@contextmanager
def _folder_in_the_making(output: Path, needed_bytes: int) -> Iterator[Path]:
    """A temporary sibling of output that takes its place on success and vanishes on failure."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _sweep(output)
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
    except OSError as error:
        raise UsageError(f"cannot write to {output.parent}: {error.strerror}; choose another --output") from None
    try:
        free = shutil.disk_usage(folder).free
        if free < needed_bytes + _RESERVE_BYTES:
            raise EdgeSpecError(
                f"{output.parent} has {free >> 20} MiB free, the export needs about {needed_bytes >> 20} MiB; "
                "free some space or choose another --output"
            )
        yield folder
        folder.chmod(0o755)
        try:
            folder.rename(output)
        except OSError:
            raise UsageError(f"{output} appeared while exporting; remove it or choose another --output") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(output: Path) -> None:
    """Remove what killed exports of the same output left behind, unless it may still be growing."""
    for left in output.parent.glob(f".{glob.escape(output.name)}.*.partial"):
        newest = max((path.stat().st_mtime for path in [left, *left.iterdir()]), default=0.0)
        if time.time() - newest > _STALE_S:
            shutil.rmtree(left, ignore_errors=True)


def _write(folder: Path, name: str, loaded: _Loaded, precision: str) -> Manifest:
    config, vocabulary = loaded.config, loaded.vocabulary
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer_json)
    _check_ids(loaded, tokenizer)
    manifest = Manifest(
        name=name,
        architecture=config.architecture,
        precision=precision,
        context_length=config.context_length,
        kv_cache=KVCache(num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim),
        vocab_size=config.vocab_size,
        vocab_sha256=vocabulary_sha256(tokenizer),
        bos_token_id=vocabulary.bos_token_id,
        eos_token_ids=vocabulary.eos_token_ids,
        add_bos=vocabulary.add_bos,
        source=loaded.source,
        chat_template="chat_template.jinja" if vocabulary.chat_template else None,
    )
    with WeightsFile(folder / manifest.weights) as weights:
        model = build_graph(config, loaded.tensors, precision, weights)
    try:
        ir.save(model, folder / manifest.graph)
        (folder / manifest.tokenizer).write_text(vocabulary.tokenizer_json)
        if manifest.chat_template:
            (folder / manifest.chat_template).write_text(vocabulary.chat_template or "")
    except OSError as error:
        raise EdgeSpecError(f"cannot finish {folder}: {error.strerror}; free some space and try again") from None
    return manifest
