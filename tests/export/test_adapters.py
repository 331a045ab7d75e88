"""LoRA adapters are merged into their base as PEFT and llama.cpp merge them."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
from families import FAMILIES, weights_of, write_source
from safetensors.numpy import save_file

from edgespec.cli.main import main
from edgespec.errors import ModelError, SourceError
from edgespec.export.convert import export_model
from edgespec.export.options import ExportOptions
from edgespec.export.plan import plan_model
from edgespec.manifest import Origin, read_manifest
from edgespec.setup.drafting_target import find_export_source
from edgespec.setup.home import ModelHome

RANK, ALPHA = 4, 8
LAYER = "model.layers.1."
NAMES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj")


def changes(
    weights: dict[str, np.ndarray], names: tuple[str, ...] = NAMES, ranks: dict[str, int] | None = None
) -> dict[str, tuple[np.ndarray, ...]]:
    """A and B by the name of a matrix."""
    rng = np.random.default_rng(4)
    shapes = {f"{LAYER}{name}.weight": weights[f"{LAYER}{name}.weight"].shape for name in names}
    made = {}
    for name, (rows, columns) in shapes.items():
        rank = (ranks or {}).get(name, RANK)
        a, b = rng.normal(0, 0.1, (rank, columns)), rng.normal(0, 0.5, (rows, rank))
        made[name] = a.astype(np.float32), b.astype(np.float32)
    return made


def write_folder(folder: Path, made: dict[str, tuple[np.ndarray, ...]], more: Any = None, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "bias": "none",
        "base_model_name_or_path": "base",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    tensors = dict(more or {})
    for name, (a, b) in made.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_file(path: Path, made: dict[str, tuple[np.ndarray, ...]], kind: str = "lora", more: Any = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", kind)
    writer.add_float32("adapter.lora.alpha", float(ALPHA))
    for name, (a, b) in made.items():
        stored = tiny._gguf_name(name, "llama")
        writer.add_tensor(f"{stored}.lora_a", a)
        writer.add_tensor(f"{stored}.lora_b", np.ascontiguousarray(tiny._permuted(name, b)))
    for stored, (a, b) in (more or {}).items():
        writer.add_tensor(f"{stored}.lora_a", a)
        writer.add_tensor(f"{stored}.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merged(
    weights: dict[str, np.ndarray],
    made: dict[str, tuple[np.ndarray, ...]],
    scale: Callable[[str], float] = lambda name: ALPHA / RANK,
) -> dict[str, np.ndarray]:
    return weights | {name: weights[name] + b @ (a * np.float32(scale(name))) for name, (a, b) in made.items()}


def assert_equal(source: Path, adapter: Path, wanted: Path) -> None:
    """The base with the adapter has the very weights of a source that was merged by hand."""
    one = plan_model(source, ExportOptions(adapter=adapter)).loaded.tensors
    other = plan_model(wanted, ExportOptions()).loaded.tensors
    assert one.keys() == other.keys()
    for role, tensor in other.items():
        found, meant = (np.concatenate([*each.floats()]) for each in (one[role], tensor))
        assert np.array_equal(found, meant), role


@pytest.mark.parametrize("base", ["huggingface", "gguf"])
@pytest.mark.parametrize("form", ["folder", "file"])
def test_an_adapter_is_merged_whatever_the_files_of_both(tmp_path: Path, base: str, form: str) -> None:
    weights = tiny.random_weights()
    made = changes(weights)
    tiny.write_huggingface(tmp_path / "hf", weights)
    tiny.write_gguf(tmp_path / "base.gguf", weights)
    tiny.write_huggingface(tmp_path / "merged", merged(weights, made))
    if form == "folder":
        adapter = write_folder(tmp_path / "adapter", made)
    else:
        adapter = write_file(tmp_path / "adapter.gguf", made)
    assert_equal(tmp_path / ("hf" if base == "huggingface" else "base.gguf"), adapter, tmp_path / "merged")


def test_scales_follow_the_settings(tmp_path: Path) -> None:
    weights = tiny.random_weights()
    down = f"{LAYER}mlp.down_proj.weight"
    made = changes(weights, ranks={down: 16})
    tiny.write_huggingface(tmp_path / "hf", weights)

    def scale(name: str) -> float:
        return (6 if name == down else ALPHA) / np.sqrt(16 if name == down else RANK)

    tiny.write_huggingface(tmp_path / "merged", merged(weights, made, scale))
    patterns = {"rank_pattern": {"down_proj": 16}, "alpha_pattern": {"mlp.down_proj": 6}}
    adapter = write_folder(tmp_path / "adapter", made, use_rslora=True, **patterns)
    assert_equal(tmp_path / "hf", adapter, tmp_path / "merged")
    # Behind ^ PEFT takes a whole name, so that the first two are of no matrix here.
    patterns["alpha_pattern"] = {
        f"^{name}": 6 for name in ("mlp.down_proj", "down_proj", down.removesuffix(".weight"))
    }
    patterns["alpha_pattern"] |= {"^self_attn.q_proj": 99, "^layers.1.self_attn.q_proj": 99}
    adapter = write_folder(tmp_path / "adapter", made, use_rslora=True, **patterns)
    assert_equal(tmp_path / "hf", adapter, tmp_path / "merged")


def test_parts_of_a_fused_matrix_are_changed_each(tmp_path: Path) -> None:
    weights = weights_of("phi3")
    made = changes(weights, ("self_attn.qkv_proj", "mlp.gate_up_proj"))
    for folder, own in (("hf", weights), ("merged", merged(weights, made))):
        tiny.write_huggingface(tmp_path / folder, own, config=FAMILIES["phi3"]["config"])
    assert_equal(tmp_path / "hf", write_folder(tmp_path / "adapter", made), tmp_path / "merged")


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("form", ["folder", "file"])
def test_queries_and_their_gates_are_changed_each(tmp_path: Path, family: str, form: str) -> None:
    weights = weights_of(family)
    made = changes(weights, ("self_attn.q_proj", "self_attn.o_proj"))
    for folder, own in (("hf", weights), ("merged", merged(weights, made))):
        tiny.write_huggingface(tmp_path / folder, own, config=FAMILIES[family]["config"])
    if form == "folder":
        adapter = write_folder(tmp_path / "adapter", made)
    else:
        stored = {
            f"blk.1.attn_{part}.weight": made[f"{LAYER}self_attn.{part[0]}_proj.weight"]
            for part in ("q", "output")
        }
        adapter = write_file(tmp_path / "adapter.gguf", {}, more=stored)
    assert_equal(tmp_path / "hf", adapter, tmp_path / "merged")


@pytest.mark.parametrize("is_tied", [False, True])
def test_whole_matrices_replace_those_of_the_base(tmp_path: Path, is_tied: bool) -> None:
    weights = tiny.random_weights()
    head = weights["lm_head.weight"] if "lm_head.weight" in weights else weights["model.embed_tokens.weight"]
    own = {name: value for name, value in weights.items() if name != "lm_head.weight"}
    base = own if is_tied else own | {"lm_head.weight": head}
    tiny.write_huggingface(tmp_path / "hf", base)
    changed = {"lm_head.weight": 2 * head}
    tiny.write_huggingface(tmp_path / "merged", own | changed)
    adapter = write_folder(
        tmp_path / "adapter", {}, {"base_model.model.lm_head.weight": changed["lm_head.weight"]}
    )
    assert_equal(tmp_path / "hf", adapter, tmp_path / "merged")


def test_a_changed_embedding_leaves_the_head_of_the_base(tmp_path: Path) -> None:
    weights = tiny.random_weights()
    embedding = weights["model.embed_tokens.weight"]
    own = {name: value for name, value in weights.items() if name != "lm_head.weight"}
    tiny.write_huggingface(tmp_path / "hf", own)
    changed = {"model.embed_tokens.weight": embedding + 1}
    tiny.write_huggingface(tmp_path / "merged", own | changed | {"lm_head.weight": embedding})
    adapter = write_folder(tmp_path / "a", {}, {"base_model.model.model.embed_tokens.weight": embedding + 1})
    assert_equal(tmp_path / "hf", adapter, tmp_path / "merged")


def embedding_change(num_tokens: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """[rank, num_tokens] and [size, rank], as PEFT stores them."""
    rng = np.random.default_rng(5)
    a, b = rng.normal(0, 0.1, (RANK, num_tokens)), rng.normal(0, 0.5, (size, RANK))
    return a.astype(np.float32), b.astype(np.float32)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("form", ["folder", "with base", "file"])
def test_embeddings_and_heads_are_changed_by_low_rank(tmp_path: Path, is_tied: bool, form: str) -> None:
    weights = tiny.random_weights()
    embedding = weights["model.embed_tokens.weight"]
    base = weights | {"lm_head.weight": 2 * embedding}
    if is_tied:
        del base["lm_head.weight"]
    tiny.write_huggingface(tmp_path / "hf", base)
    a, b = embedding_change(*embedding.shape)
    head = base.get("lm_head.weight", embedding)
    b_head = np.ascontiguousarray(a.T)
    a_head = np.ascontiguousarray(b.T)
    own = {
        "model.embed_tokens.weight": embedding + (a.T @ (b.T * np.float32(ALPHA / RANK))),
        "lm_head.weight": head if form == "file" else head + b_head @ (a_head * np.float32(ALPHA / RANK)),
    }
    tiny.write_huggingface(tmp_path / "merged", base | own)
    if form == "file":
        adapter = write_file(tmp_path / "a.gguf", {}, more={"token_embd.weight": (b_head, b)})
    else:
        prefix = "base_model.model.model.embed_tokens"
        more = {f"{prefix}.lora_embedding_A": a, f"{prefix}.lora_embedding_B": b}
        if form == "with base":  # PEFT stores these beside their changes
            more |= {f"{prefix}.base_layer.weight": embedding, "base_model.model.lm_head.base_layer.weight": head}
        adapter = write_folder(tmp_path / "a", {"lm_head.weight": (a_head, b_head)}, more)
    assert_equal(tmp_path / "hf", adapter, tmp_path / "merged")


@pytest.mark.parametrize("names", [NAMES, ("self_attn.qkv_proj", "mlp.gate_up_proj")])
def test_rows_of_dora_have_the_lengths_that_it_states(tmp_path: Path, names: tuple[str, ...]) -> None:
    family = "phi3" if "self_attn.qkv_proj" in names else None
    weights = weights_of(family) if family else tiny.random_weights()
    config = {"config": FAMILIES[family]["config"]} if family else {}
    made = changes(weights, names)
    lengths = {name: np.linspace(0.5, 2, len(b), dtype=np.float32) for name, (_, b) in made.items()}
    own = merged(weights, made)
    for name, length in lengths.items():
        own[name] = own[name] * (length[:, None] / np.linalg.norm(own[name], axis=1, keepdims=True))
    tiny.write_huggingface(tmp_path / "hf", weights, **config)
    tiny.write_huggingface(tmp_path / "merged", own, **config)
    more = {
        f"base_model.model.{name.removesuffix('.weight')}.lora_magnitude_vector": length
        for name, length in lengths.items()
    }
    assert_equal(tmp_path / "hf", write_folder(tmp_path / "a", made, more, use_dora=True), tmp_path / "merged")
    lost = next(iter(more))
    changed = {**more, lost: more[lost][:-1]}
    with pytest.raises(SourceError, match="has lengths of"):
        plan_model(
            tmp_path / "hf",
            ExportOptions(adapter=write_folder(tmp_path / "a", made, changed, use_dora=True)),
        )


@pytest.mark.slow
def test_the_target_of_a_pair_is_merged_and_its_drafter_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tiny.random_weights()
    tiny.write_gguf(tmp_path / "base.gguf", weights)
    adapter = write_folder(tmp_path / "adapter", changes(weights))
    base, pair = str(tmp_path / "base.gguf"), tmp_path / "pair"
    command = ["export", base, "--drafter", base, "--adapter", str(adapter)]
    assert main([*command, "--no-check", "--output", str(pair)]) == 0
    sources = {part: read_manifest(pair / part).source.name for part in ("target", "drafter")}
    assert sources == {"target": "base.gguf with adapter adapter", "drafter": "base.gguf"}
    more = [*command, "--no-check", "--device", "gpu", "--add-to", str(pair)]
    assert main(more) == 0
    assert read_manifest(pair / "target-gpu").source == read_manifest(pair / "target").source
    capsys.readouterr()
    unmerged = [word for word in more if word not in ("--adapter", str(adapter))]
    (pair / "target-gpu").rename(tmp_path / "gpu")
    assert main(unmerged) == 2
    assert "is not the source of the pair's target" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_merges_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tiny.random_weights()
    made = changes(weights)
    tiny.write_gguf(tmp_path / "base.gguf", weights, storage="Q8_0")
    adapter = write_folder(tmp_path / "adapter", made)
    command = ["export", str(tmp_path / "base.gguf"), "--adapter", str(adapter), "--output", str(tmp_path / "out")]
    assert main(command) == 0
    assert "merging adapter adapter into 4 matrices" in capsys.readouterr().err
    assert read_manifest(tmp_path / "out").source.name == "base.gguf with adapter adapter"
    assert "with adapter adapter" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_the_base_of_a_merged_model_is_not_taken_for_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    weights = tiny.random_weights()
    tiny.write_gguf(tmp_path / "base.gguf", weights)
    adapter = write_folder(tmp_path / "adapter", changes(weights))
    command = ["export", str(tmp_path / "base.gguf"), "--adapter", str(adapter), "--name", "mine", "--no-check"]
    assert main(command) == 0
    home = ModelHome(tmp_path / "home")
    manifest = read_manifest(home.models / "mine")
    assert find_export_source(home, "mine", manifest) is None
    with pytest.raises(ModelError, match=r"is base.gguf with adapter adapter; merge the adapter with PEFT"):
        home.source_of("mine")
    assert main(["models", "rm", "mine", "--yes"]) == 0
    assert main(["chat", "mine", "hi"]) == 3
    assert "no model 'mine': edgespec models list has the names" in capsys.readouterr().err
    assert manifest.source.fetched_from(Origin(name="ollama:x")).name == "ollama:x with adapter adapter"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "sets use_dora, and lacks the lengths of model.layers.1"),
        ({"lora_bias": True}, "sets lora_bias"),
        ({"peft_type": "IA3"}, "type IA3"),
        ({"bias": "all"}, "trains biases"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base"),
        ({"init_lora_weights": "loftq"}, "changes the base"),
        ({"r": 16}, "states rank 16 for .*, and its matrices have rank 4"),
        ({"rank_pattern": {"down_proj": 2}}, "states rank 2 for .*down_proj"),
        ({"rank_pattern": {"(a+)+$": 3}}, "only names of modules"),
        ({"lora_alpha": "x"}, "lora_alpha is 'x'"),
    ],
)
def test_what_is_more_than_low_rank_is_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    weights = tiny.random_weights()
    tiny.write_huggingface(tmp_path / "hf", weights)
    adapter = write_folder(tmp_path / "adapter", changes(weights), **settings)
    with pytest.raises(SourceError, match=words):
        plan_model(tmp_path / "hf", ExportOptions(adapter=adapter))


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    weights = tiny.random_weights()
    tiny.write_huggingface(tmp_path / "hf", weights)
    wide = {name: (np.zeros((RANK, 999), np.float32), b) for name, (_, b) in changes(weights).items()}
    with pytest.raises(SourceError, match="for another base"):
        plan_model(tmp_path / "hf", ExportOptions(adapter=write_folder(tmp_path / "wide", wide)))
    name = "model.embed_tokens.weight"
    grown = {f"base_model.model.{name}": np.concatenate([weights[name], weights[name][:2]])}
    with pytest.raises(SourceError, match="269×64 there; merge it with PEFT, which changes the number of tokens"):
        plan_model(tmp_path / "hf", ExportOptions(adapter=write_folder(tmp_path / "grown", {}, grown)))
    far = {name.replace(".1.", ".7."): each for name, each in changes(weights).items()}
    with pytest.raises(SourceError, match=r"layers\.7.*this model has not"):
        plan_model(tmp_path / "hf", ExportOptions(adapter=write_folder(tmp_path / "far", far)))
    lonely = write_folder(tmp_path / "lonely", changes(weights))
    for part in "AB":
        one = {f"base_model.model.x.lora_{part}.weight": np.zeros((4, 4), np.float32)}
        save_file(one, lonely / "adapter_model.safetensors")
        with pytest.raises(SourceError, match="one of the two matrices of x"):
            plan_model(tmp_path / "hf", ExportOptions(adapter=lonely))


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3_5", "model.layers.0.linear_attn.in_proj_z"), ("falcon_h1", f"{LAYER}self_attn.q_proj")],
)
def test_an_adapter_of_what_gguf_files_store_otherwise_is_for_a_base_of_its_own_form(
    tmp_path: Path, family: str, name: str
) -> None:
    rows, columns = weights_of(family)[f"{name}.weight"].shape
    change = np.ones((RANK, columns), np.float32), np.ones((rows, RANK), np.float32)
    stored = tiny._gguf_name(f"{name}.weight", "qwen35" if family == "qwen3_5" else "falcon-h1")
    adapters = {
        "huggingface": write_folder(tmp_path / "adapter", {f"{name}.weight": change}),
        "gguf": write_file(tmp_path / "adapter.gguf", {}, more={stored: change}),
    }
    for (form, adapter), base in product(adapters.items(), adapters):
        (tmp_path / form / base).mkdir(parents=True)
        source = write_source(tmp_path / form / base, family, base)
        if form == base:
            plan_model(source, ExportOptions(adapter=adapter))
        else:
            kind = "GGUF file" if form == "gguf" else "folder of safetensors"
            with pytest.raises(SourceError, match=f"in another way; give the base as a {kind} too"):
                plan_model(source, ExportOptions(adapter=adapter))


def test_an_adapter_is_never_ignored_in_silence(tmp_path: Path) -> None:
    weights = tiny.random_weights()
    made = changes(weights)
    with pytest.raises(SourceError, match=r"is an adapter of base, which runs with its base alone: models.export"):
        export_model(write_folder(tmp_path / "adapter", made), tmp_path / "out")
    with pytest.raises(SourceError, match="is an adapter of another model"):
        export_model(write_file(tmp_path / "my-lora.gguf", made), tmp_path / "out")
    tiny.write_huggingface(tmp_path / "hf", weights)
    write_folder(tmp_path / "hf", made)
    tiny.write_gguf(tmp_path / "base.gguf", weights)
    for source, beside in (("hf", "hf"), ("base.gguf", "my-lora.gguf")):
        (left_out,) = plan_model(tmp_path / source, ExportOptions()).loaded.notes
        assert left_out.endswith(f"is not merged; --adapter {tmp_path / beside} merges it")
        (merging,) = plan_model(tmp_path / source, ExportOptions(adapter=tmp_path / beside)).loaded.notes
        assert merging.startswith("merging adapter")


def test_the_hashes_tell_a_merged_model_from_its_base_and_from_other_settings(tmp_path: Path) -> None:
    weights = tiny.random_weights()
    tiny.write_huggingface(tmp_path / "hf", weights)
    found = {plan_model(tmp_path / "hf", ExportOptions()).loaded.source.sha256}
    for alpha in (ALPHA, 2 * ALPHA):
        adapter = write_folder(tmp_path / "adapter", changes(weights), lora_alpha=alpha)
        found.add(plan_model(tmp_path / "hf", ExportOptions(adapter=adapter)).loaded.source.sha256)
    assert len(found) == 3
