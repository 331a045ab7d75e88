"""Drafting heads of each dialect through the exporter, against a plain numpy forward."""

from dataclasses import replace
from pathlib import Path

import made_heads
import numpy as np
import onnx
import pytest
import tiny
from draft_runs import draft_greedily
from head_folders import random_features, read_subset_of, store_of
from made_heads import Graphs, MadeHead, Reference, require_rows_of_reference

from edgespec.errors import SourceError, UsageError
from edgespec.export.heads import convert
from edgespec.export.heads.convert import export_head, plan_head
from edgespec.export.heads.head_source import read_head
from edgespec.export.sources import read_source
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.heads import HeadDecoder, open_head
from edgespec.types import TokenIds, append

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


PARALLEL = [
    made_heads.eagle3("speculators", num_layers=2, num_proposed=5),
    made_heads.eagle3("specforge", "fc_norm", num_proposed=8),
]


class Drafting:
    """An exported P-EAGLE head, its reference, and the features of a long text."""

    def __init__(self, made: MadeHead, target: Path, folder: Path) -> None:
        self.folder, self.device = folder / "out", find_device("cpu")
        self.manifest = exported(made, target, folder).manifest
        weights = made_heads.target_weights()
        self.reference = Reference(made, weights["model.embed_tokens.weight"], weights["lm_head.weight"])
        self.features = random_features(made.layers, tiny.HIDDEN, 60)
        self.store = store_of(self.manifest, np.zeros(1, np.int32), self.features)
        self.subset = read_subset_of(self.folder, self.manifest)
        self.num_tokens = self.manifest.tokens_per_pass

    def open(self, *, deterministic: bool = False) -> HeadDecoder:
        device, subset = self.device, self.subset
        return open_head(self.folder, self.manifest, device, self.store, subset, deterministic=deterministic)

    def know(self, text: TokenIds) -> None:
        self.store.put(0, text[:-1], self.features[: len(text) - 1])

    def differences(self, text: TokenIds, rows: np.ndarray) -> float:
        wanted = self.reference.drafted(text, self.features[: len(text) - 1], self.num_tokens)
        return float(np.abs(rows[:, self.reference.tokens] - wanted[: len(rows)]).max())


@pytest.mark.parametrize(
    ("made", "deterministic"),
    [
        (PARALLEL[0], False),
        pytest.param(PARALLEL[0], True, marks=pytest.mark.slow),
        pytest.param(PARALLEL[1], False, marks=pytest.mark.slow),
    ],
    ids=["speculators", "speculators, deterministic", "SpecForge"],
)
def test_a_parallel_head_drafts_in_one_pass_over_prefill_rejection_and_going_on(
    made: MadeHead, deterministic: bool, target: Path, tmp_path: Path
) -> None:
    drafting = Drafting(made, target, tmp_path)
    head, text = drafting.open(deterministic=deterministic), np.arange(20, 40, dtype=np.int32)
    assert head.can.tokens_per_pass == drafting.num_tokens == made.num_proposed
    assert not head.begin(text, 99)  # no hidden states are known
    for num_accepted in (3, 0, drafting.num_tokens, 1):
        drafting.know(text)
        rows, drafted = draft_greedily(head, text, drafting.num_tokens)
        assert drafting.differences(text, rows) < 1e-4
        longer = append(text, drafted)
        assert head.begin(longer[:-2], 99) == 2  # goes on in the draft while the target verifies it
        assert not head.begin(append(longer, [1]), 99)
        assert np.abs(head.logits(longer[:-1], 1)[0] - rows[-1]).max() < 1e-6
        text = append(text, [*drafted[:num_accepted], 9])


def test_a_parallel_head_drafts_anew_once_it_may_read_more(target: Path, tmp_path: Path) -> None:
    drafting = Drafting(PARALLEL[0], target, tmp_path)
    head, text = drafting.open(), np.arange(20, 60, dtype=np.int32)
    drafting.know(text)
    assert head.begin(text, 99, 8)
    assert drafting.differences(text, head.logits(text, 1)) > 1e-2
    assert head.begin(text, 99)
    assert drafting.differences(text, head.logits(text, 1)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("made", PARALLEL[:1], ids=["speculators"])
def test_rows_of_a_parallel_head_are_equal_to_the_bit_however_a_text_is_cut(
    made: MadeHead, target: Path, tmp_path: Path
) -> None:
    drafting, text = Drafting(made, target, tmp_path), np.arange(20, 70, dtype=np.int32)
    drafting.know(text)
    whole, grown = (drafting.open(deterministic=True) for _ in range(2))
    for stop in (4, 9, 21, 22, 24, 40, 50):
        rows, _ = draft_greedily(grown, text[:stop], 5)
        whole.forget()
        assert np.array_equal(rows, draft_greedily(whole, text[:stop], 5)[0])


def test_a_parallel_head_without_a_mask_token_or_with_trees_is_refused(target: Path, tmp_path: Path) -> None:
    made = PARALLEL[0]
    nameless = replace(made, config={**made.config, "mask_token_id": None})
    with pytest.raises(SourceError, match="mask_token_id is None, wanted a token id below"):
        plan_head(read_source(target), read_head(nameless.write(tmp_path / "a")))
    first = replace(made, config={**made.config, "mask_token_id": 0})
    planned = plan_head(read_source(target), read_head(first.write(tmp_path / "first")))
    assert planned.plan.head.mask_token_id == 0
    drafting = Drafting(made, target, tmp_path / "b")
    with pytest.raises(UsageError, match="runs no trees"):
        open_head(drafting.folder, drafting.manifest, drafting.device, drafting.store, has_trees=True)


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


@pytest.mark.parametrize(("form", "bits"), [("cpu", 4), ("gpu", 8)])
def test_a_single_large_layer_is_in_four_bits_on_the_cpu(
    form: str, bits: int, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is most of what a draft reads; what makes states and logits of it stays in 8 bits."""
    made = made_heads.eagle3("specforge", embedding=False)
    (tmp_path / "exact").mkdir()
    exact = text_rows(exported(made, target, tmp_path / "exact"))
    monkeypatch.setattr(convert, "_LARGE_LAYER", 1)
    graphs = exported(made, target, tmp_path, "auto", form)
    nodes = onnx.load(tmp_path / "out/model.onnx", load_external_data=False).graph.node
    stored = {
        n.input[1]: a.i for n in nodes if n.op_type == "MatMulNBits" for a in n.attribute if a.name == "bits"
    }
    assert {name: found for name, found in stored.items() if name[:1].isdigit()} == dict.fromkeys(
        [f"0.{role}.levels" for role in ("qkv", "o", "gate_up", "down")], bits
    )
    assert stored["head.levels"] == 8
    for found, wanted in zip(text_rows(graphs), exact, strict=True):
        assert (found - wanted).std() < 0.2 * wanted.std()


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
