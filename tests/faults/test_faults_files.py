"""Model folders that were made to harm, with manifests that vouch for them: refused before anything runs."""

import gc
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import growing
import numpy as np
import onnx
import psutil
import pytest
import tiny
from faulty import edit_graph, lanes_alive

from edgespec import EdgeSpecError, IntegrityError, ManifestError, SamplingParams, load
from edgespec.export.convert import export_model
from edgespec.manifest import FILE_NAME, Signature, read_manifest
from edgespec.setup.pair import FILE_NAME as PAIR_FILE
from edgespec.setup.pair import read_pair
from edgespec.system.file_hashes import file_record
from edgespec.system.typed_json import read_json

pytestmark = pytest.mark.slow  # a module of many models or processes


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    (tmp_path / "secret").write_bytes((tiny_model / "model.onnx.data").read_bytes())
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def refusal(folder: Path) -> EdgeSpecError:
    """What loading ends with; it leaves no thread, no process and no file behind."""
    process = psutil.Process()
    children, files = set(process.children()), {path.name for path in folder.iterdir()}
    with pytest.raises(EdgeSpecError) as raised:
        load(folder, drafter="none")
    error = raised.value.with_traceback(None)
    del raised
    gc.collect()
    assert set(process.children()) <= children
    assert {path.name for path in folder.iterdir()} == files
    assert lanes_alive() == []
    return error


# F8, F12


@pytest.mark.parametrize("padded", ["target", "drafter"])
def test_padded_vocabularies_are_one(tmp_path: Path, padded: str) -> None:
    """Rows that stand for no token, as models of one family have in different numbers."""
    weights = tiny.random_weights()
    rows = weights["model.embed_tokens.weight"]
    # Of a drafter they are as likely as real ones, and yet not drafted; of a target nobody trained them.
    padding = rows[:19] if padded == "drafter" else np.zeros_like(rows[:19])
    more = {**weights, "model.embed_tokens.weight": np.concatenate([rows, padding])}
    for name, values in (("few", weights), ("many", more)):
        tiny.write_huggingface(tmp_path / f"{name}-source", values)
        export_model(tmp_path / f"{name}-source", tmp_path / name, precision="fp32")
    target, drafter = ("many", "few") if padded == "target" else ("few", "many")
    with load(tmp_path / target, drafter="none", deterministic=True) as engine:
        plain = engine.generate("the in", sampling=SamplingParams(), max_tokens=40).token_ids
    assert max(plain) < tiny.VOCAB
    with load(tmp_path / target, drafter=str(tmp_path / drafter), draft_length=3, deterministic=True) as engine:
        answer = engine.generate("the in", max_tokens=40)
    assert answer.token_ids == plain
    assert answer.stats.num_accepted > 0
    assert answer.stats.downgrades == ()


def slid(window: int) -> Callable[[onnx.ModelProto], None]:
    """Forget all but the last positions, as a rotating cache does."""

    def change(model: onnx.ModelProto) -> None:
        graph = model.graph
        bounds = {"from": [-window], "to": [1 << 40], "axis": [2]}
        graph.initializer.extend(onnx.numpy_helper.from_array(np.array(at), name) for name, at in bounds.items())
        for output in graph.output:
            if output.name.startswith("present."):
                maker = next(node for node in graph.node if output.name in node.output)
                maker.output[list(maker.output).index(output.name)] = f"{output.name}.whole"
                for node in graph.node:
                    node.input[:] = [f"{name}.whole" if name == output.name else name for name in node.input]
                inputs = [f"{output.name}.whole", *bounds]
                graph.node.append(onnx.helper.make_node("Slice", inputs, [output.name]))

    return change


def write_foreign(folder: Path) -> Path:
    """A folder of ONNX Runtime GenAI's builder around a cache that grows."""
    names = Signature(num_logits_to_keep=None)
    shutil.copytree(Path(__file__).parents[1] / "support" / "data" / "genai", folder)
    for file in folder.glob("model.onnx*"):
        file.unlink()
    growing.write_graph(folder / "model.onnx", names, 600, external="model.onnx.data")
    path = folder / "genai_config.json"
    stated = json.loads(path.read_text())
    stated["model"]["decoder"] |= {"num_key_value_heads": growing.HEADS, "head_size": growing.HEAD_DIM}
    inputs = ("input_ids", "attention_mask")
    stated["model"]["decoder"]["inputs"] = {
        name: getattr(names, name) for name in inputs if getattr(names, name)
    } | {
        "past_key_names": names.past_key,
        "past_value_names": names.past_value,
    }
    stated["search"]["past_present_share_buffer"] = False
    path.write_text(json.dumps(stated))
    return folder


