"""Heads that draft a block in one pass: their graphs and decoder against a forward pass written out in numpy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tiny
import tiny_blocks
from draft_runs import draft_greedily
from head_folders import random_features, read_subset_of, store_of, write_head_folder
from tiny_blocks import BlockCase, deepseek, expected_draft, specforge, speculators, windowed, zlab

from edgespec.decoding.decoder import Pass
from edgespec.decoding.hidden_states import HiddenStates
from edgespec.errors import EdgeSpecError, SourceError
from edgespec.export.options import Trimming
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.heads import HeadDecoder, open_head
from edgespec.types import TokenIds, append

TARGET = tiny.random_weights(seed=3, tied=False)
TOKENS = np.sort(np.random.default_rng(4).permutation(tiny.VOCAB)[:120])
CASES = {
    # The last layer's state is the one behind the final norm, as transformers gives it.
    "DFlash": zlab([0, 1], (0, 2)),
    "DFlash with its block in its own settings": zlab([0], (0,), within=True),
    "DSpark": deepseek(),
    "DSpark gated": deepseek(markov="gated", confidence="without"),
    "DSpark with a memory": deepseek(markov="rnn"),
    "DFlash of DeepSeek": deepseek(markov=None, confidence=None),
    "DSpark of SpecForge": specforge(),
    "DFlash of speculators": speculators("dflash"),
    "DFlash with a window": windowed(zlab([0, 1], (0, 2)), 9, "SF"),
    "DFlash with a window that is not causal": windowed(zlab([0, 1], (0, 2)), 9, is_causal=False),
    "DFlash with a window of a few tokens": windowed(zlab([0, 1], (0, 2)), 4),
    "DFlash with a window beyond the context": windowed(zlab([0, 1], (0, 2)), 4096),
    "DFlash 2": tiny_blocks.dflash2(),
    "DSpark of Liquid": tiny_blocks.liquid(),
    "DFlash of speculators with a window": windowed(speculators("dflash"), 9),
    "DSpark of speculators with a window that is not causal": windowed(
        speculators("dspark"), 9, "FS", sliding_window_non_causal=True
    ),
    "DSpark of speculators, trimmed": speculators("dspark", tokens=np.random.default_rng(5).permutation(TOKENS)),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "source"
    tiny.write_huggingface(folder, TARGET)
    return folder


class Opened:
    """A head, the store that it reads, and the hidden states of the longest text."""

    def __init__(
        self, case: BlockCase, folder: Path, target: Path, precision: str = "fp32", **options: Any
    ) -> None:
        self.case = case
        self.manifest = write_head_folder(
            folder / "out", case.write(folder / "head"), target, precision, **options
        )
        self.features = random_features(case.target_layers, tiny.HIDDEN, tiny.CONTEXT)
        self.store = store_of(self.manifest, np.zeros(1, np.int32), self.features)
        self.head = self.reopened(folder)

    def reopened(self, folder: Path, *, deterministic: bool = False) -> HeadDecoder:
        subset, device = read_subset_of(folder / "out", self.manifest), find_device("cpu")
        return open_head(folder / "out", self.manifest, device, self.store, subset, deterministic=deterministic)

    def know(self, text: TokenIds) -> None:
        """The target has run all of a text but its newest token."""
        self.store.put(0, text[:-1], self.features[: len(text) - 1])

    def differences(self, text: TokenIds, rows: np.ndarray) -> float:
        expected, _ = expected_draft(self.case, TARGET, text, self.features, len(rows))
        columns = slice(None) if self.case.tokens is None else self.case.tokens
        return float(np.abs(rows[:, columns] - expected).max())


def random_text(seed: int, length: int) -> TokenIds:
    return np.random.default_rng(seed).integers(0, tiny.VOCAB, length).astype(np.int32)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("DFlash", "DSpark") else pytest.mark.slow) for name in CASES]
)
def test_rows_are_those_of_numpy_over_prefill_drafts_rejection_and_going_on(
    name: str, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.runtimes.block_head._CHUNK_TOKENS", 16)
    case = CASES[name]
    opened = Opened(case, tmp_path, target)
    head, stated = opened.head, opened.manifest.head
    assert stated is not None
    assert (stated.target_layers, stated.block_tokens) == (case.target_layers, case.num_tokens)
    assert head.can.tokens_per_pass == case.num_drafted
    assert opened.manifest.tokens_per_pass == case.num_tokens - 1
    text = random_text(1, 40)  # three chunks
    for num_accepted in (3, 0, case.num_drafted, 1):
        opened.know(text)
        num_before = head.num_fed
        rows, drafted = draft_greedily(head, text, case.num_drafted)
        assert opened.differences(text, rows) < 1e-4
        assert num_before == 0 or head.num_fed - num_before <= 2 * case.num_tokens + 1
        text = append(append(text, drafted[:num_accepted]), [9])


@pytest.mark.parametrize("name", ["DSpark", "DSpark gated", "DSpark of speculators, trimmed"])
def test_confidence_is_that_of_numpy(name: str, tmp_path: Path, target: Path) -> None:
    case = CASES[name]
    opened, text = Opened(case, tmp_path, target), random_text(2, 30)
    opened.know(text)
    _, expected = expected_draft(case, TARGET, text, opened.features, case.num_drafted)
    assert opened.head.begin(text, 99)
    tokens, found = text, []
    for _ in range(case.num_drafted):
        rows = opened.head.run(Pass(tokens))
        found.append(rows.confidence)
        tokens = append(tokens, [int(rows.logits[0].argmax())])
    assert np.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", [pytest.param("DFlash", marks=pytest.mark.slow), "DSpark"])  # even and odd blocks
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "int4"])
def test_rows_are_equal_to_the_bit_however_a_text_is_cut(
    name: str, precision: str, tmp_path: Path, target: Path
) -> None:
    """In blocks of 64 weights the last of an odd number of rows is computed by another kernel."""
    opened, text = Opened(CASES[name], tmp_path, target, precision, block_size=64), random_text(12, 90)
    opened.know(text)
    whole, grown = (opened.reopened(tmp_path, deterministic=True) for _ in range(2))
    for stop in (4, 9, 21, 22, 24, 27, 40, 41, 60, 63, 90):
        rows, _ = draft_greedily(grown, text[:stop], 4)
        whole.forget()
        again, _ = draft_greedily(whole, text[:stop], 4)
        assert np.array_equal(rows, again)


@pytest.mark.parametrize("name", ["DSpark", "DSpark with a memory"])
def test_a_row_follows_the_tokens_that_were_really_drafted(name: str, tmp_path: Path, target: Path) -> None:
    """A sampler may take another token than the likeliest."""
    opened, text = Opened(CASES[name], tmp_path, target), random_text(3, 30)
    opened.know(text)
    head = opened.head
    draft_greedily(head, text, 3)
    others = append(text, [11, 12])
    row = head.logits(others, 1)[0].copy()
    fresh = opened.reopened(tmp_path)
    fresh.begin(text, 99)
    for stop in range(len(text), len(others)):
        fresh.logits(others[:stop], 1)
    assert np.abs(fresh.logits(others, 1)[0] - row).max() < 1e-6
    assert np.abs(head.logits(append(text, [13, 12]), 1)[0] - row).max() > 1e-3 or "memory" not in name


def test_a_draft_needs_the_hidden_states_of_its_text(tmp_path: Path, target: Path) -> None:
    opened, text = Opened(CASES["DSpark"], tmp_path, target), random_text(4, 30)
    head = opened.head
    assert not head.begin(text, 99)
    opened.know(text[:-3])
    assert not head.begin(text, 99)
    opened.know(text)
    assert head.begin(text, 99)
    assert not head.begin(text[:1], 99)


def test_a_draft_goes_on_within_its_block_before_hidden_states_are_known(tmp_path: Path, target: Path) -> None:
    case = CASES["DSpark"]
    opened, text = Opened(case, tmp_path, target), random_text(5, 30)
    opened.know(text)
    rows, drafted = draft_greedily(opened.head, text, 2)
    longer = append(text, drafted)
    num_left = opened.head.begin(longer, 99)  # while the target verifies the two
    assert num_left == case.num_drafted - 2
    more = []
    for _ in range(num_left):
        more.append(opened.head.logits(longer, 1)[0].copy())
        longer = append(longer, [int(more[-1].argmax())])
    assert opened.differences(text, np.concatenate([rows, more])) < 1e-4
    assert not opened.head.begin(longer, 99)  # the block ends there
    assert not opened.head.begin(append(text, [int(drafted[0]), 5, 5, 5, 5, 5]), 99)


def test_logits_are_computed_for_as_many_tokens_as_are_wanted(tmp_path: Path, target: Path) -> None:
    opened, text = Opened(CASES["DFlash"], tmp_path, target), random_text(6, 30)
    opened.know(text)
    assert opened.head.begin(text, 2)
    rows = [opened.head.logits(text, 1)[0].copy()]
    num_fed, tokens = opened.head.num_fed, text
    for _ in range(4):
        tokens = append(tokens, [int(rows[-1].argmax())])
        rows.append(opened.head.logits(tokens, 1)[0].copy())
    assert opened.head.num_fed > num_fed  # the third was more than wanted
    assert opened.differences(text, np.stack(rows)) < 1e-4


def test_rows_that_no_draft_wants_still_come(tmp_path: Path, target: Path) -> None:
    """Costs are measured where no hidden states are known."""
    opened, text = Opened(CASES["DSpark"], tmp_path, target), random_text(7, 40)
    head = opened.head
    assert np.isfinite(head.logits(text, 3)).all()
    head.pretend(text)
    num_fed = head.num_fed
    assert np.isfinite(head.logits(append(text, [4]), 1)).all()
    assert head.num_fed - num_fed < 8
    head.forget()
    opened.know(text)  # what was made of unknown states is made again
    rows, _ = draft_greedily(head, text, 4)
    assert opened.differences(text, rows) < 1e-4


def test_an_interrupted_pass_leaves_the_head_usable(tmp_path: Path, target: Path) -> None:
    opened, text = Opened(CASES["DSpark"], tmp_path, target), random_text(13, 130)
    opened.know(text[:100])
    head = opened.head
    draft_greedily(head, text[:100], 2)
    opened.know(text)
    read, calls = head._features.read, []

    def interrupting(tokens: TokenIds, start: int, num_rows: int | None = None) -> np.ndarray:
        calls.append(start)
        if len(calls) == 1:
            head.interrupt()
        return read(tokens, start, num_rows)

    head._features.read = interrupting  # type: ignore[method-assign]
    assert head.begin(text, 99)
    with pytest.raises(EdgeSpecError):
        head.logits(text, 1)
    rows, _ = draft_greedily(head, text, 4)
    assert opened.differences(text, rows) < 1e-4
    assert calls[1] == 99  # what was in the cache before is in it still


def test_a_draft_ends_with_the_context(tmp_path: Path, target: Path) -> None:
    opened, text = Opened(CASES["DFlash"], tmp_path, target), random_text(8, tiny.CONTEXT)
    opened.know(text)
    assert opened.head.begin(text, 99)
    assert opened.differences(text, opened.head.logits(text, 1)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "int4", "source"])
@pytest.mark.parametrize("name", ["DFlash", "DSpark"])
def test_rounded_weights_give_rows_close_to_those_of_numpy(
    name: str, precision: str, tmp_path: Path, target: Path
) -> None:
    opened, text = Opened(CASES[name], tmp_path, target, precision), random_text(9, 30)
    opened.know(text)
    rows, _ = draft_greedily(opened.head, text, 1)
    expected, _ = expected_draft(opened.case, TARGET, text, opened.features, 1)
    assert np.corrcoef(rows[0], expected[0])[0, 1] > (0.9 if precision == "int4" else 0.999)


@pytest.mark.parametrize("name", ["DFlash", "DSpark"])
def test_vocabulary_and_markov_heads_are_trimmed_together(name: str, tmp_path: Path, target: Path) -> None:
    (tmp_path / "corpus").write_text("the theatre in the other town")
    trimming = Trimming(num_tokens=100, corpus=tmp_path / "corpus")
    opened, text = Opened(CASES[name], tmp_path, target, trimming=trimming), random_text(11, 20)
    opened.know(text)
    tokens = read_subset_of(tmp_path / "out", opened.manifest)
    assert tokens is not None
    rows, _ = draft_greedily(opened.head, text, 1)
    expected, _ = expected_draft(CASES[name], TARGET, text, opened.features, 1)
    assert np.abs(rows - expected)[:, tokens].max() < 1e-4


def refusal(case: BlockCase, folder: Path, target: Path, **stated: Any) -> str:
    changed = replace(case, config={**case.config, **stated})
    with pytest.raises(SourceError) as raised:
        write_head_folder(folder / "out", changed.write(folder / "head"), target)
    return str(raised.value)


def test_settings_that_lie_or_are_missing_are_refused(tmp_path: Path, target: Path) -> None:
    dspark, dflash, given = CASES["DSpark"], CASES["DFlash"], CASES["DSpark of speculators, trimmed"]
    assert "block_size is 1" in refusal(dspark, tmp_path / "a", target, block_size=1)
    assert "layers 0 to 1" in refusal(dspark, tmp_path / "b", target, target_layer_ids=[2])
    assert "embedding of its target" in refusal(dspark, tmp_path / "c", target, target_layer_ids=[-1])
    assert "mask_token_id is None" in refusal(dspark, tmp_path / "d", target, mask_token_id=None)
    assert "markov_head_type is deep" in refusal(dspark, tmp_path / "e", target, markov_head_type="deep")
    own = {"mask_token_id": tiny.VOCAB, "target_layer_ids": [0, 1]}
    assert "wanted a token id below" in refusal(dflash, tmp_path / "f", target, dflash_config=own)
    kinds: dict[str, Any] = {**tiny_blocks.LAYERS_CONFIG, "layer_types": ["sliding_attention"] * 2}
    assert "sliding_window is missing" in refusal(given, tmp_path / "g", target, transformer_layer_config=kinds)
    kinds |= {"layer_types": ["chunked_attention"] * 2}
    assert "layer_types is ['chunked" in refusal(given, tmp_path / "i", target, transformer_layer_config=kinds)
    assert "embedding of its target" in refusal(given, tmp_path / "h", target, aux_hidden_state_layer_ids=[0, 2])


def test_rows_that_cannot_be_quantised_are_refused_with_the_option_of_a_head(tmp_path: Path, target: Path) -> None:
    narrow = {f"markov_head.markov_w{i}.weight": np.zeros((tiny.VOCAB, 24), np.float32) for i in (1, 2)}
    case = deepseek(confidence="without", change=narrow)
    with pytest.raises(SourceError, match=r"markov_w1.weight have 24 numbers.* --drafter-precision source"):
        write_head_folder(tmp_path / "out", case.write(tmp_path / "head"), target, "auto")
    write_head_folder(tmp_path / "out", tmp_path / "head", target, "source")


def test_missing_and_wrong_tensors_are_refused(tmp_path: Path, target: Path) -> None:
    dspark, given = CASES["DSpark"], CASES["DSpark of speculators, trimmed"]
    missing = replace(dspark, leave_out=("markov_head.markov_w2.weight",))
    assert "markov_head.markov_w2.weight" in refusal(missing, tmp_path / "a", target)
    missing = replace(dspark, leave_out=("markov_head.markov_w1.weight",))
    assert "markov_head.markov_w1.weight" in refusal(missing, tmp_path / "b", target)
    headless = replace(given, leave_out=("lm_head.weight",))
    assert "no tensor lm_head.weight" in refusal(headless, tmp_path / "c", target)
    parts = ("confidence_head.proj.weight", "confidence_head.proj.bias")
    assert "no tensor confidence_head" in refusal(replace(dspark, leave_out=parts), tmp_path / "f", target)
    norms = (
        "layers.1.input_layernorm.weight",
        "layers.0.self_attn.q_norm.weight",
        "layers.1.self_attn.k_norm.weight",
    )
    for number, name in enumerate(norms):
        normless = replace(CASES["DFlash"], leave_out=(name,))
        assert f"no tensor {name}" in refusal(normless, tmp_path / f"norm-{number}", target)
    wide = replace(dspark, change={"confidence_head.proj.weight": np.ones((1, 5), np.float32)})
    assert "confidence_head.proj.weight is 1×5" in refusal(wide, tmp_path / "d", target)
    other = replace(dspark, change={"fc.weight": np.ones((tiny.HIDDEN, 48), np.float32)})
    assert "hidden states of 48 numbers" in refusal(other, tmp_path / "e", target)


@pytest.mark.parametrize(
    ("stated", "predicts"),
    [
        ({}, False),
        ({"sample_from_anchor": True}, True),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 6}]}}, True),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]}}, False),
        (
            {"sample_from_anchor": False, "speculators_config": {"proposal_methods": [{"speculative_tokens": 6}]}},
            False,
        ),
    ],
)
def test_speculators_says_whether_the_first_row_predicts(
    stated: dict[str, Any], predicts: bool, tmp_path: Path, target: Path
) -> None:
    made = speculators("dspark")
    case = replace(made, config={**made.config, **stated}, skips_known=not predicts)
    opened, text = Opened(case, tmp_path, target), random_text(1, 20)
    opened.know(text)
    assert opened.head.can.tokens_per_pass == (6 if predicts else 5)
    rows, _ = draft_greedily(opened.head, text, 3)
    assert opened.differences(text, rows) < 1e-4


def test_a_share_of_rotated_values_in_a_copy_of_the_targets_settings_is_not_meant(
    tmp_path: Path, target: Path
) -> None:
    rope = {"rope_theta": tiny_blocks.THETA, "rope_type": "default", "partial_rotary_factor": 0.25}
    case = deepseek()
    copied = replace(case, config={**case.config, "partial_rotary_factor": 0.25, "rope_parameters": rope})
    opened, text = Opened(copied, tmp_path, target), random_text(1, 20)
    opened.know(text)
    rows, _ = draft_greedily(opened.head, text, 3)
    assert opened.differences(text, rows) < 1e-4


def test_parts_of_dflash2_that_are_missing_or_do_not_fit_are_refused(tmp_path: Path, target: Path) -> None:
    case = CASES["DFlash 2"]

    def refused(name: str, left: tuple[str, ...] = (), **own: Any) -> str:
        changed = {**case.config["dflash_config"], **own}
        return refusal(replace(case, leave_out=left), tmp_path / name, target, dflash_config=changed)

    for name in ("layers.1.mlp_conv.base_kernel", "candidate_selector.predecessor_codebook"):
        assert f"no tensor {name}" in refused(name, (name,))
    assert "conv_group_size is 7" in refused("a", conv_group_size=7)
    assert "kernel_projection.weight is 32×64, wanted 64×64" in refused("b", conv_group_size=4)
    assert "selector_top_k is missing" in refused("c", selector_top_k=None)
    assert "which no dflash head uses" in refused("d", conv_kernel_size=0)


def test_specforge_says_in_one_place_what_kind_of_head_it_is(tmp_path: Path, target: Path) -> None:
    case = specforge()
    wrapped = {
        f"logit_head.{name}": value
        for name, value in case.tensors().items()
        if name.startswith(("markov", "conf"))
    }
    names = tuple(name.removeprefix("logit_head.") for name in wrapped)
    early = replace(case, leave_out=names, change=wrapped)
    manifest = write_head_folder(tmp_path / "early", early.write(tmp_path / "early_head"), target)
    assert manifest.head is not None
    assert (manifest.head.method, manifest.head.has_confidence) == ("dspark", True)
    domino = {**case.config["dflash_config"], "projector_type": "domino"}
    other = replace(case, config={**case.config, "dflash_config": domino})
    with pytest.raises(SourceError, match="projector_type is domino"):
        write_head_folder(tmp_path / "out", other.write(tmp_path / "head"), target)


def test_layers_that_z_lab_does_not_name_are_spread_over_the_target(tmp_path: Path, target: Path) -> None:
    from edgespec.export.heads.dflash import spread_layers

    assert spread_layers(36, 5) == [1, 9, 17, 25, 33]  # those of the published head for Qwen3-4B
    assert spread_layers(28, 1) == [14]


def test_a_target_that_is_tied_lends_one_matrix(tmp_path: Path) -> None:
    weights, case = tiny.random_weights(seed=3), CASES["DFlash"]
    tiny.write_huggingface(tmp_path / "target", weights)
    manifest = write_head_folder(tmp_path / "out", case.write(tmp_path / "head"), tmp_path / "target")
    features, text = random_features(case.target_layers, tiny.HIDDEN, 40), random_text(14, 30)
    head = open_head(tmp_path / "out", manifest, find_device("cpu"), store_of(manifest, text, features))
    rows, _ = draft_greedily(head, text, 3)
    assert np.abs(rows - expected_draft(case, weights, text, features, 3)[0]).max() < 1e-4
    names = [
        each.name
        for each in onnx.load(tmp_path / "out" / manifest.graph, load_external_data=False).graph.initializer
    ]
    assert ("embedding" in names, "head" in names) == (True, False)


def test_hidden_states_of_other_layers_beside_its_own_are_left_out(tmp_path: Path, target: Path) -> None:
    case = CASES["DSpark"]
    opened, text = Opened(case, tmp_path, target), random_text(10, 20)
    store, noise = HiddenStates((1, 0), tiny.HIDDEN), random_features((1,), tiny.HIDDEN, 20, seed=9)
    store.put(0, text[:-1], np.concatenate([noise, opened.features[:20]], axis=1)[:19])
    head = open_head(tmp_path / "out", opened.manifest, find_device("cpu"), store)
    rows, _ = draft_greedily(head, text, 3)
    assert opened.differences(text, rows) < 1e-4


def test_a_folder_names_all_graphs_of_its_head(tmp_path: Path, target: Path) -> None:
    manifest: Manifest = Opened(CASES["DSpark"], tmp_path, target).manifest
    assert manifest.head is not None
    assert {path.name for path in (tmp_path / "out").glob("*.onnx")} == {manifest.graph, *manifest.head.graphs}
