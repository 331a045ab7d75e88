"""Upper bounds of the memory and disk that a model of the catalogue will take, by its shape. Pure."""

from edgespec.manifest import KVCache, Manifest, Source
from edgespec.memory.estimate import BYTES_PER_WEIGHT, SOURCE_GROWTH, estimate_memory
from edgespec.memory.reserve import RESERVE_BYTES
from edgespec.models.catalog import CatalogEntry, CatalogFile, Shape


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
    """What plain decoding of a catalogue model takes on the CPU at a context of 2048 tokens, with the reserve."""
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
    """What plain decoding of a prepared model takes on the CPU at a context of 2048 tokens, with the reserve."""
    estimate = estimate_memory(manifest, file_bytes)
    needed = estimate.weights_bytes + estimate.kv_cache_bytes + estimate.states_bytes + estimate.workspace_bytes
    return needed + RESERVE_BYTES