def edit_foreign(folder: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    path = folder / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    change(model)
    path.write_bytes(model.SerializeToString())
    return folder


@pytest.mark.parametrize("window", [1, 4])
def test_cache_that_forgets_is_refused_when_it_is_loaded(tmp_path: Path, window: int) -> None:
    folder = write_foreign(tmp_path / "foreign")
    load(folder, drafter="none").close()
    error = refusal(edit_foreign(folder, slid(window)))
    assert isinstance(error, ManifestError)
    assert "cache" in str(error)


def test_cache_that_forgets_late_is_an_error_and_no_garbage(tmp_path: Path) -> None:
    """Loading reads six tokens; a window beyond them is met by the first pass that it does not hold."""
    folder = write_foreign(tmp_path / "foreign")
    with load(folder, drafter="none", deterministic=False) as whole:
        short = len(whole.encode("the")) + 4
        wanted = whole.generate("the", max_tokens=4).token_ids
    edit_foreign(folder, slid(short))
    with load(folder, drafter="none", deterministic=False) as engine:
        for _ in range(2):
            with pytest.raises(EdgeSpecError, match="ONNX Runtime failed running a pass"):
                engine.generate("the", max_tokens=30)
            assert engine.generate("the", max_tokens=4).token_ids == wanted


def with_state(model: onnx.ModelProto) -> None:
    """What a recurrent layer carries from pass to pass."""
    model.graph.input.append(onnx.helper.make_tensor_value_info("past_state.0", onnx.TensorProto.FLOAT, [1, 8]))
    model.graph.output.append(
        onnx.helper.make_tensor_value_info("present_state.0", onnx.TensorProto.FLOAT, [1, 8])
    )
    model.graph.node.append(onnx.helper.make_node("Identity", ["past_state.0"], ["present_state.0"]))


def test_state_that_cannot_be_rewound_is_refused_when_it_is_loaded(folder: Path, tmp_path: Path) -> None:
    for place in (edit_graph(folder, with_state), edit_foreign(write_foreign(tmp_path / "foreign"), with_state)):
        error = refusal(place)
        assert isinstance(error, ManifestError)
        assert "past_state.0 is not expected" in str(error)


# B1 to B4, in folders whose manifest vouches for every byte


def external(key: str, value: str) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == key:
                    entry.value = value

    return change


def nested(model: onnx.ModelProto) -> None:
    """A branch that is always taken, with weights from outside within."""
    tensor = onnx.TensorProto(name="inner", data_type=onnx.TensorProto.FLOAT, dims=[1])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": "../secret", "offset": "0", "length": "4"}.items():
        tensor.external_data.add(key=key, value=value)
    value = onnx.helper.make_tensor_value_info("inner", onnx.TensorProto.FLOAT, [1])
    branch = onnx.helper.make_graph([], "branch", [], [value], [tensor])
    always = onnx.numpy_helper.from_array(np.array(True), "always")
    model.graph.initializer.append(always)
    model.graph.node.append(
        onnx.helper.make_node("If", ["always"], ["unused"], then_branch=branch, else_branch=branch)
    )
    kept = onnx.helper.make_tensor_value_info("unused", onnx.TensorProto.FLOAT, [1])
    model.graph.output.append(kept)


def foreign_operator(model: onnx.ModelProto) -> None:
    model.opset_import.append(onnx.helper.make_opsetid("other.maker", 1))
    model.graph.node[3].domain = "other.maker"


def future_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 999


HARMFUL: dict[str, Callable[[onnx.ModelProto], None]] = {
    "a folder above": external("location", "../secret"),
    "an absolute path": external("location", "/etc/hostname"),
    "a device": external("location", "/dev/zero"),
    "a link out": external("location", "link"),
    "a pipe": external("location", "pipe"),
    "a missing file": external("location", "nowhere"),
    "an address in memory": external("location", "*/_ORT_MEM_ADDR_/*"),
    "beyond the end": external("offset", str(10**15)),
    "before the beginning": external("offset", "-8"),
    "a length below zero": external("length", "-8"),
    "a subgraph": nested,
    "an operator of others": foreign_operator,
    "an opset to come": future_opset,
}


@pytest.mark.parametrize("kind", HARMFUL)
def test_graph_that_reaches_out_of_its_folder_is_refused(folder: Path, kind: str) -> None:
    if kind == "a link out":
        (folder / "link").symlink_to(folder.parent / "secret")
    if kind == "a pipe":
        os.mkfifo(folder / "pipe")
    error = refusal(edit_graph(folder, HARMFUL[kind]))
    assert error.exit_code == 3
    assert f"loading {folder / 'model.onnx'}" in str(error)


def test_links_of_listed_files_are_followed_to_what_the_manifest_vouches_for(folder: Path, tmp_path: Path) -> None:
    """The hash is of what is read; a link to other bytes is refused by it."""
    with load(folder, drafter="none", deterministic=True) as engine:
        wanted = engine.generate("the", max_tokens=6).token_ids
    weights = folder / "model.onnx.data"
    weights.unlink()
    os.link(tmp_path / "secret", weights)
    with load(folder, drafter="none", deterministic=True) as engine:
        assert engine.generate("the", max_tokens=6).token_ids == wanted
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to(tmp_path / "other")
    size = read_manifest_size(folder, "chat_template.jinja")
    (tmp_path / "other").write_bytes(b"x" * size)
    assert isinstance(refusal(folder), IntegrityError)
    (folder / "chat_template.jinja").unlink()
    for path in ("/dev/zero", str(tmp_path), str(tmp_path / "nowhere")):
        (folder / "chat_template.jinja").symlink_to(path)
        assert isinstance(refusal(folder), ManifestError)
        (folder / "chat_template.jinja").unlink()


def read_manifest_size(folder: Path, name: str) -> int:
    return int(json.loads((folder / FILE_NAME).read_text())["files"][name]["bytes"])


# B6: JSON

JSON = {
    "nothing": "",
    "a list": "[]",
    "cut short": '{"schema_version": 1',
    "deep": "[" * 100_000,
    "deep objects": '{"a": ' * 100_000,
    "a key twice": '{"schema_version": 1, "schema_version": 1}',
    "no number": '{"schema_version": NaN}',
    "too large a number": '{"schema_version": ' + "9" * 5000 + "}",
    "infinite": '{"schema_version": 1e999}',
    "large": " " * (2 << 20),
    "no text": "\udcff",
}


@pytest.mark.parametrize("kind", JSON)
def test_hostile_json_is_refused_in_words(folder: Path, kind: str) -> None:
    (folder / FILE_NAME).write_bytes(JSON[kind].encode("utf-8", "surrogateescape"))
    error = refusal(folder)
    assert isinstance(error, ManifestError)
    assert FILE_NAME in str(error)
    assert len(str(error)) < 400


@pytest.mark.parametrize("kind", JSON)
def test_hostile_json_of_a_pair_counts_as_no_measurement(tmp_path: Path, kind: str) -> None:
    (tmp_path / PAIR_FILE).write_bytes(JSON[kind].encode("utf-8", "surrogateescape"))
    found = read_pair(tmp_path)
    assert found is not None
    assert not found.checks
    assert PAIR_FILE in found.problem
    assert len(found.problem) < 400


@pytest.mark.parametrize("name", [FILE_NAME, PAIR_FILE])
def test_pipe_in_the_place_of_json_is_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name == PAIR_FILE:
        assert read_pair(folder) is None, "a folder that holds no pair is a model"
        load(folder, drafter="none").close()
    else:
        assert "without edgespec.json" in str(refusal(folder))
        with pytest.raises(ManifestError, match="not a regular file"):
            read_manifest(folder)


def test_json_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "big.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="more than 1 MB"):
        read_json(tmp_path / "big.json", 1 << 20)
    (tmp_path / "small.json").write_text('{"a": [1, {"b": 2.5}]}')
    stated: Any = {"a": [1, {"b": 2.5}]}
    assert read_json(tmp_path / "small.json", 1 << 20) == stated


# B7: a tokenizer of another model


def test_token_that_the_model_lacks_is_refused_before_any_pass(folder: Path) -> None:
    path = folder / "tokenizer.json"
    stated = json.loads(path.read_text())
    stated["model"]["vocab"]["z"] = 10**6
    path.write_text(json.dumps(stated))
    manifest = json.loads((folder / FILE_NAME).read_text())
    manifest["files"]["tokenizer.json"] = vars(file_record(path))
    (folder / FILE_NAME).write_text(json.dumps(manifest))
    with load(folder, drafter="none") as engine:
        num_fed = engine.target.num_fed
        with pytest.raises(ManifestError, match=f"the token 1000000, and the model has {tiny.VOCAB}"):
            engine.stream("z")
        assert engine.target.num_fed == num_fed
        assert len(engine.generate("on", max_tokens=3).token_ids) == 3
