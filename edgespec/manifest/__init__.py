"""The manifest of a model folder, edgespec.json: the one thing that export and runtime share.

It states the inputs and outputs of the graph, the layout of its cache, where the model came from, and size and
SHA-256 of every file. Knows nothing of ONNX Runtime and nothing of how a model is made.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from edgespec.errors import ManifestError
from edgespec.manifest.caches import CACHE_DTYPES, CACHE_FORMS, Index, KVCache, Size, Width
from edgespec.system.disk import replace_file
from edgespec.system.file_hashes import FileRecord, require_size
from edgespec.system.typed_json import read_as, read_json, require_known_fields

SCHEMA_VERSION = 1
FILE_NAME = "edgespec.json"
COMPILED = "compiled"  # a folder beside it: what compilers of devices have made of the graphs
EXPORT_AGAIN = "export the model again"
NO_MANIFEST = "make one with: edgespec export SOURCE"
_HEAD_KINDS = ("recurrent", "steps", "block")
POOLING_KINDS = ("last", "mean")
FORMS = ("cpu", "gpu", "npu")  # kinds of devices that a model is exported for

Count = Annotated[int, Meta(ge=1, le=1 << 24)]  # bounded as the numbers of caches are
Share = Annotated[float, Meta(ge=0, le=1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
Penalty = Annotated[float, Meta(ge=0.01, le=100)]  # by which logits are divided


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The graph's names for its inputs and outputs; None for one that it does not have.

    %d stands for the layer. Without num_logits_to_keep the graph gives a row of logits for each token. It takes
    an attention bias for each kind of layer that it has, global and local. best is float32 [1, num_rows, 2]: for
    each row of logits the id of the most likely token, the lowest of equal ones, and the sum of the row, which is
    finite where all of its logits are.
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

    @cached_property
    def is_plain(self) -> bool:
        """True if all names are the ones that edgespec's own exports have."""
        own = asdict(Signature())
        return all(name in (None, own[role] or role) for role, name in asdict(self).items())

    def roles(self, num_layers: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Role and name of each input, and of each output; past and present have a name for each layer."""
        inputs: list[tuple[str, str]] = []
        outputs: list[tuple[str, str]] = []
        for role, name in asdict(self).items():
            found = outputs if role in ("logits", "best", "present_key", "present_value") else inputs
            for layer in range(num_layers if role.startswith(("past", "present")) else 1):
                if name is not None:
                    found.append((role, name.replace("%d", str(layer))))
        return inputs, outputs

    def caches(self, layers: Iterable[int]) -> list[tuple[str, str]]:
        """Names of past and present that belong together: keys, then values, layer by layer."""
        return [
            (past.replace("%d", str(layer)), present.replace("%d", str(layer)))
            for layer in layers
            for past, present in ((self.past_key, self.present_key), (self.past_value, self.present_value))
        ]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a source was fetched from, if that is known, and the licence of that place.

    name: What users call it, where its file is called otherwise.
    """

    repository: str | None = None
    revision: str | None = None
    license: str | None = None
    name: str | None = None


WITH_ADAPTER = " with adapter "  # between the names of a source and of what was merged into it


@dataclass(frozen=True, kw_only=True)
class Source:
    """The file or folder that a model was exported from.

    repository and revision name a place where the same bytes (by sha256) are published; they may have been
    fetched from another one.
    """

    name: str
    format: str
    sha256: str
    repository: str | None = None
    revision: str | None = None
    license: str | None = None

    @property
    def hub_id(self) -> str | None:
        """Its repository, and its file where that is GGUF, of which a repository may hold several."""
        return f"{self.repository}:{self.name}" if self.repository and self.format == "gguf" else self.repository

    @property
    def is_merged(self) -> bool:
        """True if an adapter was merged into it, so that it alone is another model."""
        return WITH_ADAPTER in self.name

    def fetched_from(self, origin: Origin) -> "Source":
        """This source with where it was fetched from; a licence that it states itself comes first."""
        _, merged, adapter = self.name.partition(WITH_ADAPTER)
        return replace(
            self,
            name=f"{origin.name}{merged}{adapter}" if origin.name else self.name,
            repository=origin.repository,
            revision=origin.revision,
            license=self.license or origin.license,
        )


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Logits of a graph with activations in floats beside those of the weights that it holds, worked out in numpy.

    Differences are shares of the logits' spread; pieces_difference is the largest of a text cut in other places.
    allowed follows from what a little noise on the embedding does to the logits of this model.
    """

    difference: float
    allowed: float
    pieces_difference: float


@dataclass(frozen=True, kw_only=True)
class Check:
    """An exported model compared with its source, token by token over a text.

    reference_nll and nll are in nats a token, as is divergence, the mean Kullback-Leibler divergence of the
    export's distributions from the source's. agreement is the share of positions with the same most likely token.
    pieces_difference is the largest difference of a logit when the text is read in pieces, one_row_difference when
    a token is read alone, which runs other kernels. rounding_difference is the largest to the logits of the
    weights as they were written, weights_error the largest relative error of a row of them.
    """

    num_tokens: int
    reference_nll: float
    nll: float
    divergence: float
    largest_difference: float
    agreement: float
    pieces_difference: float
    one_row_difference: float | None = None
    rounding_difference: float | None = None
    weights_error: float | None = None
    structure: Structure | None = None


@dataclass(frozen=True, kw_only=True)
class SelfDrafter:
    """A graph over the model's own weights file that has fewer layers."""

    graph: str
    layers: tuple[Index, ...]
    vocab_subset: str | None = None  # file that names the token of each row of its logits


@dataclass(frozen=True, kw_only=True)
class SuggestedSampling:
    """How the makers of a model suggest to sample its tokens; temperature 0 is greedy, and defaults do nothing."""

    temperature: Temperature
    top_k: Index = 0
    top_p: Share = 1.0
    min_p: Share = 0.0
    repetition_penalty: Penalty = 1.0


@dataclass(frozen=True, kw_only=True)
class Head:
    """A drafting head, which reads hidden states of its target beside tokens.

    method: eagle3, eagle, mtp, assistant, medusa, mlp_speculator, hydra, dflash or dspark.
    kind: recurrent, where the state that it gives with a token is read with the next one; steps, where each token
        of a draft has a graph of its own and none attends to the text; or block, where a pass drafts a block.
    target_layers: Layers of the target whose hidden states it reads, in this order; the number of the target's
        layers stands for the state after its final norm.
    state_size: Numbers in a state that goes with a token.
    fuse_graph: From hidden states of the target, [1, n, layers * target_hidden_size], to states,
        [1, n, state_size]; None where they are read as they are.
    step_graphs: A graph for each token of a draft; of the kinds steps and block.
    block_tokens: Tokens of a block, the known one included; of a recurrent head, how many it drafts in a pass.
    mask_token_id: Stands for each token that is not known yet, in heads that draft several in a pass.
    has_confidence: Each step of a block gives the chance that its token is accepted, too.
    reads_all: It attends to the whole text, as its target does; another recurrent head reads the end alone.
    """

    method: str
    kind: str
    target_layers: tuple[Index, ...]
    target_hidden_size: Width
    state_size: Count
    fuse_graph: str | None = None
    step_graphs: tuple[str, ...] = ()
    block_tokens: Size = 1
    mask_token_id: Index | None = None
    has_confidence: bool = False
    reads_all: bool = False

    @property
    def graphs(self) -> tuple[str, ...]:
        """Names of its graphs beside the manifest's own."""
        return (*([self.fuse_graph] if self.fuse_graph else []), *dict.fromkeys(self.step_graphs))

    @property
    def tokens_per_pass(self) -> int:
        """How many tokens it drafts in a pass."""
        return max(1, self.block_tokens - (self.kind == "block"))

    def problems(self, vocab_size: int) -> Iterator[str]:
        """Values that contradict each other, or a vocabulary of that size."""
        if self.kind not in _HEAD_KINDS:
            yield f"the kind of its head is {self.kind!r}, known are {', '.join(_HEAD_KINDS)}"
        if not self.target_layers:
            yield "its head reads no layer of the target"
        if not self.step_graphs and self.kind == "steps":
            yield "its head has no step graphs"
        if self.mask_token_id is None and (self.kind == "block" or self.block_tokens > 1):
            yield "its head names no mask token"
        if (self.mask_token_id or 0) >= vocab_size:
            yield f"the mask token {self.mask_token_id} is not in the vocabulary"


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """A drafter model that drafts num_tokens tokens in one pass, all but the first in the place of mask tokens."""

    mask_token_id: Index
    num_tokens: Size


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """How a model makes one vector of the states of a text's tokens, those behind its final norm.

    kind: One of POOLING_KINDS: the last token's state, or the mean of all.
    last_tokens: Special tokens that are put behind a text.
    """

    kind: str
    last_tokens: tuple[Index, ...] = ()

    def problems(self, manifest: "Manifest") -> Iterator[str]:
        """Values that contradict each other, or the manifest of the model."""
        if self.kind not in POOLING_KINDS:
            yield f"vectors are made by {self.kind!r}, known are {', '.join(POOLING_KINDS)}"
        if any(token >= manifest.vocab_size for token in self.last_tokens):
            yield "a token that is put behind texts is not in the vocabulary"
        if not {*manifest.pooled_layers} <= {*manifest.hidden_layers}:
            yield "vectors are made of states that the graph does not output"
        if manifest.kv_cache.form == "static":
            yield "vectors are made of states, which a model with a static cache does not give"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a model folder: shapes, vocabulary, graphs, files and where they come from."""

    name: str
    architecture: str
    precision: str
    context_length: Count
    kv_cache: KVCache
    vocab_size: Count
    vocab_sha256: str
    bos_token_id: Index | None
    eos_token_ids: tuple[Index, ...]
    add_bos: bool
    source: Source
    signature: Signature = field(default_factory=Signature)
    form: str = "cpu"  # one of FORMS
    schema_version: int = SCHEMA_VERSION
    graph: str = "model.onnx"
    weights: str = "model.onnx.data"
    tokenizer: str = "tokenizer.json"
    chat_template: str | None = "chat_template.jinja"
    sampling: SuggestedSampling | None = None  # None where its files suggest nothing
    suppressed_token_ids: tuple[Index, ...] = ()  # that its files say never to write
    prefill_graph: str | None = None  # with a static cache: a graph for passes of prefill_tokens tokens
    prefill_tokens: Size = 1
    sliding_window: Count | None = None  # tokens that local layers see; a static or tree graph takes it as a mask
    tree_graph: str | None = None  # a graph of this model that takes position_ids and attention_bias
    # Layers whose hidden states are outputs too; num_layers stands for the state after the final norm.
    hidden_layers: tuple[Index, ...] = ()
    self_drafter: SelfDrafter | None = None
    head: Head | None = None  # of a drafting head, whose graphs take hidden states of its target
    parallel: Parallel | None = None
    pooling: Pooling | None = None  # of a model that was trained for embeddings
    gathered_bytes: Index = 0  # of weights of which a pass reads the rows of its tokens alone
    half_bytes: Index = 0  # of other weights that are stored as half floats, which the CPU widens
    vocab_subset: str | None = None  # of a drafter with a trimmed head: file that names the token of each row
    check: Check | None = None
    files: dict[str, FileRecord] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        """True if edgespec made the folder, with hashes; it never writes into another program's."""
        return bool(self.files)

    @cached_property
    def cache_names(self) -> Sequence[tuple[str, str]]:
        """Names of past and present of all layers that have keys and values, as Signature.caches gives them."""
        return self.signature.caches(self.kv_cache.attention_layers)

    @property
    def pooled_layers(self) -> tuple[int, ...]:
        """The layers whose states its vectors are made of: the one behind the final norm, or none."""
        return (self.kv_cache.num_layers,) if self.pooling else ()

    @property
    def tokens_per_pass(self) -> int:
        """How many tokens it drafts in a pass, as a drafter."""
        if self.parallel is not None:
            return self.parallel.num_tokens
        return self.head.tokens_per_pass if self.head else 1

    def of_layers(self, kept: Sequence[int]) -> "Manifest":
        """The manifest of a model that has some of the layers alone, and their share of the weights."""
        num_layers = self.kv_cache.num_layers
        return replace(
            self,
            kv_cache=self.kv_cache.of_layers(kept),
            tree_graph=None,
            hidden_layers=(),
            gathered_bytes=self.gathered_bytes * len(kept) // num_layers,
            half_bytes=self.half_bytes * len(kept) // num_layers,
        )

    @property
    def most_draft_tokens(self) -> int | None:
        """The most tokens that it drafts after a text, as a drafter; None where its kind has no bound."""
        if self.head is None or (self.head.kind == "recurrent" and self.head.mask_token_id is None):
            return None
        return len(self.head.step_graphs) if self.head.kind == "steps" else self.head.block_tokens

    @property
    def weights_bytes(self) -> int:
        return self.files[self.weights].bytes

    @property
    def weights_sha256(self) -> str:
        """The recorded SHA-256 of the weights file; empty where the manifest records none."""
        return self.files[self.weights].sha256 if self.weights in self.files else ""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write edgespec.json into a folder. Raises OSError: It cannot be written, and is as it was."""
    replace_file(folder / FILE_NAME, (json.dumps(asdict(manifest), indent=1) + "\n").encode(), 0o666)


def read_manifest(folder: Path, *, has_files: bool = True) -> Manifest:
    """Read edgespec.json and check that every file it lists is in the folder and as long as stated.

    has_files: False to read it alone, of a folder that may lack files.

    Raises:
        ManifestError: There is no manifest, or it has another schema or a bad value, or a file is missing.
        IntegrityError: A file has another length.
    """
    path = folder / FILE_NAME
    try:
        stated = read_json(path)
    except FileNotFoundError:
        raise ManifestError(f"{folder} has no {FILE_NAME}, so it is not a model folder; {NO_MANIFEST}") from None
    except OSError as error:
        raise ManifestError(f"{path} cannot be read ({error.strerror}); change its permissions") from None
    except ValueError as error:
        raise ManifestError(f"{path} is not JSON that can be read ({error}); export the model again") from None
    version = stated.get("schema_version") if isinstance(stated, dict) else None
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ManifestError(
            f"{path} has schema version {version}, this edgespec reads {SCHEMA_VERSION}; export the model again"
        )
    manifest = parse_manifest(path, stated)
    _require_listed(path, manifest)
    for name, record in manifest.files.items() if has_files else ():
        require_size(folder, name, record)
    return manifest


def parse_manifest(path: Path, stated: dict[str, Any]) -> Manifest:
    """Check a manifest's document, which may have been edited by hand or by an attacker.

    Raises ManifestError: A value has another type, is out of range, or contradicts another.
    """
    try:
        manifest = read_as(Manifest, stated)
        require_known_fields(stated, manifest)
    except ValueError as error:
        raise ManifestError(f"{path}: {error}; export the model again") from None
    if problem := next(_problems(manifest), None):
        raise ManifestError(f"{path}: {problem}; use a newer edgespec or export the model again")
    return manifest


def _problems(manifest: Manifest) -> Iterator[str]:
    """Values that contradict each other, or that this edgespec does not know."""
    head, pooling, kv, vocab_size = manifest.head, manifest.pooling, manifest.kv_cache, manifest.vocab_size
    special = [*manifest.eos_token_ids, *([] if manifest.bos_token_id is None else [manifest.bos_token_id])]
    special += manifest.suppressed_token_ids
    if max(special, default=0) >= vocab_size:
        yield f"special token ids {special} are not in the vocabulary"
    if manifest.form not in FORMS:
        yield f"its form is {manifest.form!r}, known are {', '.join(FORMS)}"
    if kv.form not in CACHE_FORMS or kv.dtype not in CACHE_DTYPES:
        known = f"{', '.join(CACHE_FORMS)} of {', '.join(CACHE_DTYPES)}"
        yield f"the cache is {kv.form!r} of {kv.dtype!r}, known are {known}"
    if kv.dtype == "uint16" and kv.form != "static":
        yield f"a {kv.form} cache is of uint16, which only a static one can be"
    parts = kv.convolutions, kv.recurrence, kv.other_heads, manifest.self_drafter
    named = [*kv.sharing_layers, *(layer for part in parts if part for layer in part.layers)]
    if max(named, default=-1) >= kv.num_layers or max(manifest.hidden_layers, default=0) > kv.num_layers:
        yield f"it names layers {[*manifest.hidden_layers, *named]} of {kv.num_layers}"
    if kv.why_no_trees and (kv.form != "shared_buffer" or manifest.tree_graph or not kv.attention_layers):
        yield "layers of another kind take others with attention, a shared_buffer cache and no graph for trees"
    if (kv.other_heads or kv.sharing_layers) and (kv.form != "shared_buffer" or not kv.attention_layers):
        yield "layers that share keys and values, or differ in heads, take a shared_buffer cache of some of them"
    if not manifest.signature.is_plain:
        yield from _shared_names(manifest.signature, kv.num_layers)
    if head is not None:
        yield from head.problems(vocab_size)
        if kv.form != "shared_buffer":
            yield f"a head's cache is shared_buffer, not {kv.form}"
    if manifest.parallel is not None and manifest.parallel.mask_token_id >= vocab_size:
        yield f"the mask token {manifest.parallel.mask_token_id} is not in the vocabulary"
    if kv.num_layers == 0 and (head is None or head.kind != "steps"):
        yield "a model with 0 layers can only be a head of the kind steps"
    if pooling is not None:
        yield from pooling.problems(manifest)


def _shared_names(names: Signature, num_layers: int) -> Iterator[str]:
    """Names of inputs or outputs in two roles, which would be used for both, or with their roles swapped."""
    # Two layers, so that a missing %d is found.
    for kind, roles in zip(("input", "output"), names.roles(min(num_layers, 2)), strict=True):
        known: dict[str, str] = {}
        for role, name in roles:
            if name in known:
                yield f"signature.{known[name]} and signature.{role} name the same {kind}, {name!r}"
            known[name] = role
    for side in ("past", "present"):
        key, value = getattr(names, f"{side}_key"), getattr(names, f"{side}_value")
        if key.endswith("value") and value.endswith("key"):
            yield f"signature.{side}_key is {key!r} and signature.{side}_value {value!r}, which seem swapped"


def _require_listed(path: Path, manifest: Manifest) -> None:
    drafter = manifest.self_drafter
    optional = [manifest.chat_template, manifest.prefill_graph, manifest.tree_graph, manifest.vocab_subset]
    optional += [drafter.graph, drafter.vocab_subset] if drafter else []
    optional += manifest.head.graphs if manifest.head else []
    for name in (manifest.graph, manifest.weights, manifest.tokenizer, *optional):
        if name is not None and name not in manifest.files:
            raise ManifestError(f"{path} lists no hash for {name!r}; export the model again")
