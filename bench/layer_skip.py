"""Which layers of a model may be left out for drafting, found by search, and what such a drafter would gain.

    python bench/layer_skip.py MODEL ANSWERS [--longest N] [--candidates N] [--most-skipped SHARE]
                               [--costs qwen|smollm2|gpu|a100]

ANSWERS is what `bench/replay.py record` wrote of MODEL, a model folder. Attention and MLP of a layer are left out
apart, as SWIFT does (Xia et al., arXiv:2410.06916), here by a gate before each sum with the residual, so that one
session runs every choice. The search takes away one part after another: of the --candidates parts that mattered
least so far, the one without which most of the likeliest tokens of the first half of the answers stay the same.
Printed are, for each number of parts left out, this agreement on the other half, the share of the weights that is
read for a drafted token, and the best speed of chains of drafts over plain decoding, with passes by --costs.

Agreement is counted behind the target's own text. Behind its own errors a drafter agrees less, so the speed is an
upper bound, as it also leaves out all that is not reading weights.
"""

import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from command_line import command_line
from onnx import helper
from replay import COSTS, Answer, read_answers

from edgespec.draft.option import best_length, expected_tokens
from edgespec.manifest import Manifest, read_manifest
from edgespec.types import append

GATES = "gates"
LONGEST_DRAFT = 12
Gates = npt.NDArray[np.float32]  # [num_parts], 1 where the part is in


class Parts(NamedTuple):
    """Attention and MLP of each layer, in order, and how many bytes of weights each has; head is what is left."""

    names: list[str]
    num_bytes: list[int]
    head_bytes: int

    def share(self, gates: Gates) -> float:
        """The share of the weights that a pass reads."""
        total = sum(self.num_bytes) + self.head_bytes
        return float(np.dot(gates, self.num_bytes) + self.head_bytes) / total


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    manifest = read_manifest(options.model)
    answers = [each for each in read_answers(options.answers, None) if _length(each) <= options.longest]
    searched, held_out = answers[::2], answers[1::2]
    print(f"{len(searched)} answers to search with, {len(held_out)} held out; {manifest.name}")
    with TemporaryDirectory() as scratch:
        gated, parts = gate_parts(options.model, manifest, Path(scratch))
        print("parts left out, the last          agreement    held out  read  speed (draft)", flush=True)
        most = int(options.most_skipped * len(parts.names))
        for gates, part, agreement in search(gated, searched, len(parts.names), most, options.candidates):
            found = gated.agreement(held_out, gates)
            speed, length = expected_speed(found, parts.share(gates), COSTS[options.costs])
            print(
                f"{int(len(gates) - gates.sum()):3d} {parts.names[part]:30} {agreement:8.3f} {found:11.3f} "
                f"{parts.share(gates):6.2f} {speed:6.2f} ({length})",
                flush=True,
            )
    return 0


class GatedModel:
    """A graph whose attentions and MLPs can be left out of a run."""

    def __init__(self, graph: Path, manifest: Manifest) -> None:
        self._session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
        cache = manifest.kv_cache
        empty = np.zeros((1, cache.num_kv_heads, 0, cache.head_dim), np.float32)
        self._past = {past: empty for past, _ in manifest.signature.caches(cache.attention_layers)}

    def likeliest(self, answer: Answer, gates: Gates) -> npt.NDArray[np.intp]:
        """The likeliest token for each place of an answer, [num_tokens]."""
        text = append(answer.prompt, answer.tokens)[:-1].astype(np.int64)[None]
        inputs = {
            "input_ids": text,
            "attention_mask": np.ones_like(text),
            "num_logits_to_keep": np.array([len(answer.tokens)], np.int64),
            GATES: gates,
            **self._past,
        }
        (logits,) = self._session.run(["logits"], inputs)
        chosen: npt.NDArray[np.intp] = logits[0].argmax(-1)
        return chosen

    def agreement(self, answers: Sequence[Answer], gates: Gates) -> float:
        """The share of the tokens of answers that are the likeliest ones without the parts left out."""
        return float(np.mean(np.concatenate([self.likeliest(each, gates) == each.tokens for each in answers])))


