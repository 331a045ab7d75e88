"""The shape of a model that is not prepared yet, and upper bounds of the memory and disk that it will take."""

from pathlib import Path

from edgespec.manifest import KVCache, Manifest, Source
from edgespec.memory.estimate import BYTES_PER_WEIGHT, SOURCE_GROWTH, estimate_memory
from edgespec.memory.free_memory import RESERVE_BYTES
from edgespec.setup.catalog import CATALOG, CatalogEntry, CatalogFile, Shape
from edgespec.setup.home import ModelHome, split_precision


def file_bytes(entry: CatalogEntry) -> int:
    """The most that the weights file takes in the precision of the entry."""
    if isinstance(entry.source, CatalogFile):
        return int(SOURCE_GROWTH * entry.source.bytes)
    return weights_bytes(entry.shape, entry.precision)


def weights_bytes(shape: Shape, precision: str) -> int:
    """The most that weights of a shape take in a precision; embedding and head are never in 4 bits."""
    per_weight = BYTES_PER_WEIGHT[precision]
    vocabulary = max(per_weight, BYTES_PER_WEIGHT["int8"]) * shape.num_vocabulary_weights
    rotary_tables = 4 * shape.context_length * shape.head_dim
    return int(per_weight * shape.num_matrix_weights + vocabulary) + rotary_tables


def memory_bytes(entry: CatalogEntry) -> int:
    """The memory that plain decoding of a catalogue model takes on the CPU with 2048 tokens, and the reserve."""
    shape = entry.shape
    manifest = Manifest(
        name=entry.title,
        architecture="",
        precision=entry.precision,
        context_length=shape.context_length,
        kv_cache=KVCache(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim),
        vocab_size=shape.vocab_size,
        vocab_sha256="",
        bos_token_id=None,
        eos_token_ids=(),
        add_bos=False,
        source=Source(name=entry.title, format="", sha256=""),
    )
    return needed_bytes(manifest, file_bytes(entry))


def needed_bytes(manifest: Manifest, file_bytes: int) -> int:
    """The memory that plain decoding of a prepared model takes on the CPU with 2048 tokens, and the reserve."""
    estimate = estimate_memory(manifest, file_bytes)
    needed = estimate.weights_bytes + estimate.kv_cache_bytes + estimate.states_bytes + estimate.workspace_bytes
    return needed + RESERVE_BYTES


_STATIC_CONTEXT = 1024  # of the npu form


def foresee_model(home: ModelHome, model: str, form: str) -> tuple[Manifest, int]:
    """A made-up manifest, which only states shapes, and the bytes of the weights file.

    A model that the catalogue does not list is read from its source, which is fetched if need be.

    Raises ModelError: The source is missing, damaged or unsupported.
    """
    name, asked = split_precision(model)
    entry = CATALOG.get(name)
    precision = asked or ("fp16" if form == "npu" else entry.precision if entry else "source")
    return _from_catalog(name, entry, precision, form) if entry else _from_source(home, name, precision, form)


def _from_catalog(name: str, entry: CatalogEntry, precision: str, form: str) -> tuple[Manifest, int]:
    shape = entry.shape
    if precision == "source":
        assert isinstance(entry.source, CatalogFile)
        num_bytes = int(SOURCE_GROWTH * entry.source.bytes)
    else:
        num_bytes = weights_bytes(shape, precision)
    kv_cache = KVCache(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
    return _describe(name, precision, form, kv_cache, shape.vocab_size, shape.context_length), num_bytes


def _from_source(home: ModelHome, name: str, precision: str, form: str) -> tuple[Manifest, int]:
    from edgespec.export.options import ExportOptions  # 0.3 s, and only a first use needs it
    from edgespec.export.plan import plan_model

    path = Path(name).expanduser()
    source = path if path.exists() else home.locate(name).path
    planned = plan_model(source, ExportOptions(precision=precision, form=form))
    config, cost = planned.loaded.config, planned.cost
    kv_cache = KVCache(num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
    manifest = _describe(path.name, cost.precision, form, kv_cache, config.vocab_size, config.context_length)
    return manifest, cost.write_bytes


def _describe(
    name: str, precision: str, form: str, kv_cache: KVCache, vocab_size: int, context_length: int
) -> Manifest:
    is_static = form == "npu"
    return Manifest(
        name=name,
        architecture="",
        precision=precision,
        form=form,
        context_length=min(context_length, _STATIC_CONTEXT) if is_static else context_length,
        kv_cache=KVCache(
            form="static" if is_static else "shared_buffer",
            num_layers=kv_cache.num_layers,
            num_kv_heads=kv_cache.num_kv_heads,
            head_dim=kv_cache.head_dim,
            dtype="float32" if form == "cpu" else "float16",
        ),
        vocab_size=vocab_size,
        vocab_sha256="",
        bos_token_id=None,
        eos_token_ids=(),
        add_bos=False,
        source=Source(name=name, format="", sha256=""),
        tree_graph=None if is_static else "model_tree.onnx",
    )
