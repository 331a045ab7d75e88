"""The layout of a stored tensor in each precision and device form.

    source  blocks keep their levels, scales and offsets; floats stay as they are
    fp32    dequantised
    fp16    dequantised and rounded to half floats, which are widened again when the session loads
    int8    symmetric blocks, rounded to nearest
    int4    blocks with a minimum each, at least squared error; an embedding in int8, since it is read
            by rows and, where it is the head as well, loses 0.07 nats a token in 4 bits (SmolLM2). In the
            gpu form symmetric blocks at least squared error, and the head in int8. Of a model of few weights
            all but gate and up are in int8, and what its file stores in 5 bits or more is too; in the cpu form
            what it stores in 4 bits stays there
    w8a16   of the npu form: matrices in 8 bits, a scale a row, and activations in 16, whose ranges are measured
            on a text; the embedding in 16
Blocks that have the wanted bits and size already are copied.

Device forms:
    cpu     activations and cache in fp32, products with activations in 8 bits (accuracy_level 4)
    gpu     activations and cache in fp16 (in fp32 precision, fp32), int4 in symmetric blocks, which is what fast
            kernels take
    npu     fixed shapes and primitive operators (static_graph), all in fp16, all in fp32, or in w8a16
"""

from dataclasses import dataclass, field, replace
from typing import get_args

from edgespec.export.tensors import StoredTensor
from edgespec.types import Precision

PRECISIONS = get_args(Precision)
BLOCK_SIZES = (32, 64, 128)
FORMS = ("cpu", "gpu", "npu")
_FLOATS = {"fp32": "F32", "fp16": "F16"}
BITS = {"int8": 8, "int4": 4}
# Q6_K has blocks of 16 weights; eight are joined, which takes three quarters of the time to read and was worse by
# less than 0.001 nats (docs/log/kernels-and-passes.md).
JOINED_BLOCK = 128
# Below this four bits cost a model more than they save: 0.2 nats a token on one of 135 million weights.
FEW_WEIGHTS = 600_000_000
# Matrices that suffer most in blocks of 4 bits: SmolLM2-135M loses 0.03 nats with these in 8 bits, and 0.17
# without, in symmetric blocks (docs/log/export-precision.md). In larger models only the head suffers. Gemma 3
# 270M, which is stored in 5 bits and more, loses 0.07 nats by gate and up alone.
_SENSITIVE = ("qkv", "o", "conv_in", "conv_out", "down")


def choose_precision(num_weights: int, *, is_blocks: bool, hidden_size: int = BLOCK_SIZES[0]) -> tuple[str, str]:
    """The precision that suits a source on a CPU, where reading weights sets the speed, and why."""
    if is_blocks:
        return "source", "its weights are quantised already, and keeping them loses nothing"
    if hidden_size % BLOCK_SIZES[0]:
        return (
            "source",
            f"a quantised embedding needs a hidden size in multiples of {BLOCK_SIZES[0]}, not {hidden_size}",
        )
    size = f"{num_weights / 1e6:.0f} million weights"
    if num_weights < FEW_WEIGHTS:
        return "int8", f"{size} are few, and a small model loses much in 4 bits"
    return "int4", f"{size} in 4 bits are read in a fraction of the time, at little loss"


@dataclass(frozen=True, slots=True)
class Form:
    """The layout of a tensor in the graph; tensors of one form can be stacked into one matrix.

    bits is None for floats, whose stored type is kept.
    """

    bits: int | None
    block_size: int = 0
    has_offsets: bool = False
    storage: str = ""
    has_zero_points: bool = False  # without offsets
    rounding: str = field(default="none", compare=False)  # none (copied), symmetric or asymmetric


@dataclass(frozen=True, slots=True)
class Rule:
    """Chooses the form of each tensor."""

    precision: str
    block_size: int  # of blocks that are rounded
    is_half: bool = False  # activations in fp16
    num_weights: int = 1 << 40
    keeps_blocks: bool = False  # what the file has in blocks of whatever size stays as it is
    has_fused_products: bool = True  # FusedMatMul takes a matrix as stored; only the CPU and CUDA have it
    has_small_layers: bool = False  # what would be rounded to 8 bits in layers is rounded to symmetric blocks of 4

    @property
    def storage(self) -> str:
        """The storage type of activations."""
        return "F16" if self.is_half else "F32"

    def form(self, tensor: StoredTensor, name: str = "") -> Form:
        """The form of a tensor; name is that of the matrix in the graph, as in 3.down or head."""
        if self.precision == "int4" and name and self._needs_eight_bits(tensor, name):
            return replace(self, precision="int8").form(tensor)
        if self.precision in _FLOATS:
            return Form(None, storage=_FLOATS[self.precision])
        bits = BITS.get(self.precision)
        if (stored := tensor.block_format) is not None:
            size = JOINED_BLOCK if tensor.storage == "Q6_K" else stored.block_size
            is_kept = bits is None or self.keeps_blocks or (bits, self.block_size) == (stored.bits, size)
            if is_kept and not (bits and self.is_half and stored.has_offsets):
                return Form(stored.bits, size, stored.has_offsets, has_zero_points=stored.has_zero_points)
        if bits is None:
            return Form(None, storage="F16" if self.is_half else tensor.storage)
        # The largest block size up to the one asked for that divides the columns, or else the smallest.
        fitting = (size for size in BLOCK_SIZES if size <= self.block_size and tensor.columns % size == 0)
        size = max(fitting, default=BLOCK_SIZES[0])
        if bits == 4 and not self.is_half and tensor.columns % size == 0:
            return Form(4, size, has_offsets=True, rounding="asymmetric")
        if self.has_small_layers and name[:1].isdigit():
            bits = 4
        return Form(bits, size, rounding="symmetric")

    def _needs_eight_bits(self, tensor: StoredTensor, name: str) -> bool:
        """True if four bits lose too much of a matrix; what is stored in four bits is found again exactly."""
        stored_bits = tensor.block_format.bits if tensor.block_format else None
        if not self.is_half and stored_bits == 4:
            return False
        if self.num_weights < FEW_WEIGHTS:
            has_more = stored_bits == 8 and not self.is_half
            return name == "head" or has_more or any(part in _SENSITIVE for part in name.split("."))
        return self.is_half and name == "head"

    def embedding_form(self, tensor: StoredTensor) -> Form:
        form = self.form(tensor)
        if form.bits == 4 and form.rounding != "none":
            return replace(self, precision="int8").form(tensor)
        return form