def search(
    model: GatedModel, answers: Sequence[Answer], num_parts: int, most: int, num_candidates: int
) -> Iterator[tuple[Gates, int, float]]:
    """Leave out one part after another. Yields the gates, the part that was left out last, and the agreement."""
    gates = np.ones(num_parts, np.float32)
    without = {part: model.agreement(answers, _closed(gates, part)) for part in range(num_parts)}
    for _ in range(most):
        ranked = sorted(without, key=without.__getitem__, reverse=True)[:num_candidates]
        without.update({part: model.agreement(answers, _closed(gates, part)) for part in ranked})
        best = max(ranked, key=without.__getitem__)
        gates = _closed(gates, best)
        yield gates, best, without.pop(best)


def expected_speed(agreement: float, share: float, costs: dict[int, float]) -> tuple[float, int]:
    """The best speed of a chain of drafts over plain decoding, and its length; 0 where none pays."""
    widths = sorted(costs)
    totals = expected_tokens([agreement] * LONGEST_DRAFT)

    def cost(length: int) -> float:
        return float(np.interp(length + 1, widths, [costs[width] for width in widths])) + length * share

    return best_length(totals, cost)


def gate_parts(folder: Path, manifest: Manifest, scratch: Path) -> tuple[GatedModel, Parts]:
    """Write the graph of a model folder with a gate for each part, and open it."""
    model = onnx.load(folder / manifest.graph, load_external_data=False)
    graph, nodes = model.graph, list[onnx.NodeProto]()
    sizes = {each.name: _stored_bytes(each) for each in graph.initializer}
    bytes_since = 0
    names: list[str] = []
    num_bytes: list[int] = []
    for node in graph.node:
        bytes_since += sum(sizes.pop(name, 0) for name in node.input)
        if node.op_type == "SkipSimplifiedLayerNormalization":
            number = len(names)
            graph.initializer.append(helper.make_tensor(f"part_{number}", onnx.TensorProto.INT64, [1], [number]))
            nodes.append(helper.make_node("Gather", [GATES, f"part_{number}"], [f"gate_{number}"]))
            nodes.append(helper.make_node("Mul", [node.input[0], f"gate_{number}"], [f"gated_{number}"]))
            node.input[0] = f"gated_{number}"
            names.append(f"{'mlp' if number % 2 else 'attention'} of layer {number // 2}")
            num_bytes.append(bytes_since)
            bytes_since = 0
        nodes.append(node)
    if len(names) != 2 * manifest.kv_cache.num_layers:
        raise SystemExit(f"{folder}: found {len(names)} sums with the residual, wanted two a layer")
    del graph.node[:]
    graph.node.extend(nodes)
    graph.input.append(helper.make_tensor_value_info(GATES, onnx.TensorProto.FLOAT, [len(names)]))
    _link(folder / manifest.weights, scratch / manifest.weights)
    onnx.save(model, scratch / "gated.onnx")
    return GatedModel(scratch / "gated.onnx", manifest), Parts(names, num_bytes, _head_bytes(model))


def _head_bytes(model: onnx.ModelProto) -> int:
    """Bytes of the weights of the last product."""
    last = [node for node in model.graph.node if node.op_type in ("MatMul", "MatMulNBits")][-1]
    return sum(_stored_bytes(each) for each in model.graph.initializer if each.name in last.input)


def _stored_bytes(tensor: onnx.TensorProto) -> int:
    return sum(int(entry.value) for entry in tensor.external_data if entry.key == "length")


def _closed(gates: Gates, part: int) -> Gates:
    return np.where(np.arange(len(gates)) == part, np.float32(0), gates)


def _length(answer: Answer) -> int:
    return len(answer.prompt) + len(answer.tokens)


def _link(source: Path, copy: Path) -> None:
    try:
        os.link(source, copy)
    except OSError:  # another file system
        shutil.copyfile(source, copy)


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--longest", type=int, default=300, metavar="N", help="of prompt and answer, in tokens")
    parser.add_argument("--candidates", type=int, default=10, metavar="N", help="parts that are tried each time")
    parser.add_argument("--most-skipped", type=float, default=0.5, metavar="SHARE", help="of all parts")
    parser.add_argument("--costs", choices=COSTS, default="qwen", help="of passes by width")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
