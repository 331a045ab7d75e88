"""The end of a graph as a device runs it fast: which rows come out, and the likeliest token of each.

Exported graphs give the last rows of a pass, and find the likeliest token by ReduceMax, Equal, Where and
ReduceMin. WebGPU runs these fast. NVIDIA's provider takes 15 ms for them as soon as there are two rows of 151,936
logits, and 0.03 ms for ArgMax. Passes are padded on both, and rows of the padding are not worth a copy
(docs/log/devices.md). So the end is replaced as the graph is opened, whatever version of edgespec wrote it.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.decoding.decoder import Argmax
from edgespec.manifest import Signature
from edgespec.types import Logits

FIRST_ROW, END_ROW = "first_row", "end_row"  # int64 [1]: inputs that say which of the rows come out
_WIDTHS = (1, 2, 5, 8)  # rows of the logits that are tried


def with_chosen_rows(graph: Path, signature: Signature, *, by_argmax: bool) -> bytes | None:
    """The model of a file as one that gives rows FIRST_ROW to END_ROW of those that its head computes.

    None where the file is not laid out as an export is. Its weights stay in their file.

    by_argmax: Find the likeliest token by ArgMax.
    """
    import onnx  # 0.15 s, and only folders for a GPU need it
    from onnx import TensorProto, helper

    model = onnx.load(str(graph), load_external_data=False)
    nodes = list(model.graph.node)
    maker = next((node for node in nodes if signature.logits in node.output), None)
    last = next((node for node in nodes if signature.best and signature.best in node.output), None)
    if maker is None or (last is None) != (signature.best is None):
        return None
    whole = f"{signature.logits}.all"
    maker.output[list(maker.output).index(signature.logits)] = whole
    given = [whole, FIRST_ROW, END_ROW, "rows.axis"]
    nodes.insert(nodes.index(maker) + 1, helper.make_node("Slice", given, [signature.logits], name="rows.Slice"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "rows.axis"))
    for name in (FIRST_ROW, END_ROW):
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, [1]))
    if last and by_argmax:
        sums = {each for node in nodes if node.op_type == "ReduceSum" for each in node.output}
        if last.op_type != "Concat" or len(last.input) != 2 or last.input[1] not in sums:
            return None
        last.input[0] = "best.as_float"
        nodes.remove(last)
        nodes += [
            helper.make_node("ArgMax", [signature.logits], ["best.id"], name="best.ArgMax", axis=2, keepdims=1),
            helper.make_node("Cast", ["best.id"], ["best.as_float"], name="best.Cast", to=TensorProto.FLOAT),
            last,
        ]
    kept = live_nodes(nodes, [value.name for value in model.graph.output])
    needed = {name for node in kept for name in node.input}
    weights = [each for each in model.graph.initializer if each.name in needed]
    replace_fields(model.graph, node=kept, initializer=weights, value_info=[])
    return bytes(model.SerializeToString())


def choice_graph(content: bytes, signature: Signature) -> bytes:
    """The nodes alone that make the best tokens out of logits, as a model from the one to the other."""
    import onnx
    from onnx.utils import Extractor

    assert signature.best
    choice = Extractor(onnx.load_from_string(content)).extract_model([signature.logits], [signature.best])
    return bytes(choice.SerializeToString())


def to_argmax(best: Logits, vocab_size: int) -> Argmax:
    """The choice that the output states, [num_rows, 2]: ids, and sums of logits, which are finite if all are."""
    ids, sums = best.T
    is_sound = np.isfinite(sums) & (ids >= 0) & (ids < vocab_size)
    return Argmax(np.where(is_sound, ids, 0).astype(np.int64), is_sound)


def rows_with_ties(vocab_size: int) -> Iterator[Logits]:
    """Rows in which several tokens are the likeliest, at their ends, next to each other, and far apart."""
    rng = np.random.default_rng(0)
    for num_rows in _WIDTHS:
        rows = rng.normal(0, 2, (num_rows, vocab_size)).astype(np.float32)
        for row, places in zip(rows, ((0, -1), (-2, -1), (0, 1), (-1, vocab_size // 2)), strict=False):
            row[list(places)] = row.max() + 1
        for row in rows[4:]:
            row[rng.integers(0, vocab_size, 3)] = row.max() + 1
        yield rows


def live_nodes(nodes: Sequence[Any], outputs: Iterable[str]) -> list[Any]:
    """Nodes that outputs depend on."""
    needed, live = set(outputs), []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            live.append(node)
            needed.update(node.input)
    return live[::-1]


def replace_fields(graph: Any, **fields: Sequence[Any]) -> None:
    """Replace lists of a graph, by their names."""
    for field, values in fields.items():
        graph.ClearField(field)
        getattr(graph, field).extend(values)
