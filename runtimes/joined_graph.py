"""The graph that runs rows of several texts in one pass, made from the graph that runs those of one.

All that is done row by row stays as it is, for the rows of all texts at once. Each attention becomes one for
each text, over the cache of that text alone (Orca's selective batching: Yu et al., OSDI 2022). So a row is
computed from the numbers that it is computed from in a pass of its own, in the order of that pass.

Attention runs over rows that are gathered for it, part by part, so a row may be there twice: a pass that is padded
to even width is so in its attention alone. A text that has no rows in a pass gets one of the others into a cache
that nobody reads; what comes of it is dropped. Part r is one of the texts; its inputs and outputs have .r after
their names.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from edgespec.errors import ManifestError
from edgespec.manifest import Signature
from edgespec.manifest.caches import KVCache
from edgespec.runtimes.device_rows import live_nodes, replace_fields
from edgespec.runtimes.session import HIDDEN_STATES

ATTENDING = "attending_rows"  # int64 [num_attending]: the rows that attention runs over, part by part
SIZES = "part_sizes"  # int64 [num_parts]: how many of these each part has
LAST_SLOT = "seqlens_k"  # int32 [1]: its cached and new tokens, less one
NUM_SLOTS = "total_sequence_length"  # int32 [1]: its cached and new tokens
ORDER = "order"  # int64 [num_tokens]: where each row lies among those that attention runs over
CONVOLVED_ORDER = "convolved_order"  # int64 [num_tokens]: where it lies behind the rows of parts before a pass
LOGIT_ROWS = "logit_rows"  # int64 [num_logits]: the rows that get logits
_ATTENTION = "GroupQueryAttention"
_PAST, _LAST_SLOT, _NUM_SLOTS, _TREE_INPUTS = 3, 5, 6, slice(9, 11)  # inputs of the attention
CONVOLVED = ".convolved"  # the end of the name of what a short convolution gives


def part_name(name: str, part: int) -> str:
    """The name of a part's input or output."""
    return f"{name}.{part}"


def join_graph(graph: Path, signature: Signature, kv_cache: KVCache, num_parts: int) -> bytes:
    """The model of a file as one that runs rows of num_parts texts; its weights stay in their file.

    Raises ManifestError: The graph is none that can be taken apart.
    """
    import onnx  # 0.15 s, and only programs that ask several things at once need it

    model = onnx.load(str(graph), load_external_data=False)
    rows = kv_cache.convolutions.names if kv_cache.convolutions else []
    caches = {name for pair in (*signature.caches(kv_cache.attention_layers), *rows) for name in pair}
    inner = model.graph
    outputs = [
        each
        for value in inner.output
        if value.name in caches or value.name == signature.logits or value.name.startswith(HIDDEN_STATES)
        for each in _parts_of(value, caches, num_parts)
    ]
    constants = {each.name for each in inner.initializer}
    rewritten = _rewritten(inner.node, signature, dict(rows), num_parts, constants)
    nodes = live_nodes(rewritten, {value.name for value in outputs})
    replaced = (signature.attention_mask, signature.num_logits_to_keep)
    kept = (value for value in inner.input if value.name not in replaced)
    inputs = [each for value in kept for each in _parts_of(value, caches, num_parts)]
    inputs += _new_inputs(num_parts, has_rows=bool(rows))
    known = {value.name for value in inputs} | constants | {""}
    known |= {output for node in nodes for output in node.output}
    used = {name for node in nodes for name in node.input}
    needed = {ORDER, LOGIT_ROWS, *([CONVOLVED_ORDER] if rows else [])}
    if strange := sorted(used - known | (needed - used)):
        raise ManifestError(f"{graph} does not run several texts in one pass: see {', '.join(strange[:3])}")
    replace_fields(inner, node=nodes, input=inputs, output=outputs, value_info=[])
    return bytes(model.SerializeToString())


def _rewritten(
    nodes: Iterable[Any], signature: Signature, rows: Mapping[str, str], num_parts: int, constants: set[str]
) -> list[Any]:
    from onnx import helper

    given = list(nodes)
    counted = {output: node.input for node in given if node.op_type == "Sub" for output in node.output}
    written: list[Any] = []
    for node in given:
        if node.op_type == _ATTENTION:
            written += _split_attention(node, num_parts, constants)
        elif node.op_type == "Concat" and node.input[0] in rows:
            written += _split_rows(node, rows[node.input[0]], num_parts)
        elif node.output[0].endswith(CONVOLVED):
            written += _ordered(node, CONVOLVED_ORDER)
        elif node.op_type == "Slice" and signature.num_logits_to_keep in counted.get(node.input[1], ()):
            written.append(helper.make_node("Gather", [node.input[0], LOGIT_ROWS], node.output, axis=1))
        else:
            written.append(node)
    return written


