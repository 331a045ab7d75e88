"""Folders of ONNX Runtime GenAI's model builder, friendly and hostile.

tests/data/genai is one: a Llama of random weights, built with `python -m onnxruntime_genai.models.builder -p int4
-e cpu` of onnxruntime-genai 0.18.0; genai_greedy.json is what that package's own generator says with it.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import growing
import numpy as np
import onnx
import pytest
import tiny
from calls import random_calls
from onnx import TensorProto, helper

from edgespec.cli.main import main
from edgespec.engine.engine import Engine
from edgespec.engine.load import load
from edgespec.errors import EdgeSpecError, IntegrityError, ManifestError, ModelError
from edgespec.manifest import Signature, SuggestedSampling
from edgespec.runtimes import foreign
from edgespec.setup.genai import read_genai

pytestmark = pytest.mark.slow  # a module of many models or processes

DATA = Path(__file__).parents[1] / "support" / "data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "genai", tmp_path / "foreign"))


def config(folder: Path) -> dict[str, Any]:
    stated: dict[str, Any] = json.loads((folder / "genai_config.json").read_text())
    return stated


def write_config(folder: Path, stated: object) -> None:
    (folder / "genai_config.json").write_text(json.dumps(stated))


def write_growing(folder: Path, names: Signature, *, shares_buffer: bool = False) -> Path:
    """A folder of the same kind around a graph whose cache grows."""
    shutil.copytree(DATA / "genai", folder)
    for file in folder.glob("model.onnx*"):
        file.unlink()
    growing.write_graph(folder / "model.onnx", names, 600, external="model.onnx.data")
    stated = config(folder)
    stated["model"]["decoder"] |= {"num_key_value_heads": growing.HEADS, "head_size": growing.HEAD_DIM}
    inputs = {"past_key_names": names.past_key, "past_value_names": names.past_value, "input_ids": names.input_ids}
    for name in ("attention_mask", "position_ids"):
        if getattr(names, name):
            inputs[name] = getattr(names, name)
    stated["model"]["decoder"]["inputs"] = inputs
    stated["search"]["past_present_share_buffer"] = shares_buffer
    write_config(folder, stated)
    return folder


# Friendly folders


@pytest.mark.parametrize("deterministic", [True, False])
def test_greedy_tokens_are_those_of_the_package_that_built_it(folder: Path, deterministic: bool) -> None:
    told = json.loads((DATA / "genai_greedy.json").read_text())
    with load(folder, drafter="none", deterministic=deterministic) as engine:
        tokens = np.array(told["prompt"], np.int32)
        for token in told["greedy"]:
            assert engine.target.logits(tokens, 1)[0].argmax() == token
            tokens = np.append(tokens, np.int32(token))


def test_folder_is_loaded_as_it_is_and_said_to_be_unverified(folder: Path, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    said: list[str] = []
    with load(folder, home=tmp_path / "home", report=said.append) as engine:
        manifest = engine.manifest
        assert engine.generate("the in", max_tokens=5).token_ids
        assert "<|im_start|>user" in engine.tokenizer._tokenizer.decode(
            list(engine.encode("the")), skip_special_tokens=False
        )
    assert (manifest.context_length, manifest.eos_token_ids, manifest.files) == (600, (2,), {})
    assert manifest.kv_cache.form == "shared_buffer"
    assert [line for line in said if "not verified" in line]
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert not (tmp_path / "home").exists()


def test_chat_command_takes_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["chat", str(folder), "--prompt", "the", "--max-tokens", "4", "--json"])
    captured = capsys.readouterr()
    assert (code, len(json.loads(captured.out)["token_ids"])) == (0, 4)
    assert "not verified" in captured.err


def test_the_search_settings_are_what_it_suggests_for_sampling(folder: Path) -> None:
    assert read_genai(folder).sampling == SuggestedSampling(temperature=0.0, top_k=50)
    stated = config(folder)
    stated["search"] |= {"do_sample": True, "temperature": 0.6}
    write_config(folder, stated)
    assert read_genai(folder).sampling == SuggestedSampling(temperature=0.6, top_k=50)
    write_config(folder, stated | {"search": {"top_p": 5}})
    with pytest.raises(ManifestError, match="top_p is 5"):
        read_genai(folder)


def test_older_builders_put_the_template_elsewhere(folder: Path) -> None:
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    with load(folder) as engine:
        without = len(engine.encode("the"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with load(folder) as engine:
        assert len(engine.encode("the")) > without


@pytest.mark.parametrize("inputs", [{}, {"position_ids": "spots"}, {"attention_mask": None}])
def test_growing_cache_under_other_names(tmp_path: Path, inputs: dict[str, Any]) -> None:
    names = Signature(past_key="past.%d.k", past_value="past.%d.v", input_ids="ids", num_logits_to_keep=None)
    place = write_growing(tmp_path / "growing", Signature(**{**vars(names), **inputs}))
    with load(place, drafter="none", deterministic=True) as engine:
        assert engine.manifest.kv_cache.form == "growing"
        fresh = load(place, deterministic=True).target
        for tokens, num_last in random_calls(seed=5, count=60, longest=60):
            fresh._held = np.zeros(0, np.int32)  # type: ignore[attr-defined]
            assert np.array_equal(engine.target.logits(tokens, num_last), fresh.logits(tokens, num_last))
        plain = engine.generate("the in the an on", max_tokens=40).token_ids
    with load(place, draft_length=3, deterministic=True) as engine:
        assert engine.generate("the in the an on", max_tokens=40).token_ids == plain


def test_input_that_only_the_configuration_has_is_left_out(folder: Path) -> None:
    stated = config(folder)
    stated["model"]["decoder"]["inputs"]["position_ids"] = "position_ids"
    write_config(folder, stated)
    with load(folder) as engine:
        assert engine.manifest.signature.position_ids is None


@pytest.mark.parametrize("compared", ["Greater", "GreaterOrEqual"])
def test_context_ends_where_a_long_text_takes_other_angles(folder: Path, compared: str) -> None:
    """A graph of GenAI's builder takes another table of angles behind a border in tokens (longrope).

    It chooses by an If (Greater), or for DirectML by the second half of one table (GreaterOrEqual). Keys that the
    cache holds would have the angles of the first table, so the context of the folder ends at the border.
    """

    def choose(model: onnx.ModelProto) -> None:
        length = "/model/attn_mask_reformat/attn_mask_subgraph/Gather/output_0"
        border = helper.make_node(
            "Constant", [], ["border"], value=helper.make_tensor("", TensorProto.INT64, [], [40])
        )
        if compared == "Greater":
            angles = [tensor for tensor in model.graph.initializer if tensor.name in ("cos_cache", "sin_cache")]
            values = [helper.make_tensor_value_info(one.name, TensorProto.FLOAT, one.dims) for one in angles]
            branch = helper.make_graph([], "angles", [], values, angles)
            names = [one.name for one in angles]
            chosen = helper.make_node("If", ["is_long"], names, then_branch=branch, else_branch=branch)
            for one in angles:
                model.graph.initializer.remove(one)
        else:
            chosen = helper.make_node("Cast", ["is_long"], ["moved"], to=TensorProto.INT64)
        kind = "ReduceMax" if compared == "GreaterOrEqual" else "Identity"
        nodes = [
            border,
            helper.make_node(kind, [length], ["last"]),
            helper.make_node(compared, ["last", "border"], ["is_long"]),
        ]
        at = 1 + next(at for at, node in enumerate(model.graph.node) if length in node.output)
        for node in (chosen, *reversed(nodes)):
            model.graph.node.insert(at, node)

    edit(folder, choose)
    with load(folder, drafter="none") as engine:
        assert engine.manifest.context_length == 40
        assert engine.generate("the", max_tokens=2).token_ids
        with pytest.raises(EdgeSpecError, match="40"):
            engine.generate("the " * 50)


def test_it_can_draft_for_another_model(folder: Path, tiny_model: Path) -> None:
    with load(tiny_model, drafter="none", deterministic=True) as engine:
        plain = engine.generate("the in", max_tokens=20).token_ids
    with load(tiny_model, drafter=str(folder), draft_length=3, deterministic=True) as engine:
        assert engine.generate("the in", max_tokens=20).token_ids == plain


# B6: configurations that do not fit or mean harm


def refusal(folder: Path, kind: type[EdgeSpecError] = ModelError) -> str:
    with pytest.raises(kind) as raised:
        load(folder)
    return str(raised.value)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("model", None, "model.decoder"),
        ("model", [], "model.decoder"),
        ("model.decoder", 7, "model.decoder"),
        ("model.vision", {"filename": "vision.onnx"}, "vision"),
        ("model.speech", {"filename": "speech.onnx"}, "speech"),
        ("model.encoder", {"filename": "encoder.onnx"}, "encoder"),
        ("model.decoder.pipeline", [{}], "pipeline"),
        ("model.decoder.adapters", {"a": 1}, "adapters"),
        ("model.decoder.sliding_window", {"window_size": 64}, "slides and cannot"),
        ("model.decoder.session_options", {"custom_ops_library": "x.so"}, "custom operators"),
        ("model.decoder.filename", "../model.onnx", "own folder"),
        ("model.decoder.filename", "/etc/passwd", "own folder"),
        ("model.decoder.filename", "model.so", "own folder"),
        ("model.decoder.filename", 7, "missing or damaged"),
        ("model.decoder.filename", "other.onnx", "cannot be opened"),
        ("model.decoder.inputs.rnn_states", "states", "rnn_states"),
        ("model.decoder.inputs.past_key_names", "past.key", "wanted one %d"),
        ("model.decoder.inputs.past_key_names", "past.%d.%d", "wanted one %d"),
        ("model.decoder.inputs.past_key_names", "other.%d", "other.0 is missing, wanted float"),
        ("model.decoder.outputs.logits", "scores", "scores is missing"),
        ("model.decoder.num_hidden_layers", 9, "past_key_values.2.key is missing"),
        ("model.decoder.num_hidden_layers", True, "num_layers"),
        ("model.decoder.num_hidden_layers", "2", "num_layers"),
        ("model.decoder.num_key_value_heads", 2, "is float [batch_size, 1, "),
        ("model.decoder.head_size", 1e400, "cannot be read"),
        ("model.decoder.head_size", 8, "cannot read several tokens"),
        ("model.context_length", -1, "context_length"),
        ("model.context_length", 10**30, "context_length"),
        ("model.vocab_size", 40, "special token"),
        ("model.vocab_size", 300, "wanted float or float16"),
        ("model.eos_token_id", ["a"], "eos_token_ids[0] is 'a': wanted a whole number"),
        ("model.eos_token_id", 10**9, "special token"),
        ("model.bos_token_id", -5, "bos_token_id is -5: wanted a whole number"),
        ("search", 3, "missing or damaged"),
    ],
)
def test_configuration_that_does_not_fit_is_refused(folder: Path, place: str, value: object, words: str) -> None:
    stated = config(folder)
    *path, last = place.split(".")
    at = stated
    for key in path:
        at = at[key]
    at[last] = value
    write_config(folder, stated)
    if place == "model.vocab_size" and value == 40:
        stated["model"]["eos_token_id"] = 41
        write_config(folder, stated)
    assert words in refusal(folder, ManifestError)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read"),
        ("[]", "wanted a JSON object"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ('{"model": {"a": ' * 50_000, "cannot be read"),
        ('{"model": 1, "model": 2}', "occurs twice"),
        ('{"model": NaN}', "NaN"),
        ('{"model": ' + "9" * 5000 + "}", "cannot be read"),
        ("{}", "model.decoder"),
        (" " * (2 << 20), "more than 1 MB"),
    ],
)
def test_hostile_json_is_refused(folder: Path, text: str, words: str) -> None:
    (folder / "genai_config.json").write_text(text)
    assert words in refusal(folder, ManifestError)


def test_configuration_that_is_no_text_is_refused(folder: Path) -> None:
    (folder / "genai_config.json").write_bytes(b"\xff\xfe{}")
    assert "cannot be read" in refusal(folder, ManifestError)


def test_configuration_that_is_a_pipe_is_not_waited_for(folder: Path) -> None:
    (folder / "genai_config.json").unlink()
    os.mkfifo(folder / "genai_config.json")
    with pytest.raises(ManifestError, match="not a regular file"):
        read_genai(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.onnx", "model.onnx.data"])
def test_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert name in refusal(folder, ManifestError)


def test_cache_of_the_other_form_is_found_out(tmp_path: Path) -> None:
    names = Signature(num_logits_to_keep=None)
    assert "cache" in refusal(write_growing(tmp_path / "wrong", names, shares_buffer=True), ManifestError)


# B1 to B4: graphs


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(bytes(1 << 20))
    return path


def edit(folder: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    path = folder / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    change(model)
    path.write_bytes(model.SerializeToString())


def first_external(model: onnx.ModelProto) -> TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.external_data)


def point(tensor: TensorProto, **entries: object) -> None:
    """Set entries of a tensor's external data; None removes one."""
    stated = {entry.key: entry.value for entry in tensor.external_data} | entries
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in stated.items():
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))


