"""Engines without weights whose every part can be chosen, and real graphs with a fault built in."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tiny

from edgespec import Engine
from edgespec.decoding.acceptance import Acceptance
from edgespec.decoding.decoder import Decoder
from edgespec.draft.drafter_sets import Candidate, OpenModel, drafter_sets
from edgespec.draft.lane_drafter import LaneDrafter
from edgespec.draft.lanes import ThreadLane
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.draft.pool import ChangeLog, DrafterPool
from edgespec.draft.speculation import Speculation
from edgespec.engine.generation import LoadedModel, OpenDrafters
from edgespec.engine.target_caches import TargetCaches
from edgespec.manifest import Manifest, read_manifest, write_manifest
from edgespec.memory.free_memory import HOST, FreeMemory
from edgespec.system.file_hashes import file_record
from edgespec.text.prompt_encoder import PromptEncoder
from edgespec.text.tokenizer import Tokenizer

SCHEDULES = ["serial", "pipelined", "hedged"]


def plain_engine(manifest: Manifest, tokenizer: Tokenizer, target: Decoder) -> Engine:
    """Without a template, so that a prompt is its own text."""
    return Engine(LoadedModel(manifest=manifest, encoder=PromptEncoder(manifest, tokenizer)), TargetCaches(target))


def drafted_engine(
    manifest: Manifest,
    tokenizer: Tokenizer,
    target: Decoder,
    drafter: Decoder,
    *,
    length: int | None = 3,
    schedule: str = "serial",
    accept: Acceptance | None = None,
    report: Callable[[str], None] = lambda line: None,
    deadline_s: float = 120.0,
) -> Engine:
    """An engine with a model that drafts in a lane of its own."""
    lane = ThreadLane("drafter")
    model = ModelDrafter(drafter, tiny.VOCAB, "near")
    source = LaneDrafter(
        model, lane, schedule != "serial", 7 if schedule == "hedged" else 0, deadline_s=deadline_s
    )
    candidate = Candidate("near", {HOST: 1}, lambda cancel, report: OpenModel(source, drafter, lane))
    pool = DrafterPool(
        drafter_sets([[candidate]], frozenset(), frozenset(), len), tiny.VOCAB, changes=ChangeLog(report)
    )
    pool.start({HOST: FreeMemory(1 << 40, "a test")}, {})
    speculation = Speculation(pool.drafters, draft_length=length)
    if accept:
        speculation = replace(speculation, accept=accept)
    return Engine(
        LoadedModel(manifest=manifest, encoder=PromptEncoder(manifest, tokenizer)),
        TargetCaches(target),
        OpenDrafters(speculation=speculation, pool=pool),
    )


def lanes_alive() -> list[str]:
    """Threads of edgespec's that work."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("edgespec")]


def edit_graph(folder: Path, change: Callable[[onnx.ModelProto], object], name: str = "model.onnx") -> Path:
    """Change a folder's graph, and let its manifest vouch for what it is then."""
    path = folder / name
    model = onnx.load(path, load_external_data=False)
    change(model)
    path.write_bytes(model.SerializeToString())
    manifest = read_unchecked(folder)
    manifest.files[name] = file_record(path)
    write_manifest(folder, manifest)
    return folder


def read_unchecked(folder: Path) -> Manifest:
    """The manifest of a folder whose graph was just changed."""
    import json

    path = folder / "edgespec.json"
    stated = json.loads(path.read_text())
    for file, record in stated["files"].items():
        if (folder / file).is_file():
            record["bytes"] = (folder / file).stat().st_size
    path.write_text(json.dumps(stated))
    return read_manifest(folder)


def poisoned(kind: str, token: int) -> Callable[[onnx.ModelProto], None]:
    """Logits become inf or nan in each pass that reads a token, by a division by zero within the graph."""

    def change(model: onnx.ModelProto) -> None:
        graph = model.graph
        maker = next(node for node in graph.node if "logits" in node.output)
        maker.output[list(maker.output).index("logits")] = "sound"
        constants: dict[str, np.ndarray] = {
            "bad_token": np.array([token], np.int64),
            "unit": np.array(1, np.float32),
            "factor": np.array(0 if kind == "nan" else 1, np.float32),
        }
        graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in constants.items())
        nodes: list[tuple[str, Sequence[str], str, dict[str, Any]]] = [
            ("Equal", ["input_ids", "bad_token"], "hits", {}),
            ("Cast", ["hits"], "hits_as_number", {"to": onnx.TensorProto.FLOAT}),
            ("ReduceMax", ["hits_as_number"], "hit", {"keepdims": 0}),
            ("Sub", ["unit", "hit"], "divisor", {}),
            ("Div", ["hit", "divisor"], "infinite", {}),  # 0 or 1 / 0
            ("Mul", ["infinite", "factor"], "poison", {}),
            ("Add", ["sound", "poison"], "logits", {}),
        ]
        for kind_of_node, inputs, output, settings in nodes:
            graph.node.append(onnx.helper.make_node(kind_of_node, inputs, [output], name=output, **settings))

    return change
