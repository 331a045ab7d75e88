"""The manifest of a model folder, edgespec.json: the one thing that export and runtime share.

It states what the graph takes and gives, how its cache is laid out, where the model came from, and
size and SHA-256 of every file. Knows nothing of ONNX Runtime and nothing of how a model is made.
"""

import hashlib
import json
import os
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edgespec.cancel import Cancel
from edgespec.errors import IntegrityError, ManifestError
from edgespec.json_file import read_json

SCHEMA_VERSION = 1
FILE_NAME = "edgespec.json"
_HASH_CHUNK_BYTES = 1 << 20
_LARGEST_COUNT = 1 << 24
_LARGEST_BYTES = 1 << 20  # a real one has 3 kB
_LARGEST_SHAPE = 1 << 12  # layers, heads and head sizes; far more would be reserved before the graph says no
_CACHE_FORMS = ("shared_buffer", "growing", "static")
_CACHE_DTYPES = {"float32": 4, "float16": 2, "uint16": 2}  # bytes of a value
_OPTIONAL_ORIGIN = ("repository", "revision", "license")
_OPTIONAL_NAMES = (
    "attention_mask",
    "position_ids",
    "num_logits_to_keep",
    "attention_bias",
    "local_attention_bias",
    "best",
)


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of each layer, [1, num_kv_heads, positions, head_dim].

    form is shared_buffer, where one buffer of more positions than are filled is bound as past and present and a
    shorter total length rewinds it, or growing, where past holds what came before and present that and the new, or
    static, where past is a whole context long, without the batch, and present holds the new alone. That one may
    be of uint16: levels, whose meaning the graph knows.
    """

    form: str = "shared_buffer"
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * _CACHE_DTYPES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What the graph calls its inputs and outputs; None for one that it does not have.

    %d stands for the layer. Without num_logits_to_keep the graph gives a row of logits for each token. Of the two
    attention biases it takes those that it has layers for. best is float32 [1, num_rows, 2]: of each row of logits
    the id of the likeliest token, the lowest of equal ones, and their sum, which is finite where all of them are.
    """

    input_ids: str = "input_ids"
    attention_mask: str | None = "attention_mask"
    position_ids: str | None = None
    num_logits_to_keep: str | None = "num_logits_to_keep"
    attention_bias: str | None = None
    local_attention_bias: str | None = None
    past_key: str = "past_key_values.%d.key"
    past_value: str = "past_key_values.%d.value"
    logits: str = "logits"
    best: str | None = None
    present_key: str = "present.%d.key"
    present_value: str = "present.%d.value"

    @property
    def is_plain(self) -> bool:
        """Whether all names are those that every export of edgespec has."""
        plain = {**asdict(Signature()), **{role: role for role in _OPTIONAL_NAMES}}
        return all(name in (None, plain[role]) for role, name in asdict(self).items())

    def roles(self, num_layers: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Role and name of each input and of each output; a role of the cache has one in each layer."""
        inputs: list[tuple[str, str]] = []
        outputs: list[tuple[str, str]] = []
        for role, name in asdict(self).items():
            layers = range(num_layers if role.startswith(("past", "present")) else 1)
            if name is not None:
                is_output = role in ("logits", "best", "present_key", "present_value")
                (outputs if is_output else inputs).extend((role, name.replace("%d", str(at))) for at in layers)
        return inputs, outputs

    def caches(self, num_layers: int) -> list[tuple[str, str]]:
        """The names of past and present that belong together, keys and values layer by layer."""
        return [
            (past.replace("%d", str(layer)), present.replace("%d", str(layer)))
            for layer in range(num_layers)
            for past, present in ((self.past_key, self.present_key), (self.past_value, self.present_value))
        ]


@dataclass(frozen=True, kw_only=True)
class Source:
    """The weights before the export.

    repository and revision are a published place of these very bytes (by sha256), which need not be the
    one that they were fetched from.
    """

    name: str
    format: str
    sha256: str
    repository: str | None = None
    revision: str | None = None
    license: str | None = None


@dataclass(frozen=True, kw_only=True)
class Check:
    """An exported model against its source, token by token over a text.

    reference_nll and nll are in nats a token, as is divergence, the mean Kullback-Leibler divergence of the
    export's distributions from the source's; agreement is the share of positions with the same likeliest token;
    pieces_difference is the largest difference of a logit when the text comes in pieces, and one_row_difference
    when a token comes alone, which other kernels serve.
    """

    num_tokens: int
    reference_nll: float
    nll: float
    divergence: float
    largest_difference: float
    agreement: float
    pieces_difference: float
    one_row_difference: float | None = None


@dataclass(frozen=True, kw_only=True)
class SelfDrafter:
    """A graph over the model's own weights file that has fewer layers."""

    graph: str
    layers: tuple[int, ...]
    vocab_subset: str | None = None  # file that names the token of each row of its logits


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    name: str
    architecture: str
    precision: str
    context_length: int
    kv_cache: KVCache
    vocab_size: int
    vocab_sha256: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    source: Source
    signature: Signature = field(default_factory=Signature)
    form: str = "cpu"  # the kind of device that it was laid out for: cpu, gpu or npu
    schema_version: int = SCHEMA_VERSION
    graph: str = "model.onnx"
    weights: str = "model.onnx.data"
    tokenizer: str = "tokenizer.json"
    chat_template: str | None = "chat_template.jinja"
    prefill_graph: str | None = None  # of the static form: a pass of prefill_tokens tokens
    prefill_tokens: int = 1
    sliding_window: int | None = None  # what the local mask of a static graph or a tree graph has to leave
    tree_graph: str | None = None  # the same model with position_ids and attention_bias
    hidden_layers: tuple[int, ...] = ()  # whose hidden states the graph gives too
    self_drafter: SelfDrafter | None = None
    vocab_subset: str | None = None  # of a drafter with a trimmed head: file that names the token of each row
    check: Check | None = None
    files: dict[str, FileRecord] = field(default_factory=dict)

    @property
    def weights_bytes(self) -> int:
        return self.files[self.weights].bytes


def file_record(path: Path, cancel: Cancel | None = None) -> FileRecord:
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            if cancel:
                cancel.expect_unset()
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(sha256=digest.hexdigest(), bytes=size)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / FILE_NAME).write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read edgespec.json and check that every file it lists is there in its size.

    Raises:
        ManifestError: No manifest, another schema, a missing field, or a file missing or cut short.
    """
    path = folder / FILE_NAME
    try:
        stated = read_json(path, _LARGEST_BYTES)
    except FileNotFoundError:
        raise ManifestError(
            f"{folder} has no {FILE_NAME}, so it is no model folder; make one with: edgespec export SOURCE"
        ) from None
    except OSError as error:
        raise ManifestError(f"{path} cannot be read ({error.strerror}); mend its permissions") from None
    except ValueError as error:
        raise ManifestError(f"{path} is not JSON that can be read ({error}); export the model again") from None
    manifest = _from_json(path, stated)
    for name, record in manifest.files.items():
        _check_size(folder, name, record)
    return manifest


def _from_json(path: Path, stated: Any) -> Manifest:
    version = stated.get("schema_version") if isinstance(stated, dict) else None
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ManifestError(
            f"{path} has schema version {version}, this edgespec reads {SCHEMA_VERSION}; export the model again"
        )
    try:
        manifest = Manifest(
            **{
                **stated,
                "kv_cache": KVCache(**stated["kv_cache"]),
                "source": Source(**stated["source"]),
                "signature": Signature(**stated.get("signature", {})),
                "check": Check(**stated["check"]) if stated.get("check") else None,
                "self_drafter": _self_drafter(stated.get("self_drafter")),
                "hidden_layers": tuple(stated.get("hidden_layers", ())),
                "eos_token_ids": tuple(stated["eos_token_ids"]),
                "files": {name: FileRecord(**record) for name, record in stated["files"].items()},
            }
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"{path} is incomplete or has unknown fields ({error}); export again") from None
    _check(path, manifest)
    return manifest


def _self_drafter(stated: dict[str, Any] | None) -> SelfDrafter | None:
    return SelfDrafter(**{**stated, "layers": tuple(stated["layers"])}) if stated else None


def _check(path: Path, manifest: Manifest) -> None:
    check_values(path, manifest)
    drafter = manifest.self_drafter
    layers = [*manifest.hidden_layers, *(drafter.layers if drafter else ())]
    if not all(type(layer) is int and 0 <= layer < manifest.kv_cache.num_layers for layer in layers):
        raise ManifestError(f"{path} names layers {layers} of {manifest.kv_cache.num_layers}; export again")
    optional = [manifest.chat_template, manifest.prefill_graph, manifest.tree_graph, manifest.vocab_subset]
    optional += [drafter.graph, drafter.vocab_subset] if drafter else []
    needed = [manifest.graph, manifest.weights, manifest.tokenizer]
    for used in [*needed, *(name for name in optional if name is not None)]:
        if not isinstance(used, str) or used not in manifest.files:
            raise ManifestError(f"{path} lists no hash for {used!r}; export the model again")


def check_values(path: Path, manifest: Manifest) -> None:
    """Types and ranges; what a file states may have been edited by hand or by an enemy.

    Raises:
        ManifestError: The first value that cannot be meant.
    """
    kv = manifest.kv_cache
    counts = {
        "context_length": (manifest.context_length, _LARGEST_COUNT),
        "vocab_size": (manifest.vocab_size, _LARGEST_COUNT),
        "num_layers": (kv.num_layers, _LARGEST_SHAPE),
        "num_kv_heads": (kv.num_kv_heads, _LARGEST_SHAPE),
        "head_dim": (kv.head_dim, _LARGEST_SHAPE),
    }
    counts["prefill_tokens"] = (manifest.prefill_tokens, _LARGEST_SHAPE)
    if manifest.sliding_window is not None:
        counts["sliding_window"] = (manifest.sliding_window, _LARGEST_COUNT)
    for name, (value, largest) in counts.items():
        if type(value) is not int or not 0 < value <= largest:
            raise ManifestError(f"{path}: {name} is {value!r}, wanted 1 to {largest}; export again")
    special = [*manifest.eos_token_ids, *([] if manifest.bos_token_id is None else [manifest.bos_token_id])]
    if not all(type(token) is int and 0 <= token < manifest.vocab_size for token in special):
        raise ManifestError(f"{path}: special token ids {special} are not in the vocabulary; export again")
    if kv.form not in _CACHE_FORMS or kv.dtype not in _CACHE_DTYPES:
        raise ManifestError(
            f"{path}: the cache is {kv.form!r} of {kv.dtype!r}, known are {', '.join(_CACHE_FORMS)} of "
            f"{', '.join(_CACHE_DTYPES)}; use a newer edgespec or export again"
        )
    if kv.dtype == "uint16" and kv.form != "static":
        raise ManifestError(f"{path}: a {kv.form} cache of uint16, which a static one alone can be; export again")
    texts = {
        field: getattr(manifest, field) for field in ("name", "architecture", "precision", "form", "vocab_sha256")
    }
    origin = asdict(manifest.source).items()
    texts |= {f"source.{key}": value for key, value in origin if value is not None or key not in _OPTIONAL_ORIGIN}
    texts |= {f"the hash of {name}": record.sha256 for name, record in manifest.files.items()}
    for what, text in {**texts, **asdict(manifest.signature)}.items():
        if not isinstance(text, str) and not (text is None and what in _OPTIONAL_NAMES):
            raise ManifestError(f"{path}: {what} is {text!r}, wanted a text; export again")
    if not isinstance(manifest.add_bos, bool):
        raise ManifestError(f"{path}: add_bos is {manifest.add_bos!r}, wanted true or false; export again")
    _check_names(path, manifest)


def _check_names(path: Path, manifest: Manifest) -> None:
    """Each role has an input or output of its own: one that had two would be believed in both."""
    inputs, outputs = manifest.signature.roles(min(manifest.kv_cache.num_layers, 2))  # two, so that %d is missed
    for kind, roles in (("input", inputs), ("output", outputs)):
        held: dict[str, str] = {}
        for role, name in roles:
            if name in held:
                raise ManifestError(
                    f"{path}: signature.{held[name]} and signature.{role} name the same {kind}, {name!r}, wanted "
                    "another for each; export the model again"
                )
            held[name] = role
    names = manifest.signature
    for side, key, value in (
        ("past", names.past_key, names.past_value),
        ("present", names.present_key, names.present_value),
    ):
        if key.endswith("value") and value.endswith("key"):
            raise ManifestError(
                f"{path}: signature.{side}_key is {key!r} and signature.{side}_value {value!r}, wanted the one in "
                "the place of the other; export the model again"
            )


def _check_size(folder: Path, name: str, record: FileRecord) -> None:
    if not name or Path(name).name != name or name == ".." or "\0" in name:
        raise ManifestError(f"{folder}: the manifest names {name!r}, which is not a file of its own folder")
    try:
        status = (folder / name).stat()
    except OSError as error:
        raise ManifestError(f"{folder / name}: {error.strerror}; export the model again") from None
    if not stat.S_ISREG(status.st_mode):
        raise ManifestError(f"{folder / name} is no regular file; export the model again")
    if not os.access(folder / name, os.R_OK):
        raise ManifestError(f"{folder / name} may not be read; mend its permissions")
    found = status.st_size
    if found != record.bytes:
        raise IntegrityError(
            f"{folder / name} has {found} bytes, its manifest says {record.bytes}; export the model again"
        )


def strangers(folder: Path, manifest: Manifest) -> list[str]:
    """Files in the folder that the manifest does not list."""
    return sorted({path.name for path in folder.iterdir()} - {*manifest.files, FILE_NAME})


def verify_files(folder: Path, manifest: Manifest, cancel: Cancel | None = None) -> None:
    """Compare the SHA-256 of every listed file.

    Raises:
        IntegrityError: The first file that differs.
        Cancelled: It was given up.
    """
    for name, record in manifest.files.items():
        found = file_record(folder / name, cancel)
        if found != record:
            raise IntegrityError(
                f"{folder / name} was changed since its export (SHA-256 {found.sha256[:12]}…, the manifest says "
                f"{record.sha256[:12]}…); export the model again"
            )