@pytest.mark.parametrize(
    "location",
    ["../secret", "{outside}", "sub/../../secret", "", ".", "..", "sub/data", "/dev/zero", "..\\secret", "a\0b"],
)
def test_weights_outside_the_folder_are_refused(folder: Path, outside: Path, location: str) -> None:
    edit(folder, lambda model: point(first_external(model), location=location.format(outside=outside)))
    assert "not in a file of its folder" in refusal(folder, IntegrityError)


@pytest.mark.parametrize("marker", ["*/_ORT_MEM_ADDR_/*", "_ORT_MEM_ADDR_"])
def test_weights_at_an_address_in_memory_are_refused(folder: Path, marker: str) -> None:
    edit(folder, lambda model: point(first_external(model), location=marker, offset=4096))
    assert "points into memory" in refusal(folder, IntegrityError)


def replaced_by(folder: Path, make: Callable[[Path], object], name: str = "model.onnx.data") -> str:
    (folder / name).rename(folder.parent / "moved")
    make(folder / name)
    return refusal(folder, IntegrityError)


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data"])
def test_links_out_of_the_folder_are_refused(folder: Path, name: str) -> None:
    moved = folder.parent / "moved"
    assert "link out of its folder" in replaced_by(folder, lambda path: path.symlink_to(moved), name)
    (folder / name).unlink()
    os.link(moved, folder / name)
    assert "hard links" in refusal(folder, IntegrityError)


