"""How a static graph holds the values that go from operator to operator: in floats, or in integer levels.

A value that an operator only moves keeps its levels. The cache is held in levels too: an NPU reads half the bytes
of floats and converts nothing, and a position that is read again has identical bits. All three build a graph in
one order, so that each value has one name.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgespec.export.blocks import Floats
from edgespec.export.nodes import Nodes
from edgespec.types import Array, Range

_HIGHEST = 65535
_LEAST_SPAN = 1e-4  # for a value that never changes
# Hidden positions come this far below the lowest score: e⁻²⁰ of any other, which 16 bits round to nothing.
_HIDDEN_BELOW = 20.0


@dataclass(frozen=True, slots=True)
class Encoding:
    """Unsigned 16-bit levels: value = scale · (level − zero_point), where zero is exact."""

    scale: float
    zero_point: int

    @classmethod
    def of(cls, values: Range) -> "Encoding":
        """The finest encoding that holds all of a range, and zero."""
        low, high = min(values.low, 0.0), max(values.high, 0.0)
        scale = np.float32(max(high - low, _LEAST_SPAN) / _HIGHEST)
        return cls(float(scale), int(np.rint(-low / scale)))

    @property
    def range(self) -> Range:
        return Range(-self.zero_point * self.scale, (_HIGHEST - self.zero_point) * self.scale)

    def levels(self, values: Array) -> npt.NDArray[np.uint16]:
        """The nearest level of each value; values outside of the range are clipped."""
        found = np.rint(values / np.float32(self.scale)) + self.zero_point
        levels: npt.NDArray[np.uint16] = np.clip(found, 0, _HIGHEST).astype(np.uint16)
        return levels


def range_of(parts: Iterable[Array]) -> Range:
    """The smallest and the largest value of all parts."""
    ends = [(float(part.min()), float(part.max())) for part in parts]
    return Range(min(low for low, _ in ends), max(high for _, high in ends))


def row_levels(weights: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    """Signed 8-bit levels, [rows, columns], and a scale for each row, [rows].

    The largest magnitude of a row takes level 127 or −127.
    """
    scales = (np.abs(weights).max(axis=1) / 127).astype(np.float32)
    scales = np.where(scales > 0, scales, np.float32(1))
    return np.rint(weights / scales[:, None]).astype(np.int8), scales


# Outputs of operators with a fixed range, in the steps that QNN wants.
_FROM_0_TO_1 = Encoding(1 / 65536, 0)
_KNOWN = {"Sigmoid": _FROM_0_TO_1, "Softmax": _FROM_0_TO_1, "Tanh": Encoding(1 / 32768, 32768)}


class Activations:
    """Values in floats; subclasses override how a value is encoded."""

    def __init__(self, nodes: Nodes, cache_type: ir.DataType) -> None:
        self._nodes = nodes
        self.cache_type = cache_type
        self.outputs: list[ir.Value] = []  # more outputs of the graph

    def encode(self, value: ir.Value) -> ir.Value:
        """Encode an output that an operator computed."""
        return value

    def reencode(self, value: ir.Value, source: ir.Value) -> ir.Value:
        """Encode values of source in another place or shape."""
        return value

    def encode_as(self, value: ir.Value, encoding: Encoding) -> ir.Value:
        """Encode floats in a known range, such as an input of the graph."""
        return value

    def decode(self, levels: ir.Value, encoding: Encoding) -> ir.Value:
        return self._nodes.op("DequantizeLinear", levels, *_parameters(self._nodes, encoding))

    def encode_masked(self, value: ir.Value, scores: ir.Value) -> ir.Value:
        """Encode the sum of scores and a mask."""
        return value

    def to_cache(self, value: ir.Value) -> ir.Value:
        """The output of the graph that a later pass reads as past."""
        return self._nodes.op("Identity", value)

    def from_cache(self, cached: ir.Value, new: ir.Value) -> ir.Value:
        """An input of the graph that holds earlier values of new."""
        return cached


class ObservedActivations(Activations):
    """Values in floats; outputs are the least and the largest of each, as NAME.low and NAME.high."""

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(nodes, ir.DataType.FLOAT)

    def encode(self, value: ir.Value) -> ir.Value:
        name = _name(value, len(self.outputs) // 2)
        for kind, end in (("ReduceMin", "low"), ("ReduceMax", "high")):
            found = ir.val(f"{name}.{end}", ir.DataType.FLOAT, [])
            self.outputs += self._nodes.node(kind, [value], [found], keepdims=0)
        return value


class LevelActivations(Activations):
    """Values in unsigned 16-bit levels, by ranges that were observed.

    Compilers for NPUs read the type of an output from a QuantizeLinear and a DequantizeLinear after its operator.
    """

    def __init__(self, nodes: Nodes, ranges: Mapping[str, Range]) -> None:
        super().__init__(nodes, ir.DataType.UINT16)
        self._ranges = ranges
        self._encodings: dict[ir.Value, Encoding] = {}
        self._numbers = count()

    def encode(self, value: ir.Value) -> ir.Value:
        name = _name(value, next(self._numbers))
        return self.encode_as(value, _KNOWN.get(_kind(value)) or Encoding.of(self._ranges[name]))

    def reencode(self, value: ir.Value, source: ir.Value) -> ir.Value:
        return self.encode_as(value, self._encodings[source])

    def encode_as(self, value: ir.Value, encoding: Encoding) -> ir.Value:
        levels = self._nodes.op("QuantizeLinear", value, *_parameters(self._nodes, encoding))
        return self.decode(levels, encoding)

    def decode(self, levels: ir.Value, encoding: Encoding) -> ir.Value:
        value = super().decode(levels, encoding)
        self._encodings[value] = encoding
        return value

    def encode_masked(self, value: ir.Value, scores: ir.Value) -> ir.Value:
        low, high = self._encodings[scores].range
        return self.encode_as(value, Encoding.of(Range(low - _HIDDEN_BELOW, high)))

    def to_cache(self, value: ir.Value) -> ir.Value:
        reading = value.producer()
        assert reading is not None
        levels = reading.inputs[0]
        assert levels is not None
        return levels

    def from_cache(self, cached: ir.Value, new: ir.Value) -> ir.Value:
        return self.decode(cached, self._encodings[new])


def _kind(value: ir.Value) -> str:
    node = value.producer()
    assert node is not None
    return node.op_type


def _name(value: ir.Value, number: int) -> str:
    """A name that does not depend on the encoding, which changes the numbers of nodes."""
    return f"{_kind(value)}.{number}"


def _parameters(nodes: Nodes, encoding: Encoding) -> tuple[ir.Value, ir.Value]:
    scale, zero_point = np.float32(encoding.scale), np.uint16(encoding.zero_point)
    return (
        nodes.constant(f"scale_{scale!s}", np.array(scale)),
        nodes.constant(f"zero_point_{zero_point}", np.array(zero_point)),
    )
