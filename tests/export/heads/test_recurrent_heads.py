"""Drafting heads of each dialect through the exporter, against a plain numpy forward."""

from pathlib import Path

import made_heads
import numpy as np
import pytest
import tiny
from made_heads import Graphs, MadeHead, Reference, require_rows_of_reference

from edgespec.export.heads.convert import export_head, plan_head
from edgespec.export.heads.head_source import read_head
from edgespec.export.sources import read_source

EAGLE3 = [
    made_heads.eagle3("speculators"),
    made_heads.eagle3("speculators", "norm_before_residual"),
    made_heads.eagle3("speculators", "norm_before_fc"),
    made_heads.eagle3("speculators", "fc_norm"),
    made_heads.eagle3("speculators", "norm_output"),
    made_heads.eagle3(
        "speculators", "fc_norm", "norm_output", "norm_before_residual", head_norms=True, num_layers=2
    ),
    made_heads.eagle3("speculators", layers=(0, 3, 5), embedding=False),
    made_heads.eagle3("speculators", num_layers=2, window=4),
    made_heads.eagle3("specforge", layers=(0, 3, 5)),
    made_heads.eagle3("specforge", rows=tiny.VOCAB),
    made_heads.eagle3("original", embedding=False),
]
EAGLE = [
    made_heads.eagle(),
    made_heads.eagle(bias=False, embedding=False),
    made_heads.eagle("add_para_norm", num_layers=2, head=True),
]
RECURRENT = [*EAGLE3, *EAGLE]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_heads.write_target(tmp_path_factory.mktemp("target") / "hf")


def exported(
    made: MadeHead,
    target: Path,
    folder: Path,
    precision: str = "fp32",
    form: str = "cpu",
    *,
    has_trees: bool = False,
) -> Graphs:
    planned = plan_head(read_source(target), read_head(made.write(folder / "head")), precision, form=form)
    export_head(planned, folder / "out", "head")
    written = sum(path.stat().st_size for path in (folder / "out").iterdir())
    assert written <= planned.cost.write_bytes <= 1.02 * written + (1 << 15)
    return Graphs(folder / "out", has_trees=has_trees)


def text_rows(graphs: Graphs) -> tuple[np.ndarray, np.ndarray]:
    """Logits and states of a text, its first tokens in one pass and the others in another."""
    rng = np.random.default_rng(2)
    tokens, states = rng.integers(0, tiny.VOCAB, 12), rng.normal(size=(12, tiny.HIDDEN)).astype(np.float32)
    parts = [graphs.rows(tokens[:7], states[:7]), graphs.rows(tokens[7:], states[7:])]
    logits, states = zip(*parts, strict=True)
    return np.concatenate(logits), np.concatenate(states)


@pytest.mark.parametrize("made", RECURRENT, ids=lambda made: "-".join(sorted(made.switches)) or "plain")
def test_rows_of_a_head_are_those_of_a_plain_forward(made: MadeHead, target: Path, tmp_path: Path) -> None:
    weights = made_heads.target_weights()
    graphs = exported(made, target, tmp_path)
    reference = Reference(made, weights["model.embed_tokens.weight"], weights["lm_head.weight"])
    assert graphs.manifest.head.target_layers == made.layers
    assert graphs.manifest.sliding_window in (made.window, None)  # which a tree takes as a bias
    require_rows_of_reference(graphs, reference)


@pytest.mark.parametrize("form", ["cpu", "gpu"])
@pytest.mark.parametrize(
    "made",
    [made_heads.eagle3("specforge"), made_heads.eagle3(window=4), made_heads.eagle()],
    ids=["EAGLE-3", "EAGLE-3 with a window", "EAGLE"],
)
def test_the_tree_graph_gives_the_rows_of_the_other(
    made: MadeHead, form: str, target: Path, tmp_path: Path
) -> None:
    graphs = exported(made, target, tmp_path, form=form)
    rng = np.random.default_rng(2)
    tokens, states = rng.integers(0, tiny.VOCAB, 12), rng.normal(size=(12, tiny.HIDDEN)).astype(np.float32)
    found = []
    for each in (graphs, Graphs(tmp_path / "out", has_trees=True)):
        each.rows(tokens[:7], states[:7])  # the CPU's attention ignores positions where there is no past
        found.append(each.rows(tokens[7:], states[7:])[0])
    assert np.abs(found[0] - found[1]).max() < 1e-4


@pytest.mark.parametrize(
    ("precision", "form", "share"),
    [
        *(("auto", "cpu", 0.03), ("int8", "cpu", 0.03), ("int4", "cpu", 0.3), ("source", "cpu", 1e-5)),
        *(("auto", "gpu", 0.03), ("int4", "gpu", 0.3), ("fp16", "gpu", 0.01), ("fp32", "gpu", 1e-5)),
    ],
)
@pytest.mark.parametrize("made", [made_heads.eagle3("specforge", embedding=False), made_heads.eagle()])
def test_precisions_lose_what_they_may_in_both_forms(
    made: MadeHead, precision: str, form: str, share: float, target: Path, tmp_path: Path
) -> None:
    (tmp_path / "exact").mkdir()
    exact = text_rows(exported(made, target, tmp_path / "exact"))
    graphs = exported(made, target, tmp_path, precision, form)
    assert graphs.manifest.kv_cache.dtype == ("float16" if form == "gpu" and precision != "fp32" else "float32")
    for found, wanted in zip(text_rows(graphs), exact, strict=True):
        assert found.dtype == np.float32
        assert (found - wanted).std() < share * wanted.std()


def test_quantised_weights_that_a_head_borrows_stay_as_they_are(tmp_path: Path) -> None:
    """The vocabulary head of a target is most of what a draft reads; in 8 bits its blocks would take twice."""
    weights = made_heads.target_weights()
    layers = {"llama.block_count": made_heads.TARGET_LAYERS}
    tiny.write_gguf(tmp_path / "a.gguf", weights, storage="Q4_0", override=layers)
    source = read_head(made_heads.eagle().write(tmp_path / "head"))
    forms = {}
    for precision in ("auto", "int8"):
        planned = plan_head(read_source(tmp_path / "a.gguf"), source, precision)
        head = planned.plan.tensors["head"]
        forms[precision] = planned.rule.form(head, "head").bits
    assert forms == {"auto": 4, "int8": 8}