def test_links_within_the_folder_serve(folder: Path) -> None:
    (folder / "model.onnx.data").rename(folder / "weights")
    (folder / "model.onnx.data").symlink_to("weights")
    with load(folder) as engine:
        assert engine.generate("the", max_tokens=2).token_ids


def test_what_is_no_plain_file_is_refused_without_waiting(folder: Path) -> None:
    assert "not a regular file" in replaced_by(folder, os.mkfifo)
    (folder / "model.onnx.data").unlink()
    (folder / "model.onnx.data").mkdir()
    assert "not a regular file" in refusal(folder, IntegrityError)
    (folder / "model.onnx.data").rmdir()
    (folder / "model.onnx.data").symlink_to("/dev/zero")
    assert "link out of its folder" in refusal(folder, IntegrityError)


def test_folder_may_be_a_link_itself(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    with load(tmp_path / "link") as engine:
        assert engine.generate("the", max_tokens=2).token_ids


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"offset": -4096}, "offset '-4096'"),
        ({"offset": "0x10"}, "offset '0x10'"),
        ({"offset": 1 << 40}, "which has"),
        ({"offset": "9" * 40}, "offset"),
        ({"length": 1 << 62}, "needs"),
        ({"length": 0}, "needs"),
        ({"length": "-1"}, "length '-1'"),
        ({"basepath": "/etc"}, "basepath"),
        ({"location": None}, "wanted location"),
    ],
)
def test_weights_that_lie_nowhere_are_refused(folder: Path, entries: dict[str, object], words: str) -> None:
    edit(folder, lambda model: point(first_external(model), **entries))
    assert words in refusal(folder, IntegrityError)


