"""How a static graph holds what goes from operator to operator.

    Plain     as operators give it
    Observed  likewise, and the graph tells the least and the largest of each value
    Levels    in unsigned 16-bit levels, by ranges that were observed: a QuantizeLinear and a DequantizeLinear
              behind an operator are what compilers for NPUs read as the type of its output

A value that an operator only moves keeps its levels. The cache is held like the rest: an NPU reads half the bytes
of floats and converts nothing, and a position that is read again is the same to the bit. A graph is built in one
order however its values are held, so each has one name in all three.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import onnx_ir as ir

from edgespec.export.levels import Encoding
from edgespec.export.nodes import Nodes
from edgespec.types import Range

# Hidden positions come this far below the lowest score: e⁻²⁰ of any other, which 16 bits round to nothing.
_HIDDEN_BELOW = 20.0
# Outputs of operators with a range of their own, in the steps that QNN wants.
_KNOWN = {
    "Sigmoid": Encoding(1 / 65536, 0),
    "Softmax": Encoding(1 / 65536, 0),
    "Tanh": Encoding(1 / 32768, 32768),
}


class Activations(Protocol):
    """What becomes of the values of a graph in the making."""

    @property
    def cache_type(self) -> ir.DataType: ...

    def held(self, value: ir.Value) -> ir.Value:
        """What an operator computed."""

    def moved(self, value: ir.Value, source: ir.Value) -> ir.Value:
        """Values of source in another place or shape."""

    def given(self, value: ir.Value, encoding: Encoding) -> ir.Value:
        """An input of the graph in floats."""

    def stored(self, levels: ir.Value, encoding: Encoding) -> ir.Value:
        """A constant in levels."""

    def masked(self, value: ir.Value, scores: ir.Value) -> ir.Value:
        """Scores and a mask, added up."""

    def present(self, value: ir.Value) -> ir.Value:
        """An output of the graph that is to be past in a later pass."""

    def past(self, cached: ir.Value, new: ir.Value) -> ir.Value:
        """An input of the graph that holds earlier values of new."""


class Plain:
    """As operators give it."""

    def __init__(self, nodes: Nodes, dtype: ir.DataType) -> None:
        self._nodes = nodes
        self.cache_type = dtype

    def held(self, value: ir.Value) -> ir.Value:
        return value

    def moved(self, value: ir.Value, source: ir.Value) -> ir.Value:
        return value

    def given(self, value: ir.Value, encoding: Encoding) -> ir.Value:
        return value

    def stored(self, levels: ir.Value, encoding: Encoding) -> ir.Value:
        return self._nodes.op("DequantizeLinear", levels, *_parameters(self._nodes, encoding))

    def masked(self, value: ir.Value, scores: ir.Value) -> ir.Value:
        return value

    def present(self, value: ir.Value) -> ir.Value:
        return self._nodes.op("Identity", value)

    def past(self, cached: ir.Value, new: ir.Value) -> ir.Value:
        return cached


class Observed(Plain):
    """As operators give it; outputs are the least and the largest of each value, as NAME.low and NAME.high."""

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(nodes, ir.DataType.FLOAT)
        self.outputs: list[ir.Value] = []

    def held(self, value: ir.Value) -> ir.Value:
        name = _name(value, len(self.outputs) // 2)
        for kind, end in (("ReduceMin", "low"), ("ReduceMax", "high")):
            found = ir.Value(name=f"{name}.{end}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([]))
            self.outputs += self._nodes.node(kind, [value], [found], keepdims=0)
        return value


class Levels:
    """In 16 bits."""

    cache_type = ir.DataType.UINT16

    def __init__(self, nodes: Nodes, ranges: Mapping[str, Range]) -> None:
        self._nodes = nodes
        self._ranges = ranges
        self._encodings: dict[ir.Value, Encoding] = {}
        self._num_held = 0

    def held(self, value: ir.Value) -> ir.Value:
        name = _name(value, self._num_held)
        self._num_held += 1
        return self.given(value, _KNOWN.get(_kind(value)) or Encoding.of(self._ranges[name]))

    def moved(self, value: ir.Value, source: ir.Value) -> ir.Value:
        return self.given(value, self._encodings[source])

    def given(self, value: ir.Value, encoding: Encoding) -> ir.Value:
        levels = self._nodes.op("QuantizeLinear", value, *_parameters(self._nodes, encoding))
        return self.stored(levels, encoding)

    def stored(self, levels: ir.Value, encoding: Encoding) -> ir.Value:
        value = self._nodes.op("DequantizeLinear", levels, *_parameters(self._nodes, encoding))
        self._encodings[value] = encoding
        return value

    def masked(self, value: ir.Value, scores: ir.Value) -> ir.Value:
        low, high = self._encodings[scores].range
        return self.given(value, Encoding.of(Range(low - _HIDDEN_BELOW, high)))

    def present(self, value: ir.Value) -> ir.Value:
        reading = value.producer()
        assert reading is not None
        levels = reading.inputs[0]
        assert levels is not None
        return levels

    def past(self, cached: ir.Value, new: ir.Value) -> ir.Value:
        return self.stored(cached, self._encodings[new])


def _kind(value: ir.Value) -> str:
    node = value.producer()
    assert node is not None
    return node.op_type


def _name(value: ir.Value, number: int) -> str:
    """The same however values are held, which changes the numbers of nodes."""
    return f"{_kind(value)}.{number}"


def _parameters(nodes: Nodes, encoding: Encoding) -> tuple[ir.Value, ir.Value]:
    scale, zero_point = np.float32(encoding.scale), np.uint16(encoding.zero_point)
    return (
        nodes.constant(f"scale_{scale!s}", np.array(scale)),
        nodes.constant(f"zero_point_{zero_point}", np.array(zero_point)),
    )
