"""What heads' files leave out, state wrongly, or mean otherwise than others: read right, or refused in words."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_heads
import numpy as np
import pytest
import tiny
from made_heads import Graphs, MadeHead, Reference, require_rows_of_reference
from safetensors.numpy import save_file

from edgespec.errors import EdgeSpecError, SourceError, UsageError, VocabularyMismatch
from edgespec.export.heads.convert import export_head, plan_head
from edgespec.export.heads.dialects import DIALECTS, is_head
from edgespec.export.heads.head_source import HeadPlan, read_head
from edgespec.export.heads.mtp import read_mtp
from edgespec.export.options import ExportOptions, Trimming
from edgespec.export.plan import plan_model
from edgespec.export.sources import LoadedSource, read_source

WEIGHTS = made_heads.target_weights()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedSource:
    return read_source(made_heads.write_target(tmp_path_factory.mktemp("target") / "hf"))


def plan_of(made: MadeHead, target: LoadedSource, folder: Path) -> HeadPlan:
    return plan_head(target, read_head(made.write(folder / "head"))).plan


def without(made: MadeHead, *names: str) -> MadeHead:
    return replace(made, tensors={name: value for name, value in made.tensors.items() if name not in names})


def altered(made: MadeHead, **config: Any) -> MadeHead:
    kept = {key: value for key, value in (made.config | config).items() if value is not None}
    return replace(made, config=kept)


def test_a_trimmed_vocabulary_head_that_is_missing_is_not_made_up(target: LoadedSource, tmp_path: Path) -> None:
    made = without(made_heads.eagle3("specforge"), "lm_head.weight")
    with pytest.raises(SourceError, match=r"no tensor lm_head\.weight, though its draft_vocab_size is 100"):
        plan_of(made, target, tmp_path)


@pytest.mark.parametrize("size", [tiny.VOCAB, None])
def test_a_missing_vocabulary_head_of_all_tokens_is_the_targets(
    target: LoadedSource, tmp_path: Path, size: int | None
) -> None:
    made = altered(made_heads.eagle3("specforge", rows=tiny.VOCAB), draft_vocab_size=size)
    plan = plan_of(without(made, "lm_head.weight"), target, tmp_path)
    assert plan.borrowed == ("vocabulary head",)
    assert plan.tensors["head"] == target.head
    assert plan.tokens is None


def test_a_tied_target_lends_its_embedding_once(tmp_path: Path) -> None:
    tied = read_source(made_heads.write_target(tmp_path / "hf", tied=True))
    plan = plan_of(made_heads.eagle(embedding=False), tied, tmp_path)
    assert plan.borrowed == ("embedding", "vocabulary head")
    assert "head" not in plan.tensors


@pytest.mark.parametrize("left", [("d2t",), ("t2d",)])
def test_one_list_of_tokens_is_enough(target: LoadedSource, tmp_path: Path, left: tuple[str]) -> None:
    made = made_heads.eagle3("specforge")
    plan = plan_of(without(made, *left), target, tmp_path)
    assert plan.tokens is not None
    assert np.array_equal(plan.tokens, made.tensors["d2t"] + np.arange(made_heads.ROWS))


def test_rows_that_are_not_in_the_order_of_their_tokens_are_sorted(target: LoadedSource, tmp_path: Path) -> None:
    made, order = made_heads.eagle3("original"), np.random.default_rng(0).permutation(made_heads.ROWS)
    tokens = (made.tensors["d2t"] + np.arange(made_heads.ROWS))[order]
    mixed = made.tensors | {
        "lm_head.weight": made.tensors["lm_head.weight"][order],
        "d2t": (tokens - np.arange(made_heads.ROWS)).astype(np.int64),
    }
    plans = []
    for name, each in (("one", made), ("other", replace(made, tensors=mixed))):
        (tmp_path / name).mkdir()
        plans.append(plan_of(each, target, tmp_path / name))
    rows = [np.concatenate(list(plan.tensors["head"].floats())) for plan in plans]
    assert np.array_equal(*rows)
    assert np.array_equal(plans[0].tokens, plans[1].tokens)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"d2t": np.full(made_heads.ROWS, 200)}, "name tokens up to 299, and the target has 269"),
        ({"d2t": np.arange(made_heads.ROWS)[::-1].copy()}, "name a token twice"),
        ({"d2t": np.zeros(made_heads.ROWS, np.int64)}, "contradict each other"),
        ({"d2t": np.zeros(90, np.int64)}, "name 90 tokens, and its vocabulary head has 100 rows"),
        ({"t2d": np.ones(tiny.VOCAB, bool)}, "contradict each other"),
    ],
)
def test_lists_of_tokens_that_cannot_be_right_are_refused(
    target: LoadedSource, tmp_path: Path, change: dict[str, np.ndarray], said: str
) -> None:
    made = made_heads.eagle3("specforge")
    with pytest.raises(SourceError, match=said):
        plan_of(replace(made, tensors=made.tensors | change), target, tmp_path)


def test_a_trimmed_head_without_a_list_of_tokens_is_refused(target: LoadedSource, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="neither d2t nor t2d"):
        plan_of(without(made_heads.eagle3("specforge"), "d2t", "t2d"), target, tmp_path)


@pytest.mark.parametrize("place", ["top", "eagle_config"])
def test_layers_on_top_count_from_the_embedding_and_within_eagle_config_they_do_not(
    target: LoadedSource, tmp_path: Path, place: str
) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    made = made_heads.eagle3("specforge")
    plan = plan_of(altered(made, **(ids if place == "top" else {place: ids})), target, tmp_path)
    assert plan.head.target_layers == ((0, 2, 4) if place == "top" else (1, 3, 5))


def test_deepseeks_eagle3_reads_five_layers_that_it_names_itself(target: LoadedSource, tmp_path: Path) -> None:
    made = made_heads.eagle3("original", layers=(0, 1, 2, 3, 4), rows=tiny.VOCAB, head_norms=True)
    tensors = {name.replace("midlayer.", "layers.0."): value for name, value in made.tensors.items()}
    config = {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "head_dim": made_heads.HEAD_DIM}
    config |= {"target_layer_ids": [0, 1, 2, 3, 4], "eagle_config": None, "draft_vocab_size": None}
    made = altered(replace(made, tensors=tensors), **config)
    assert plan_of(made, target, tmp_path).head.target_layers == (0, 1, 2, 3, 4)


def test_layers_that_the_matrix_does_not_read_are_told_from_another_target(
    target: LoadedSource, tmp_path: Path
) -> None:
    made = made_heads.eagle3("specforge", layers=(0, 1, 2, 3))
    with pytest.raises(
        SourceError, match="not the hidden states of 3 layers, those that EAGLE-3 reads by default"
    ):
        plan_of(altered(made, eagle_config=None), target, tmp_path)


@pytest.mark.parametrize("ids", [[0, 3, 5], [1, 3, 7], ["1", 3, 5], "all"])
def test_layers_that_a_target_does_not_have_are_refused(target: LoadedSource, tmp_path: Path, ids: Any) -> None:
    made = altered(made_heads.eagle3("specforge"), eagle_aux_hidden_state_layer_ids=ids)
    with pytest.raises(SourceError, match=r"made for another|wanted numbers of layers|reads the embedding"):
        plan_of(made, target, tmp_path)


def test_a_head_of_the_state_behind_the_final_norm_has_no_matrix_that_fuses(
    target: LoadedSource, tmp_path: Path
) -> None:
    made = altered(made_heads.eagle3("specforge"), eagle_config={"use_aux_hidden_state": False})
    plan = plan_of(without(made, "fc.weight"), target, tmp_path)
    assert plan.head.target_layers == (made_heads.TARGET_LAYERS,)
    assert plan.head.fuse_graph is None


def test_the_number_of_layers_is_that_of_the_file(target: LoadedSource, tmp_path: Path) -> None:
    """EAGLE3-Vicuna-13B says that it has 40 layers, and has one."""
    plan = plan_of(altered(made_heads.eagle3("original"), num_hidden_layers=40), target, tmp_path)
    assert plan.kv_cache.num_layers == 1


def test_settings_that_speculators_leaves_out_are_those_that_transformers_assumes(
    target: LoadedSource, tmp_path: Path
) -> None:
    made = made_heads.eagle3("speculators")
    inner = dict(made.config["transformer_layer_config"])
    assert inner.pop("rms_norm_eps") == 1e-6
    for key in ("rope_theta", "max_position_embeddings", "num_hidden_layers", "intermediate_size", "hidden_act"):
        del inner[key]
    made = altered(made, transformer_layer_config=inner)
    export_head(plan_head(target, read_head(made.write(tmp_path / "head")), "fp32"), tmp_path / "out", "head")
    reference = Reference(made, WEIGHTS["model.embed_tokens.weight"], WEIGHTS["lm_head.weight"], theta=1e4)
    rng = np.random.default_rng(0)
    tokens, states = rng.integers(0, tiny.VOCAB, 9), rng.normal(size=(9, tiny.HIDDEN)).astype(np.float32)
    assert (
        np.abs(Graphs(tmp_path / "out").rows(tokens, states)[0] - reference.rows(tokens, states)[0]).max() < 1e-4
    )


OTHER_TARGET = [
    (altered(made_heads.eagle3("specforge"), vocab_size=32000), VocabularyMismatch, "vocabulary of 32000 tokens"),
    (
        altered(made_heads.eagle3("specforge"), target_hidden_size=4096),
        SourceError,
        "hidden states of 4096 numbers",
    ),
    (
        replace(
            made_heads.eagle3("original"),
            tensors=made_heads.eagle3("original").tensors | {"fc.weight": np.zeros((64, 3 * 96), np.float32)},
        ),
        SourceError,
        "hidden states of 96 numbers",
    ),
    (
        replace(
            made_heads.eagle(),
            tensors=made_heads.eagle().tensors | {"embed_tokens.weight": np.zeros((300, 64), np.float32)},
        ),
        VocabularyMismatch,
        "vocabulary of 300 tokens",
    ),
    (
        replace(
            made_heads.eagle3("original"),
            tensors=made_heads.eagle3("original").tensors | {"t2d": np.ones(300, bool)},
        ),
        VocabularyMismatch,
        "t2d has 300 entries",
    ),
]


@pytest.mark.parametrize(("made", "kind", "said"), OTHER_TARGET, ids=[said for *_, said in OTHER_TARGET])
def test_a_head_of_another_target_is_refused(
    target: LoadedSource, tmp_path: Path, made: MadeHead, kind: type[EdgeSpecError], said: str
) -> None:
    with pytest.raises(kind, match=said) as found:
        plan_of(made, target, tmp_path)
    assert found.value.exit_code == 3
    assert "another model" in str(found.value)


UNREADABLE = {
    "of another kind": (altered(made_heads.eagle3("speculators"), speculators_model_type="flow"), "says flow"),
    "a parallel one without features of its mask": (
        altered(made_heads.eagle3("speculators"), speculators_model_type="peagle"),
        "no tensor mask_hidden",
    ),
    "a tensor is missing": (without(made_heads.eagle3("original"), "norm.weight"), "no tensor norm.weight"),
    "a layer is missing": (
        without(made_heads.eagle(), "layers.0.mlp.up_proj.weight"),
        "no tensor layers.0.mlp.up_proj.weight",
    ),
    "a tensor is left over": (
        replace(
            made_heads.eagle(), tensors=made_heads.eagle().tensors | {"extra.weight": np.ones((2, 2), np.float32)}
        ),
        "extra.weight, which no EAGLE head uses",
    ),
    "a norm without its switch": (
        altered(made_heads.eagle3("specforge", "fc_norm"), fc_norm=None),
        "fc_norm.0.weight, which no EAGLE-3 head uses",
    ),
    "a switch without its norm": (
        altered(made_heads.eagle3("specforge"), norm_before_fc=True),
        "no tensor input_norm.weight",
    ),
    "two switches": (
        altered(made_heads.eagle3("specforge", "fc_norm"), norm_before_fc=True),
        "both norm_before_fc and fc_norm",
    ),
    "a window of unknown length": (
        altered(made_heads.eagle(), layer_types=["sliding_attention"]),
        "sliding_window is",
    ),
    "a bias": (altered(made_heads.eagle(), mlp_bias=True), "mlp_bias is true"),
    "an activation": (altered(made_heads.eagle(), hidden_act="relu"), "hidden_act is relu"),
    "heads that do not fit": (altered(made_heads.eagle(), num_key_value_heads=4), "the file is damaged"),
    "a shape": (
        replace(
            made_heads.eagle(),
            tensors=made_heads.eagle().tensors | {"layers.0.mlp.up_proj.weight": np.ones((81, 64), np.float32)},
        ),
        "81×64, wanted 80×64",
    ),
    "settings that are no object": (
        altered(made_heads.eagle3("speculators"), transformer_layer_config=[1]),
        "transformer_layer_config is .1., wanted an object",
    ),
    "layer types that are no list": (altered(made_heads.eagle(), layer_types=5), "cannot be understood"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_refused_in_words(target: LoadedSource, tmp_path: Path, name: str) -> None:
    made, said = UNREADABLE[name]
    with pytest.raises(SourceError, match=said):
        plan_of(made, target, tmp_path)


def test_pickles_are_never_opened(target: LoadedSource, tmp_path: Path) -> None:
    made = made_heads.eagle()
    folder = made.write(tmp_path / "head")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    for path in (folder, folder / "pytorch_model.bin"):
        with pytest.raises(SourceError, match=r"is a pickle, which is never opened.*safetensors"):
            read_head(path)
    assert is_head(folder / "pytorch_model.bin")


def test_a_head_in_pieces_is_refused_in_words(tmp_path: Path) -> None:
    folder = made_heads.eagle3("original").write(tmp_path / "head")
    config = (folder / "config.json").read_text()
    (folder / "config.json").unlink()
    for path in (folder, folder / "model.safetensors"):
        with pytest.raises(SourceError, match=r"has no config\.json"):
            read_head(path)
    (folder / "config.json").write_text(config[:40])
    with pytest.raises(SourceError, match="is not JSON"):
        read_head(folder)
    (folder / "config.json").write_text(config)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceError, match="ends early"):
        read_head(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(SourceError, match="has no safetensors file"):
        read_head(folder)
    with pytest.raises(SourceError, match="does not exist"):
        read_head(tmp_path / "nowhere")


def test_a_config_of_too_many_brackets_is_no_head_and_no_json(tmp_path: Path) -> None:
    folder = made_heads.eagle3("original").write(tmp_path / "head")
    (folder / "config.json").write_text("[" * 100_000)
    assert not is_head(folder)
    with pytest.raises(SourceError, match=r"config\.json is not JSON"):
        read_head(folder)


@pytest.mark.skipif(os.name == "nt", reason="needs named pipes, which Windows lacks")
def test_weights_that_are_a_pipe_are_not_waited_for(tmp_path: Path) -> None:
    folder = made_heads.eagle3("original").write(tmp_path / "head")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(SourceError, match="is not a regular file"):
        read_head(folder)


def test_a_file_with_a_name_of_its_own_is_found(target: LoadedSource, tmp_path: Path) -> None:
    folder = made_heads.eagle().write(tmp_path / "head")
    (folder / "model.safetensors").rename(folder / "eagle.safetensors")
    for path in (folder, folder / "eagle.safetensors"):
        assert plan_head(target, read_head(path)).plan.head.method == "eagle"
    save_file(made_heads.eagle().tensors, folder / "more.safetensors")
    with pytest.raises(SourceError, match="2 safetensors files and no index; name one"):
        read_head(folder)


def test_heads_are_told_from_models(tmp_path: Path) -> None:
    model = made_heads.write_target(tmp_path / "model")
    assert not is_head(model)
    assert not is_head(tmp_path / "nowhere")
    for number, made in enumerate(
        [made_heads.eagle(), *map(made_heads.eagle3, ("speculators", "specforge", "original"))]
    ):
        assert is_head(made.write(tmp_path / f"head-{number}"))


def mimo(folder: Path, made: MadeHead) -> Path:
    """A MiMo checkpoint with its layer for multi-token prediction."""
    weights = made_heads.target_weights(bias=True) | made.tensors
    config = made_heads.target_config("mimo") | {"num_nextn_predict_layers": 1}
    tiny.write_huggingface(folder, weights, config=config, shards=2)
    return folder


def test_layers_for_multi_token_prediction_are_a_head_and_the_model_is_a_qwen2(tmp_path: Path) -> None:
    made = made_heads.mtp()
    path, weights = mimo(tmp_path / "hf", made), made_heads.target_weights(bias=True)
    target = read_source(path)
    assert target.num_left_out == len(made.tensors)
    assert not is_head(path)
    export_head(plan_head(target, read_mtp(path), "fp32"), tmp_path / "out", "head")
    reference = Reference(
        made, weights["model.embed_tokens.weight"], weights["lm_head.weight"], eps=tiny.EPS, theta=tiny.THETA
    )
    graphs = Graphs(tmp_path / "out")
    assert graphs.manifest.head.target_layers == (made_heads.TARGET_LAYERS - 1,)
    require_rows_of_reference(graphs, reference)


def test_layers_of_qwen_for_multi_token_prediction_have_gates_and_read_the_normed_state(tmp_path: Path) -> None:
    """In a file of their own, for a target that may be another file."""
    made, weights = made_heads.mtp_of_qwen(), made_heads.target_weights()
    text = made_heads.target_config() | {"model_type": "qwen3_5_text", "partial_rotary_factor": 0.25}
    alone = replace(made, config={"model_type": "qwen3_5", "text_config": text}).write(tmp_path / "mtp")
    assert is_head(alone)
    for given in (alone, next(alone.glob("*.safetensors"))):  # without its target
        with pytest.raises(SourceError, match=r"which runs beside its target alone; .*--drafter"):
            plan_model(given, ExportOptions(precision="fp32"))
    target = read_source(made_heads.write_target(tmp_path / "hf"))
    export_head(plan_head(target, read_head(alone), "fp32"), tmp_path / "out", "head")
    reference = Reference(
        made, weights["model.embed_tokens.weight"], weights["lm_head.weight"], eps=tiny.EPS, theta=tiny.THETA
    )
    graphs = Graphs(tmp_path / "out")
    assert graphs.manifest.head.target_layers == (made_heads.TARGET_LAYERS,)
    require_rows_of_reference(graphs, reference)
    plain = {"mtp.layers.0.self_attn.q_proj.weight": np.ones((64, 64), np.float32)}
    ungated = replace(made, config={}, tensors=made.tensors | plain).write(tmp_path / "ungated")
    with pytest.raises(SourceError, match=r"q_proj.weight is 64×64, wanted 128×64"):
        plan_head(target, read_head(ungated))


@pytest.mark.parametrize("is_stated", [True, False])
def test_a_bias_that_an_eagle_head_of_speculators_states_is_in_its_file(
    target: LoadedSource, tmp_path: Path, is_stated: bool
) -> None:
    made = made_heads.eagle()
    names = {"fc.weight": "fusion_fc.weight", "embed_tokens.weight": "embed_tokens.weight"}
    names |= {
        name: name.replace("layers.0", "transformer") for name in made.tensors if name.startswith("layers.0")
    }
    config = {"speculators_model_type": "eagle", "fusion_bias": is_stated, "transformer_layer_config": made.config}
    tensors = {name: made.tensors[old] for old, name in names.items()}
    made = replace(made, tensors=tensors, config=config)
    if is_stated:
        with pytest.raises(SourceError, match=r"no tensor fusion_fc\.bias"):
            plan_of(made, target, tmp_path)
    else:
        assert "join_bias" not in plan_of(made, target, tmp_path).tensors


LAYER = "model.mtp_layers.0."
MTP_PARTS: dict[str, tuple[tuple[str, ...], dict[str, np.ndarray], str]] = {
    "a bias is missing": ((f"{LAYER}self_attn.q_proj.bias",), {}, "no tensor mtp_layers.0.self_attn.q_proj.bias"),
    "all biases are missing": (
        tuple(f"{LAYER}self_attn.{part}_proj.bias" for part in "qkv"),
        {},
        "no tensor mtp_layers.0.self_attn.q_proj.bias",
    ),
    "a norm is left over": (
        (),
        {f"{LAYER}self_attn.extra.weight": np.ones((4, 4), np.float32)},
        "extra.weight, which no MTP of MiMo head uses",
    ),
    "one norm of heads": (
        (),
        {f"{LAYER}self_attn.q_norm.weight": np.ones(made_heads.HEAD_DIM, np.float32)},
        "no tensor mtp_layers.0.self_attn.k_norm.weight",
    ),
}


@pytest.mark.parametrize("name", MTP_PARTS)
def test_layers_for_multi_token_prediction_in_part_are_refused(name: str, tmp_path: Path) -> None:
    missing, more, said = MTP_PARTS[name]
    made = without(made_heads.mtp(), *missing)
    path = mimo(tmp_path / "hf", replace(made, tensors=made.tensors | more))
    with pytest.raises(SourceError, match=said):
        plan_head(read_source(path), read_mtp(path))


def test_a_second_layer_for_multi_token_prediction_is_left_out(tmp_path: Path) -> None:
    made = made_heads.mtp()
    second = {name.replace("layers.0", "layers.1"): value for name, value in made.tensors.items()}
    path = mimo(tmp_path / "hf", replace(made, tensors=made.tensors | second))
    assert plan_head(read_source(path), read_mtp(path)).plan.kv_cache.num_layers == 1


def test_a_model_without_layers_for_multi_token_prediction_says_so(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no layers for multi-token prediction"):
        read_mtp(made_heads.write_target(tmp_path / "hf"))
    tiny.write_gguf(tmp_path / "a.gguf", tiny.random_weights())
    with pytest.raises(SourceError, match="from a folder with safetensors"):
        read_mtp(tmp_path / "a.gguf")


def test_a_vocabulary_head_is_trimmed_to_frequent_tokens(target: LoadedSource, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the thin tin hat the then in an inn " * 20)
    trimming = Trimming(num_tokens=60, corpus=tmp_path / "text.txt")
    source = read_head(made_heads.eagle().write(tmp_path / "head"))
    plan = plan_head(target, source, trimming=trimming).plan
    whole = np.concatenate(list(target.head.floats()))
    assert plan.tokens is not None
    assert len(plan.tokens) == 60
    assert np.array_equal(np.concatenate(list(plan.tensors["head"].floats())), whole[plan.tokens])
    trimmed = read_head(made_heads.eagle3("specforge").write(tmp_path / "trimmed"))
    with pytest.raises(UsageError, match="trimmed already, to 100 tokens"):
        plan_head(target, trimmed, trimming=trimming)


@pytest.mark.parametrize(("precision", "form"), [("w8a16", "cpu"), ("int2", "cpu"), ("fp16", "npu")])
def test_precisions_and_forms_that_heads_do_not_have_are_refused(
    target: LoadedSource, tmp_path: Path, precision: str, form: str
) -> None:
    source = read_head(made_heads.eagle().write(tmp_path / "head"))
    with pytest.raises(UsageError, match="a drafting head has no"):
        plan_head(target, source, precision, form=form)


def test_the_settings_of_a_head_are_read_from_json(tmp_path: Path) -> None:
    folder = made_heads.eagle().write(tmp_path / "head")
    (folder / "config.json").write_text(json.dumps([1, 2]))
    with pytest.raises(SourceError, match="does not hold a JSON object"):
        read_head(folder)


def test_the_page_of_heads_names_every_format() -> None:
    page = (Path(__file__).parents[3] / "docs" / "heads.md").read_text(encoding="utf-8")
    names = [dialect.name.removesuffix(" (speculators)") for dialect in DIALECTS]
    assert [name for name in names if name not in page] == []


def test_file_of_a_head_without_its_settings_is_named(tmp_path: Path) -> None:
    save_file({"mtp.fc.weight": np.zeros((2, 4), np.float32)}, tmp_path / "mtp.safetensors")
    with pytest.raises(SourceError, match=r"mtp\.safetensors has no config\.json beside it"):
        read_head(tmp_path / "mtp.safetensors")
