"""LoRA adapters (Hu et al., arXiv:2106.09685), merged into the weights of their base: W + scale · B · A.

Of DoRA (Liu et al., arXiv:2402.09353) each row has the length that the adapter states.

Read from a folder of PEFT (adapter_config.json and adapter_model.safetensors), or from a GGUF file of llama.cpp.
What an adapter has beside low-rank changes and whole matrices is refused by name. Rows are merged in float32 as
they are read.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgespec.errors import SourceError
from edgespec.export.blocks import Bytes, Floats
from edgespec.export.decoder_config import DecoderConfig
from edgespec.export.families import FAMILIES
from edgespec.export.gguf import read_gguf
from edgespec.export.roles import RoleRows, places, unpaired
from edgespec.export.safetensors import read_tensors, require_floats
from edgespec.export.settings import (
    ADAPTER_SETTINGS,
    SourceSettings,
    read_json,
    require_no_pointer,
    translate_unusual,
)
from edgespec.export.sources import LoadedSource, join_hashes
from edgespec.export.tensors import StoredTensor, Tensors
from edgespec.manifest import WITH_ADAPTER
from edgespec.system.command_line import quote
from edgespec.system.split_files import source_name

_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Settings of PEFT whose arithmetic is not W + scale · B · A, or that need another base. fan_in_fan_out is not
# one: PEFT takes it back for matrices that lie as those here do.
_UNSUPPORTED = (
    "lora_bias", "layer_replication", "use_qalora", "trainable_token_indices",
    "target_parameters", "alora_invocation_tokens", "megatron_config",
    "arrow_config",
)  # fmt: skip
_ADVICE = "merge it with PEFT, and export the result"
# Values of init_lora_weights that leave the base as it was; others (pissa, olora, corda, loftq, …) change it.
_KEEP_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal")


class _Change(NamedTuple):
    """The sum added to a matrix, scale · b · a, and the lengths of its rows afterwards, where these are set."""

    a: StoredTensor  # [rank, columns]
    b: StoredTensor  # [rows, rank]
    scale: float
    lengths: StoredTensor | None = None  # [rows, 1]


@dataclass(frozen=True, slots=True)
class _Adapter:
    """Tensors of an adapter by the names that their matrices have in the base.

    files: All that it was read from.
    whole: Matrices that replace those of the base.
    """

    path: Path
    files: tuple[Path, ...]
    changes: Mapping[str, _Change]
    whole: Tensors
    is_gguf: bool


def merge_adapter(loaded: LoadedSource, path: Path) -> LoadedSource:
    """The source with an adapter merged into its weights.

    Raises SourceError: The adapter is missing, damaged, of another base, or of a kind that is not read.
    """
    with translate_unusual(path):
        if not path.exists():
            raise SourceError(f"{path} does not exist; give the folder or the GGUF file of a LoRA adapter")
        adapter = _read_folder(path) if path.is_dir() else _read_file(path)
        if adapter.is_gguf != (loaded.source.format == "gguf"):
            _require_common_form(adapter, loaded.config)
        tensors = dict(loaded.tensors)
        made = dict(_merged(adapter, loaded.config, tensors))
    if "embedding" in made and "head" not in tensors:
        made.setdefault("head", tensors["embedding"])  # the head of the base is not adapted
    source, note = loaded.source, f"merging adapter {path.name} into {len(made)} matrices, in fp32"
    return replace(
        loaded,
        tensors=tensors | made,
        source=replace(
            source,
            name=f"{source.name}{WITH_ADAPTER}{source_name(path)}",
            sha256=f"{source.sha256},{join_hashes(adapter.files)}",
        ),
        notes=(*loaded.notes, note),
    )


def _read_folder(folder: Path) -> _Adapter:
    settings = SourceSettings(folder / ADAPTER_SETTINGS, read_json(folder / ADAPTER_SETTINGS))
    weights = folder / _WEIGHTS
    if not weights.exists():
        raise SourceError(f"{folder} has no {_WEIGHTS}; a pickle (.bin) is not read, since that runs code")
    _require_supported(settings)
    floats, integers = read_tensors([weights])
    require_floats(integers)
    changes: dict[str, _Change] = {}
    whole, lengths = {}, {}
    for name, tensor in floats.items():
        module = name.removeprefix(_PREFIX).removesuffix(".weight")
        if module.endswith(".lora_A"):
            module = module.removesuffix(".lora_A")
            other = floats.get(name.replace(".lora_A.", ".lora_B."))
            scale = _scale(settings, module, tensor.rows)
            changes[f"{module}.weight"] = _Change(tensor, _required(folder, module, other), scale)
        elif module.endswith(".lora_embedding_A"):  # both matrices lie on their sides
            module = module.removesuffix(".lora_embedding_A")
            other = _required(folder, module, floats.get(name.replace("embedding_A", "embedding_B")))
            scale = _scale(settings, module, tensor.rows)
            changes[f"{module}.weight"] = _Change(other.transposed(1), tensor.transposed(1), scale)
        elif re.search(r"\.lora_(embedding_)?B$", module):
            _required(folder, module, floats.get(re.sub("_B(?=$|[.])", "_A", name)))
        elif module.endswith(".lora_magnitude_vector"):
            lengths[f"{module.removesuffix('.lora_magnitude_vector')}.weight"] = tensor
        else:
            whole[re.sub(r"\.(modules_to_save|base_layer)\b", "", name.removeprefix(_PREFIX))] = tensor
    for name, tensor in lengths.items():
        change = changes.get(name)
        if change is None or tensor.rows * tensor.columns != change.b.rows:
            raise SourceError(
                f"{folder} has lengths of {tensor.rows * tensor.columns} rows of {name}, and changes "
                f"{change.b.rows if change else 0}; adapters of embeddings with DoRA are not read: {_ADVICE}"
            )
        rows = replace(tensor, rows=change.b.rows, columns=1)
        changes[name] = change._replace(lengths=rows)
    if settings.get("use_dora") and (missing := sorted(changes.keys() - lengths.keys())):
        raise SourceError(f"{folder} sets use_dora, and lacks the lengths of {missing[0]}; fetch it again")
    return _Adapter(folder, (folder / ADAPTER_SETTINGS, weights), changes, whole, is_gguf=False)


def _required(path: Path, module: str, tensor: StoredTensor | None) -> StoredTensor:
    if tensor is None:
        raise SourceError(
            f"{path} has one of the two matrices of {module} alone; the adapter is incomplete, fetch it again"
        )
    return tensor


def _require_supported(settings: SourceSettings) -> None:
    if (kind := settings.get("peft_type", "LORA")) != "LORA":
        raise SourceError(f"{settings.path} is an adapter of type {kind}; known is LORA; {_ADVICE}")
    for key in _UNSUPPORTED:
        if settings.get(key):
            raise SourceError(f"{settings.path} sets {key}, which is not supported; {_ADVICE}")
    if settings.get("bias", "none") != "none":
        raise SourceError(f"{settings.path} trains biases ({settings.get('bias')}), which are not read; {_ADVICE}")
    if settings.get("init_lora_weights") not in _KEEP_THE_BASE:
        raise SourceError(
            f"{settings.path} begins by {settings.get('init_lora_weights')}, which changes the base; {_ADVICE}"
        )


def _scale(settings: SourceSettings, module: str, found: int) -> float:
    """alpha / rank, or alpha / √rank, by the patterns of names that state others.

    Raises SourceError: The rank is not the one found.
    """
    rank = _by_pattern(settings, "rank_pattern", module, settings.count("r"))
    if rank != found:
        raise SourceError(
            f"{settings.path} states rank {rank:g} for {module}, and its matrices have rank {found}; the "
            "files do not belong together, fetch both again"
        )
    alpha = _by_pattern(settings, "alpha_pattern", module, settings.number("lora_alpha"))
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _by_pattern(settings: SourceSettings, key: str, module: str, usual: float) -> float:
    """The number for a module: that of the first of the names in a setting that it ends with, or is, behind ^."""
    for pattern, value in settings.get(key, {}).items():
        name = pattern.removeprefix("^")
        if not re.fullmatch(r"[\w.]+", name):  # a regular expression may take any time
            raise SourceError(f"{settings.path}: {key} has {pattern!r}; only names of modules are read; {_ADVICE}")
        if module == name or (name == pattern and module.endswith(f".{name}")):
            return SourceSettings(settings.path, {key: value}).number(key)
    return usual


def _read_file(path: Path) -> _Adapter:
    require_no_pointer(path)
    file = read_gguf(path)
    kind = file.metadata.get("adapter.type")
    if file.metadata.get("general.type") != "adapter" or kind != "lora":
        raise SourceError(f"{path} is not a LoRA adapter; give one to --adapter, and its base as SOURCE")
    alpha = SourceSettings(path, file.metadata).optional("adapter.lora.alpha")
    changes = {}
    for name, tensor in file.tensors.items():
        base, _, part = name.rpartition(".lora_")
        if part == "a":
            other = _required(path, base, file.tensors.get(f"{base}.lora_b"))
            scale = alpha / other.columns if alpha else 1.0
            # Those of an embedding are exchanged, and that of the columns lies on its side.
            is_turned = base == "token_embd.weight"
            changes[base] = _Change(*((other.transposed(1), tensor) if is_turned else (tensor, other)), scale)
        elif part == "b":
            _required(path, base, file.tensors.get(f"{base}.lora_a"))
        else:
            raise SourceError(f"{path} has tensor {name}, which is not part of a LoRA adapter; fetch it again")
    return _Adapter(path, file.paths, changes, {}, is_gguf=True)


def _require_common_form(adapter: _Adapter, config: DecoderConfig) -> None:
    """Raises SourceError: GGUF files have what it changes in another order, or multiplied."""
    delta = next((layer.delta for layer in config.layers if layer.delta), None)
    is_moved = delta is not None and delta.num_value_heads != delta.num_key_heads
    marks = (".linear_attn.", ".ssm_", ".attn_qkv.", ".attn_gate.") if is_moved else ()
    for name in (*adapter.changes, *adapter.whole):
        if FAMILIES[config.architecture].has_both or any(mark in name for mark in marks):
            wanted = "GGUF file" if adapter.is_gguf else "folder of safetensors"
            raise SourceError(
                f"{adapter.path} changes {name}, which GGUF files of {config.architecture} store in another way; "
                f"give the base as a {wanted} too"
            )


def _merged(adapter: _Adapter, config: DecoderConfig, tensors: Tensors) -> Iterator[tuple[str, StoredTensor]]:
    """The matrices that an adapter changes, by their roles."""
    known, bases = places(config, is_gguf=adapter.is_gguf), dict(tensors)
    for name, tensor in adapter.whole.items():
        found = _places_of(adapter, known, name, tensors)
        num_rows = _num_rows(found, tensors)
        for place in found:
            base = tensors.get(place.role, tensors["embedding"])
            if (tensor.rows, tensor.columns) != (num_rows, base.columns):
                raise SourceError(
                    f"{adapter.path}: {name} is {tensor.rows}×{tensor.columns}, and the model has "
                    f"{num_rows}×{base.columns} there; merge it with PEFT, which changes the number of tokens"
                )
            is_gain = place.role.endswith("norm")
            own = _rows_of(adapter, config, place, tensor)
            own = replace(own, addend=FAMILIES[config.architecture].gain_addend if is_gain else 0.0)
            bases[place.role] = own
            yield place.role, own
    for name, change in adapter.changes.items():
        a, b, found = change.a, change.b, _places_of(adapter, known, name, tensors)
        num_rows = _num_rows(found, tensors)
        for place in found:
            base = bases.get(place.role, tensors["embedding"])
            if b.columns != a.rows or (b.rows, a.columns) != (num_rows, base.columns):
                raise SourceError(
                    f"{adapter.path}: the change of {name} is {b.rows}×{b.columns} by {a.rows}×{a.columns}, and "
                    f"the model has {num_rows}×{base.columns} there; the adapter is for another base"
                )
            part = partial(_rows_of, adapter, config, place)
            lengths = None if change.lengths is None else part(change.lengths)
            yield place.role, _sum(base, change._replace(b=part(b), lengths=lengths))


def _num_rows(found: list[RoleRows], tensors: Tensors) -> int:
    """The rows of a matrix in which several roles may have theirs."""
    return sum(tensors.get(place.role, tensors["embedding"]).rows for place in found)


def _rows_of(adapter: _Adapter, config: DecoderConfig, place: RoleRows, tensor: StoredTensor) -> StoredTensor:
    """The rows of a tensor that have a role, in the order of the graph."""
    if place.order is not None:
        return replace(tensor, rows=len(place.order), row_order=place.order)
    return unpaired(config, place.role, tensor, is_gguf=adapter.is_gguf)


def _places_of(
    adapter: _Adapter, known: Mapping[str, list[RoleRows]], name: str, tensors: Tensors
) -> list[RoleRows]:
    # A model with vision has its decoder below a name of its own.
    found = known.get(name) or known.get(name.replace("language_model.", "", 1)) or []
    if not found or any(place.role not in tensors and place.role != "head" for place in found):
        raise SourceError(
            f"{adapter.path} changes {name}, which this model has not, or which cannot be merged; give the base "
            "that it was trained for, or merge it with PEFT and export the result"
        )
    return found


def _sum(base: StoredTensor, change: _Change) -> StoredTensor:
    """A matrix with its change, whose rows are made as they are read."""

    def rows(tensor: StoredTensor, start: int, stop: int) -> Floats:
        order = np.arange(tensor.rows) if tensor.row_order is None else tensor.row_order
        return np.concatenate([*replace(tensor, rows=stop - start, row_order=order[start:stop]).floats()])

    def make(start: int, stop: int) -> Bytes:
        low = np.concatenate([*change.a.floats()]) * np.float32(change.scale)
        summed = rows(base, start, stop) + rows(change.b, start, stop) @ low
        if change.lengths is not None:
            summed *= rows(change.lengths, start, stop) / np.linalg.norm(summed, axis=1, keepdims=True)
        return np.ascontiguousarray(summed, "<f4").view(np.uint8).reshape(stop - start, -1)

    return StoredTensor(base.name, base.path, 0, base.rows, base.columns, "F32", make=make)


def say_left_out_adapters(source: Path, merged: Path | None) -> Iterator[str]:
    """Lines on adapters in the folder of a model, or beside its file, that are not the one to merge."""
    folder = source if source.is_dir() else source.parent
    found = [folder] if (folder / ADAPTER_SETTINGS).is_file() else []
    found += [each for each in sorted(folder.glob("*.gguf")) if each != source and _is_adapter_file(each)]
    for path in found:
        if merged is None or path.resolve() != merged.resolve():
            yield f"adapter {path} lies beside the weights and is not merged; --adapter {quote(path)} merges it"


def _is_adapter_file(path: Path) -> bool:
    """True if it is the file of an adapter; the name has to say so too, since it is not to be opened otherwise."""
    if re.search("lora|adapter", path.name, re.IGNORECASE) is None:
        return False
    try:
        return bool(read_gguf(path).metadata.get("general.type") == "adapter")
    except (SourceError, OSError):  # whatever else lies there
        return False
