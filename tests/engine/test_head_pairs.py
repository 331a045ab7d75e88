"""Pairs of a target and a drafting head: exported, checked on the target's own text, and run."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import made_heads
import numpy as np
import pytest
import tiny
from double import Double

from edgespec import load
from edgespec.cli.main import main
from edgespec.engine import pair_export
from edgespec.engine.pair_export import PairHalf, add_forms, export_pair
from edgespec.errors import SourceError, UsageError, require_context
from edgespec.export.convert import export_model
from edgespec.manifest import read_manifest
from edgespec.setup.head_target import HeadAgreement, _compare, measure_agreement
from edgespec.setup.open_model import open_decoder
from edgespec.setup.pair import DRAFTER, TARGET
from edgespec.setup.snapshot import LocalSource
from edgespec.types import Logits, TokenIds

WEIGHTS = made_heads.quiet(made_heads.target_weights())


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    tiny.write_huggingface(folder / "target", WEIGHTS, config=made_heads.target_config())
    made_heads.agreeing_eagle3(WEIGHTS, rows=tiny.VOCAB).write(folder / "head")
    made_heads.eagle3("specforge").write(folder / "stranger")
    return folder


def half(part: str, path: Path, **how: object) -> PairHalf:
    return PairHalf(part=part, source=LocalSource(path=path), **how)  # type: ignore[arg-type]


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_export, "check_if_here", lambda *arguments: None)


@pytest.fixture(scope="module")
def pair(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair") / "pair"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_export, "check_if_here", lambda *arguments: None)
        export_pair(
            half(TARGET, sources / "target"), half(DRAFTER, sources / "head"), folder, open_decoder=open_decoder
        )
    return folder


def test_the_target_gives_the_hidden_states_that_the_head_reads_and_no_more(pair: Path) -> None:
    head = read_manifest(pair / DRAFTER).head
    assert head is not None
    assert read_manifest(pair / TARGET).hidden_layers == tuple(sorted({*head.target_layers}))


@pytest.mark.slow
def test_a_head_that_agrees_is_installed_and_one_that_does_not_is_refused_with_the_share(
    pair: Path, sources: Path, tmp_path: Path, unmeasured: None
) -> None:
    agreement = measure_agreement(pair / TARGET, pair / DRAFTER)
    assert agreement.num_tokens == 200
    assert agreement.share > 0.5
    target, stranger = half(TARGET, sources / "target"), half(DRAFTER, sources / "stranger")
    with pytest.raises(SourceError, match=r"its first token is the target's at \d+% of 200 places") as found:
        export_pair(target, stranger, tmp_path / "pair", open_decoder=open_decoder)
    assert found.value.exit_code == 3
    assert list(tmp_path.iterdir()) == []
    export_pair(target, stranger, tmp_path / "pair")  # --no-check


class AfterOne(Double):
    """A target and a head in one, whose next token is always 1."""

    context_length = 10

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        require_context(len(tokens), self.context_length)
        return np.array([[0.0, 1.0, 0.0]], np.float32)


@pytest.mark.parametrize(("num_prompt", "num_places"), [(3, 4), (8, 3), (10, 1), (11, 0), (30, 0)])
def test_a_head_is_checked_as_far_as_its_targets_context_reaches(num_prompt: int, num_places: int) -> None:
    model: Any = AfterOne()
    assert _compare(model, model, np.zeros(num_prompt, np.int32), 4, []) == HeadAgreement(num_places, num_places)


def test_one_text_with_and_without_the_head(pair: Path) -> None:
    with load(pair / TARGET, drafter="none", deterministic=True) as plain:
        wanted = plain.generate("A heron in the shallows", max_tokens=40).text
    with load(pair, deterministic=True) as engine:
        found = engine.generate("A heron in the shallows", max_tokens=40)
    assert found.text == wanted


def test_a_form_of_a_head_is_added_from_its_source_alone(pair: Path, sources: Path) -> None:
    target = half(TARGET, sources / "target")
    gpu = [half(TARGET, sources / "target", form="gpu"), half(DRAFTER, sources / "head", form="gpu")]
    added = add_forms(pair, target, gpu)
    assert [path.name for path in added] == ["target-gpu", "drafter-gpu"]
    assert read_manifest(added[0]).hidden_layers == read_manifest(pair / TARGET).hidden_layers
    assert read_manifest(added[1]).head == read_manifest(pair / DRAFTER).head
    assert measure_agreement(*added).share > 0.5
    with pytest.raises(UsageError, match="is not the source of the pair's drafter"):
        add_forms(pair, target, [half(DRAFTER, sources / "stranger", form="gpu")])


def test_a_further_form_of_a_head_is_planned_for_the_target_of_its_pair(
    pair: Path, sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = shutil.copytree(pair, tmp_path / "pair", ignore=shutil.ignore_patterns("*-gpu"))
    names = [str(sources / "target"), "--drafter", str(sources / "head"), "--drafter-form", "gpu"]
    assert main(["export", *names, "--add-to", str(pair), "--dry-run", "--json"]) == 0
    [plan] = json.loads(capsys.readouterr().out)
    assert plan["form"] == "gpu"


def test_an_npu_gives_a_head_no_hidden_states(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the npu form does not give"):
        export_pair(
            half(TARGET, sources / "target", form="npu"), half(DRAFTER, sources / "head"), tmp_path / "pair"
        )
    assert list(tmp_path.iterdir()) == []


def test_the_command_plans_and_exports_a_head(
    sources: Path, tmp_path: Path, unmeasured: None, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "export",
        str(sources / "target"),
        "--drafter",
        str(sources / "head"),
        "--output",
        str(tmp_path / "p"),
    ]
    assert main([*command, "--dry-run", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert [plan["precision"] for plan in plans] == ["source", "int8"]
    assert list(tmp_path.iterdir()) == []
    assert main([*command, "--drafter-precision", "fp32", "--no-check"]) == 0
    assert read_manifest(tmp_path / "p" / DRAFTER).precision == "fp32"


REFUSED = {
    "another vocabulary": (made_heads.eagle3("specforge"), {"vocab_size": 32000}, "vocabulary of 32000 tokens"),
    "another hidden size": (
        made_heads.eagle3("specforge"),
        {"target_hidden_size": 4096},
        "states of 4096 numbers",
    ),
    "another kind": (made_heads.eagle3("speculators"), {"speculators_model_type": "another"}, "says another"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("way", [["--dry-run"], []], ids=["planned", "exported"])
def test_a_head_of_another_target_is_refused_by_the_command(
    name: str, way: list[str], sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, change, said = REFUSED[name]
    folder = made.write(tmp_path / "head")
    (folder / "config.json").write_text(json.dumps(made.config | change))
    output = tmp_path / "out" / "pair"
    code = main(["export", str(sources / "target"), "--drafter", str(folder), "--output", str(output), *way])
    assert code == 3
    assert said in capsys.readouterr().err
    assert not output.parent.exists()


def test_a_head_is_no_model_by_itself(sources: Path, tmp_path: Path) -> None:
    for made in (made_heads.eagle(), made_heads.eagle3("speculators")):
        folder = made.write(tmp_path / made.config["architectures"][0])
        with pytest.raises(SourceError, match=r"is a drafting head, .*: edgespec export TARGET --drafter"):
            export_model(folder, tmp_path / "out")
    with pytest.raises(SourceError, match=r"is a drafting head"):
        load(sources / "target", drafter=str(sources / "head"), home=tmp_path / "home")


def test_a_pickled_head_is_refused_by_the_command(
    sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made_heads.eagle3("original").write(tmp_path / "head")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    code = main(["export", str(sources / "target"), "--drafter", str(folder), "--output", str(tmp_path / "out")])
    assert code == 3
    assert "is a pickle, which is never opened" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_head_with_another_tokenizer_is_refused(sources: Path, tmp_path: Path) -> None:
    folder = made_heads.eagle3("specforge").write(tmp_path / "head")
    text = (sources / "target" / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text)
    planned = half(DRAFTER, folder)
    export = (half(TARGET, sources / "target"), planned)
    pair_export.plan_pair(*export, is_checked=False)  # its target's own
    stated = json.loads(text)
    vocabulary = stated["model"]["vocab"]
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    moved = [*pieces[:100], *pieces[200:], *pieces[100:200]]
    stated["model"]["vocab"] = {piece: number for number, piece in enumerate(moved)}
    (folder / "tokenizer.json").write_text(json.dumps(stated))
    with pytest.raises(pair_export.ModelError, match="a tokenizer of which"):
        pair_export.plan_pair(*export, is_checked=False)


@pytest.mark.slow
def test_the_command_exports_a_models_own_layers_as_its_head(
    tmp_path: Path, unmeasured: None, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = made_heads.quiet(made_heads.target_weights(bias=True))
    made = made_heads.agreeing_mtp()
    config = made_heads.target_config("mimo") | {"num_nextn_predict_layers": 1}
    tiny.write_huggingface(tmp_path / "mimo", weights | made.tensors, config=config)
    command = ["export", str(tmp_path / "mimo"), "--drafter", "mtp", "--output"]
    assert main([*command, str(tmp_path / "pair"), "--check"]) == 0
    assert "for multi-token prediction; --drafter mtp exports them" in capsys.readouterr().err
    head = read_manifest(tmp_path / "pair" / DRAFTER)
    assert (head.name, head.head.method if head.head else None) == ("MTP of mimo", "mtp")
    assert measure_agreement(tmp_path / "pair" / TARGET, tmp_path / "pair" / DRAFTER).share > 0.5
    tiny.write_huggingface(tmp_path / "plain", made_heads.target_weights(), config=made_heads.target_config())
    assert main(["export", str(tmp_path / "plain"), "--drafter", "mtp", "--output", str(tmp_path / "no")]) == 3
    assert "no layers for multi-token prediction" in capsys.readouterr().err


def test_trimming_is_for_heads_with_all_rows(
    sources: Path, tmp_path: Path, unmeasured: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("the heron and the tide " * 50)
    made_heads.eagle().write(tmp_path / "eagle")
    trim = [
        "--vocab-subset",
        "80",
        "--vocab-corpus",
        str(tmp_path / "text.txt"),
        "--output",
        str(tmp_path / "out"),
    ]
    command = ["export", str(sources / "target"), "--no-check", "--drafter"]
    assert main([*command, str(sources / "target"), *trim]) == 2
    assert "a model that runs by itself" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "eagle"), *trim]) == 0
    assert len(np.load(tmp_path / "out" / DRAFTER / "vocab_subset.npy")) == 80


@pytest.mark.slow
def test_a_head_of_a_real_shape_drafts_for_its_target(
    tmp_path: Path, unmeasured: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of SmolLM2-135M with six layers, and a head over a part of its vocabulary."""
    rng = np.random.default_rng(0)
    hidden, inner, vocabulary, num_layers = 576, 1536, 49152, 6
    sizes = {
        "q_proj": (hidden, hidden),
        "k_proj": (192, hidden),
        "v_proj": (192, hidden),
        "o_proj": (hidden, hidden),
    }
    shapes = {f"self_attn.{name}.weight": shape for name, shape in sizes.items()}
    shapes |= {f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (hidden, inner)
    weights = {"model.embed_tokens.weight": rng.normal(0, 1, (vocabulary, hidden)).astype(np.float32)}
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    for number in range(num_layers):
        prefix = f"model.layers.{number}."
        weights |= {f"{prefix}{norm}.weight": np.ones(hidden, np.float32)
                    for norm in ("input_layernorm", "post_attention_layernorm")}  # fmt: skip
        for name, (rows, columns) in shapes.items():
            weights[prefix + name] = rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)
    order = np.arange(vocabulary)
    order[:2048] = rng.permutation(2048)  # where its texts stay
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"][order]
    weights = made_heads.quiet(weights)
    sized = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": 9, "num_key_value_heads": 3}
    tiny.write_huggingface(tmp_path / "hf", weights, config=made_heads.target_config() | sized)
    made_heads.agreeing_eagle3(weights, 9, rows=2048).write(tmp_path / "head")
    command = ["export", str(tmp_path / "hf"), "--drafter", str(tmp_path / "head"), "--precision", "int8"]
    assert main([*command, "--output", str(tmp_path / "pair")]) == 0
    found = re.search(r"the target's at (\d+)% of 200 places", capsys.readouterr().err)
    assert found is not None
    assert int(found[1]) > 90
    with load(tmp_path / "pair") as engine:
        assert engine.generate("A heron", max_tokens=20).text is not None