def test_weights_cut_short_or_overlapping_are_refused(folder: Path) -> None:
    def overlap(model: onnx.ModelProto) -> None:
        one, other = [tensor for tensor in model.graph.initializer if tensor.external_data][:2]
        at = {entry.key: entry.value for entry in one.external_data}["offset"]
        point(other, offset=int(at) + 64)

    whole = (folder / "model.onnx.data").read_bytes()
    (folder / "model.onnx.data").write_bytes(whole[:-1])
    assert "which has" in refusal(folder, IntegrityError)
    (folder / "model.onnx.data").write_bytes(whole)
    edit(folder, overlap)
    assert "overlap" in refusal(folder, IntegrityError)


def test_one_key_twice_is_refused(folder: Path) -> None:
    edit(folder, lambda model: first_external(model).external_data.add(key="location", value="../secret") and None)
    assert "each once" in refusal(folder, IntegrityError)


def hidden() -> TensorProto:
    tensor = TensorProto(name="hidden", data_type=TensorProto.FLOAT, dims=[4])
    point(tensor, location="../secret", offset=0, length=16)
    return tensor


def in_attribute(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Constant", [], ["unused"], value=hidden()))


def in_subgraph(model: onnx.ModelProto) -> None:
    branch = helper.make_graph([], "branch", [], [], [hidden()])
    model.graph.node.append(
        helper.make_node("If", ["input_ids"], ["unused"], then_branch=branch, else_branch=branch)
    )


def in_function(model: onnx.ModelProto) -> None:
    node = helper.make_node("Constant", [], ["y"], value=hidden())
    imports = [helper.make_opsetid("", 21)]
    model.functions.append(helper.make_function("local", "f", [], ["y"], [node], imports))


def in_sparse_tensor(model: onnx.ModelProto) -> None:
    indices = helper.make_tensor("i", TensorProto.INT64, [4], [0, 1, 2, 3])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(hidden(), indices, [9]))


