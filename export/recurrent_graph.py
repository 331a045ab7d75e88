"""The parts that recurrent layers share as graph nodes: rows, the state behind the certain ones, its reading."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx_ir as ir

from edgespec.export.nodes import typed_value
from edgespec.manifest.caches import NUM_SETTLED

if TYPE_CHECKING:
    from edgespec.export.layers import LayerWriter


_PACKET = 16  # numbers, of AVX-512


class _Spans(NamedTuple):
    """Where the rows of a pass are cut, for all layers.

    lengths: How many rows go into the state, and how many come behind them.
    first_new: The first row of a new token.
    first_read: The same among the rows that are read, which begin with an empty one in the gpu form.
    """

    lengths: ir.Value
    first_new: ir.Value
    first_read: ir.Value


class RecurrenceWriter:
    """Writes recurrences with the parts of a transformer; num_settled is an input of the graph."""

    def __init__(self, write: "LayerWriter") -> None:
        self._write = write
        self.num_settled = typed_value(NUM_SETTLED, ir.DataType.INT64, [1])
        self._spans: _Spans | None = None
        self._has_edges = not write.rule.has_fused_products

    def rows(self, parts: Sequence[ir.Value], past: ir.Value, present: ir.Value) -> ir.Value:
        """The rows of the past and of new tokens, of which present gets those that the next pass needs."""
        rows = self._write.op("Concat", past, self._write.op("Concat", *parts, axis=-1), axis=1)
        self._write.nodes.node("Slice", [rows, self.num_settled, *self._ends()], [present])
        return rows

    def behind(self, x: ir.Value, count: int) -> ir.Value:
        """The rows of x behind the first ones, which the convolution alone reads."""
        return self._write.op("Slice", x, self._write.constant("rows_before", np.array([count])), *self._ends())

    def new(self, x: ir.Value) -> ir.Value:
        """The rows of x of new tokens, after a call of read."""
        assert self._spans is not None
        return self._write.op("Slice", x, self._spans.first_new, *self._ends())

    def read(
        self,
        i: int,
        parts: Sequence[ir.Value],
        past: ir.Value,
        present: ir.Value,
        x: ir.Value,
        **how: Any,
    ) -> ir.Value:
        """The values that new tokens read from the state, which is given as it is behind the settled rows.

        In the gpu form a row of zeros stands before all rows and one behind them, so that both parts have a row:
        without one, WebGPU's kernel ends the process. Zeros leave a state as it is.

        Args:
            parts: Queries, keys, values and what the rule takes beside them, of all rows.
            how: Attributes of LinearAttention.
        """
        write = self._write
        spans = self._find_spans(parts[0], x)
        if self._has_edges:
            pads = write.constant("edges", np.array([0, 1, 0, 0, 1, 0]))
            parts = [write.op("Pad", part, pads) for part in parts]
        cut = [
            write.nodes.node(
                "Split", [part, spans.lengths], [ir.Value(name=f"{i}.{at}.{n}") for n in "ab"], axis=1
            )
            for at, part in enumerate(parts)
        ]
        settled, guessed = zip(*cut, strict=True)
        first = ir.Value(name=f"{i}.settled")
        write.nodes.node("LinearAttention", [*settled[:3], past, *settled[3:]], [first, present], **how)
        outputs = [ir.Value(name=f"{i}.guessed"), ir.Value(name=f"{i}.guessed_state")]
        write.nodes.node("LinearAttention", [*guessed[:3], present, *guessed[3:]], outputs, **how)
        rows, (end, axis) = write.op("Concat", first, outputs[0], axis=1), self._ends()
        end = write.constant("last_edge", np.array([-1])) if self._has_edges else end
        return write.op("Slice", rows, spans.first_read, end, axis)

    def split(self, name: str, x: ir.Value, sizes: Sequence[int]) -> Sequence[ir.Value]:
        outputs = [ir.Value(name=f"{name}.{at}") for at in range(len(sizes))]
        lengths = self._write.constant(f"sizes_{'_'.join(map(str, sizes))}", np.array(sizes))
        return self._write.nodes.node("Split", [x, lengths], outputs, axis=-1)

    def softplus(self, x: ir.Value, width: int) -> ir.Value:
        """log(1 + exp(x)) of rows of a width.

        The kernel computes the last numbers of a whole pass in another way than those in packets before them. So
        rows are lengthened to whole packets, for which all numbers of a row are alike wherever it lies.
        """
        missing = -width % _PACKET
        if not missing:
            return self._write.op("Softplus", x)
        pads = self._write.constant(f"pads_{missing}", np.array([0, 0, 0, 0, 0, missing]))
        longer = self._write.op("Softplus", self._write.op("Pad", x, pads))
        return self.split(f"{longer.name}.cut", longer, [width, missing])[0]

    def of_heads(self, x: ir.Value, size: int) -> ir.Value:
        """x as heads of a size, [1, num_tokens, num_heads, size]."""
        return self._write.op("Reshape", x, self._write.constant(f"heads_of_{size}", np.array([0, 0, -1, size])))

    def of_rows(self, x: ir.Value, width: int) -> ir.Value:
        """Heads, or heads of heads, side by side again."""
        return self._write.op("Reshape", x, self._write.constant(f"rows_of_{width}", np.array([1, -1, width])))

    def repeated(self, x: ir.Value, times: int) -> ir.Value:
        """Each head of x so many times in a row, as heads of heads."""
        apart = self._write.op("Unsqueeze", x, self._write.constant("axis_3", np.array([3])))
        return self._write.op(
            "Expand", apart, self._write.constant(f"{times}_times", np.array([1, 1, 1, times, 1]))
        )

    def _find_spans(self, rows: ir.Value, x: ir.Value) -> _Spans:
        if self._spans is None:
            op = self._write.op
            total, new = (op("Shape", y, start=1, end=2) for y in (rows, x))
            first_new, first_read = (op("Sub", total, new),) * 2
            lengths = op("Concat", self.num_settled, op("Sub", total, self.num_settled), axis=0)
            if self._has_edges:
                one = self._write.constant("one", np.array([1]))
                lengths, first_read = op("Add", lengths, one), op("Add", first_new, one)
            self._spans = _Spans(lengths, first_new, first_read)
        return self._spans

    def _ends(self) -> tuple[ir.Value, ir.Value]:
        end = self._write.constant("end", np.array([np.iinfo(np.int64).max]))
        return end, self._write.constant("axis_1", np.array([1]))
