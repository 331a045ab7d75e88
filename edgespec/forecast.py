"""What a model will take of memory and disk, by its shape, before anything of it is here. Pure.

Sizes are upper bounds of what the exporter writes; what opening them takes is for `budget` to say.
"""

from edgespec.budget import RESERVE_BYTES, need_of
from edgespec.catalog import CatalogEntry, CatalogFile, Shape
from edgespec.manifest import KVCache, Manifest, Source

# Bytes a weight that the exporter writes at most, scales and all.
BYTES_PER_WEIGHT = {"fp32": 4.0, "fp16": 2.0, "int8": 1.125, "int4": 0.75, "w8a16": 3.0}
# Of a source that is quantised already: scales of two bytes are written as four.
SOURCE_GROWTH = 1.3
_TOLD_TOKENS = 2048


def file_bytes(entry: CatalogEntry) -> int:
    """Of the weights file in the precision that the entry has, at most."""
    if isinstance(entry.source, CatalogFile):
        return int(SOURCE_GROWTH * entry.source.bytes)
    return weights_bytes(entry.shape, entry.precision)


def weights_bytes(shape: Shape, precision: str) -> int:
    """Of a shape in a precision, at most; embedding and head are never in 4 bits."""
    per_weight = BYTES_PER_WEIGHT[precision]
    vocabulary = max(per_weight, BYTES_PER_WEIGHT["int8"]) * shape.num_vocabulary_weights
    rotary_tables = 4 * shape.context_length * shape.head_dim
    return int(per_weight * shape.num_matrix_weights + vocabulary) + rotary_tables


def memory_bytes(entry: CatalogEntry) -> int:
    """What plain decoding takes on the CPU at a context of 2048 tokens, with what is to stay free."""
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
    """The same of a model that is here."""
    need = need_of(manifest, file_bytes, _TOLD_TOKENS)
    return need.weights_bytes + need.kv_cache_bytes + need.workspace_bytes + RESERVE_BYTES