@pytest.mark.parametrize("hide", [in_attribute, in_subgraph, in_function, in_sparse_tensor])
def test_weights_are_looked_for_everywhere(folder: Path, hide: Callable[[onnx.ModelProto], None]) -> None:
    edit(folder, hide)
    assert "'hidden' lies in '../secret'" in refusal(folder, IntegrityError)


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (helper.make_node("Run", ["logits"], ["unused"], domain="evil.ops"), "'evil.ops'"),
        (helper.make_node("EPContext", [], ["unused"], domain="com.microsoft"), "EPContext"),
        (helper.make_node("NoSuchOperator", ["logits"], ["unused"]), "NoSuchOperator"),
    ],
)
def test_foreign_operators_are_refused(folder: Path, node: onnx.NodeProto, words: str) -> None:
    edit(folder, lambda model: model.graph.node.append(node))
    assert words in refusal(folder, ManifestError)


def test_operators_of_a_future_version_are_refused(folder: Path) -> None:
    def future(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = 9999

    edit(folder, future)
    assert "9999" in refusal(folder, ManifestError)


def damaged(whole: bytes) -> Iterator[bytes]:
    yield b""
    yield b"not a graph"
    yield b"\xff" * 64
    rng = np.random.default_rng(0)
    for _ in range(12):
        yield whole[: rng.integers(1, len(whole))]
    yield rng.bytes(5000)


def test_damaged_graphs_are_refused(folder: Path) -> None:
    whole = (folder / "model.onnx").read_bytes()
    for content in damaged(whole):
        (folder / "model.onnx").write_bytes(content)
        assert "model.onnx" in refusal(folder, EdgeSpecError)


def test_flipped_bytes_never_crash(folder: Path) -> None:
    """What is still a graph may load; anything else is an error of our own."""
    whole = (folder / "model.onnx").read_bytes()
    rng = np.random.default_rng(1)
    manifest = read_genai(folder)
    refused = 0
    for _ in range(150):
        content = bytearray(whole)
        for at in rng.integers(0, len(whole), 3):
            content[at] = rng.integers(0, 256)
        (folder / "model.onnx").write_bytes(bytes(content))
        try:
            foreign.inspect(folder, manifest)
        except EdgeSpecError:
            refused += 1
    assert 0 < refused < 150


# B5: other inputs and outputs


def change_past(model: onnx.ModelProto, kind: int) -> None:
    for value in model.graph.input:
        if value.name.startswith("past"):
            value.type.tensor_type.elem_type = kind


def test_cache_that_numpy_lacks_is_refused(folder: Path) -> None:
    edit(folder, lambda model: change_past(model, TensorProto.BFLOAT16))
    assert "cache of bfloat16" in refusal(folder, ManifestError)


def test_static_shapes_are_refused_with_found_and_wanted(tmp_path: Path) -> None:
    def fix(model: onnx.ModelProto) -> None:
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 1

    place = write_growing(tmp_path / "static", Signature(num_logits_to_keep=None))
    edit(place, fix)
    assert "input_ids is int64 [1, 1], wanted int64 [1, new]" in refusal(place, ManifestError)


def test_inputs_that_nobody_fills_are_named(folder: Path) -> None:
    def add(model: onnx.ModelProto) -> None:
        model.graph.input.append(helper.make_tensor_value_info("pixels", TensorProto.FLOAT, [1, 3]))
        model.graph.node.append(helper.make_node("Identity", ["pixels"], ["unused"]))
        model.graph.output.append(helper.make_tensor_value_info("unused", TensorProto.FLOAT, [1, 3]))

    edit(folder, add)
    assert "pixels is not expected" in refusal(folder, ManifestError)


def test_vocabulary_is_that_of_the_tokenizer() -> None:
    engine: Engine
    with load(DATA / "genai") as engine:
        assert engine.manifest.vocab_size == tiny.VOCAB


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("chat_template.jinja", b"\xff\xfea\xd8", "chat_template.jinja cannot be read"),
        ("tokenizer.json", b"{}", "not a usable tokenizer"),
    ],
)
def test_damaged_files_of_text_are_named(folder: Path, name: str, content: bytes, reason: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ManifestError, match=reason):
        load(folder)


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer.json", "genai_config.json"])
def test_pointers_of_git_lfs_are_named(folder: Path, name: str) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(EdgeSpecError, match=rf"{name} (.*it )?is a pointer of Git LFS"):
        load(folder)


def test_tokenizers_that_panic_or_grow_are_refused(folder: Path) -> None:
    stated = json.loads((folder / "tokenizer.json").read_text())
    unknown = {"type": "TemplateProcessing", "single": "[NONE] $A", "pair": "$A $B", "special_tokens": {}}
    doubling = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    for change in (
        {"post_processor": unknown},
        {"normalizer": {"type": "Sequence", "normalizers": [doubling] * 40}},
    ):
        (folder / "tokenizer.json").write_text(json.dumps(stated | change))
        with pytest.raises(ManifestError, match=r"usable tokenizer|ever more text"):
            read_genai(folder)