def _split_attention(node: Any, num_parts: int, constants: set[str]) -> Iterator[Any]:
    """An attention for each part, and what they give together in the order of the rows.

    Keys and values that are constants, of no rows, stand where a layer reads those of another.
    """
    from onnx import helper

    if any(node.input[_TREE_INPUTS]):
        raise ManifestError("a graph for trees does not run several texts in one pass")
    attended = node.output[0]
    own_inputs = [list(node.input) for _ in range(num_parts)]
    for at, name in enumerate(node.input[:_PAST]):
        if name and name not in constants:
            gathered = f"{attended}.rows{at}"
            pieces = [part_name(gathered, part) for part in range(num_parts)]
            yield helper.make_node("Gather", [name, ATTENDING], [gathered], axis=1)
            yield helper.make_node("Split", [gathered, SIZES], pieces, axis=1)
            for inputs, piece in zip(own_inputs, pieces, strict=True):
                inputs[at] = piece
    for part, inputs in enumerate(own_inputs):
        inputs[_LAST_SLOT], inputs[_NUM_SLOTS] = part_name(LAST_SLOT, part), part_name(NUM_SLOTS, part)
        for at in (_PAST, _PAST + 1):
            inputs[at] = part_name(node.input[at], part)
        own = type(node)()
        own.CopyFrom(node)
        own.name = part_name(node.name, part)
        own.input[:] = inputs
        own.output[:] = [part_name(name, part) for name in node.output]
        yield own
    parts = [part_name(attended, part) for part in range(num_parts)]
    yield from _ordered(helper.make_node("Concat", parts, [attended], axis=1), ORDER)


def _split_rows(node: Any, present: str, num_parts: int) -> Iterator[Any]:
    """The rows of each part behind those before its pass, all parts one after another.

    A convolution runs over them all: what it gives for rows that reach into another part is left out of the order.
    """
    from onnx import helper

    gathered, pieces = f"{node.input[1]}.attending", [part_name(present, part) for part in range(num_parts)]
    yield helper.make_node("Gather", [node.input[1], ATTENDING], [gathered], axis=1)
    yield helper.make_node("Split", [gathered, SIZES], pieces, axis=1)
    pasts = [part_name(node.input[0], part) for part in range(num_parts)]
    own = [name for pair in zip(pasts, pieces, strict=True) for name in pair]
    yield helper.make_node("Concat", own, node.output, axis=1)


def _ordered(node: Any, order: str) -> Iterator[Any]:
    """A node whose rows are put in an order."""
    from onnx import helper

    wanted = node.output[0]
    node.output[0] = f"{wanted}.all"
    yield node
    yield helper.make_node("Gather", [node.output[0], order], [wanted], axis=1)


def _parts_of(value: Any, caches: set[str], num_parts: int) -> list[Any]:
    """A cache's value for each part, each of a length of its own; another value as it is."""
    if value.name not in caches:
        return [value]
    values = []
    for part in range(num_parts):
        own = type(value)()
        own.CopyFrom(value)
        own.name = part_name(value.name, part)
        for dimension in own.type.tensor_type.shape.dim:
            if dimension.dim_param and dimension.dim_param != "batch":
                dimension.dim_param = part_name(dimension.dim_param, part)
        values.append(own)
    return values


def _new_inputs(num_parts: int, *, has_rows: bool) -> list[Any]:
    from onnx import TensorProto, helper

    make = helper.make_tensor_value_info
    own = [
        make(part_name(name, part), TensorProto.INT32, [1])
        for part in range(num_parts)
        for name in (LAST_SLOT, NUM_SLOTS)
    ]
    return [
        *own,
        make(ATTENDING, TensorProto.INT64, ["num_attending"]),
        make(SIZES, TensorProto.INT64, [num_parts]),
        *(make(name, TensorProto.INT64, ["num_tokens"]) for name in (ORDER, CONVOLVED_ORDER)[: 1 + has_rows]),
        make(LOGIT_ROWS, TensorProto.INT64, ["num_logits"]),
    ]
