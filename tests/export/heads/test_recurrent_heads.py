"""Drafting heads of each dialect through the exporter, against a plain numpy forward."""

from pathlib import Path

import made_heads
import numpy as np
import pytest
import tiny
from made_heads import Graphs, MadeHead, Reference

from edgespec.export.heads.convert import export_head, plan_head
from edgespec.export.heads.head_source import read_head
from edgespec.export.sources import read_source

EAGLE3 = [
    made_heads.eagle3("speculators"),
    made_heads.eagle3("speculators", "norm_before_residual"),
    made_heads.eagle3("speculators", "norm_before_fc"),
    made_heads.eagle3("speculators", "fc_norm"),
    made_heads.eagle3("speculators", "norm_output"),
    made_heads.eagle3("speculators", "fc_norm", "norm_output", "norm_before_residual", head_norms=True, num_layers=2),
    made_heads.eagle3("speculators", layers=(0, 3, 5), embedding=False),
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


def exported(made: MadeHead, target: Path, folder: Path, precision: str = "fp32") -> Graphs:
    planned = plan_head(read_source(target), read_head(made.write(folder / "head")), precision)
    export_head(planned, folder / "out", "head")
    return Graphs(folder / "out")


def require_rows_of_reference(graphs: Graphs, reference: Reference, seed: int = 3) -> None:
    """Prefill, drafting of 5, rejection of 3 of them and going on, each against a forward without a cache."""
    rng = np.random.default_rng(seed)
    width = graphs.manifest.head.target_hidden_size * len(graphs.manifest.head.target_layers)
    text = rng.integers(0, tiny.VOCAB, 30)
    features = rng.normal(0, 1.5, (30, width)).astype(np.float32)

    def draft(num_exact: int, first: np.ndarray, num_tokens: int, last: int) -> None:
        """Draft behind text[: num_exact + 1]; first are rows whose states are known, last is their number."""
        tokens, states = list(text[1 : num_exact + 1]), list(reference.fuse(features[:num_exact]))
        logits, state = graphs.rows(text[num_exact + 1 - last : num_exact + 1], first)
        for number in range(num_tokens):
            wanted, wanted_states = reference.rows(np.array(tokens), np.array(states))
            assert np.abs(logits[-1] - wanted[-1]).max() < 1e-4
            assert np.abs(state[-1] - wanted_states[-1]).max() < 1e-4
            if number == 0:
                assert np.abs(logits - wanted[-len(logits) :]).max() < 1e-4
            chosen = reference.tokens[logits[-1].argmax()]
            tokens.append(chosen)
            states.append(wanted_states[-1])
            logits, state = graphs.rows(np.array([chosen]), state[-1:])

    assert np.abs(graphs.fuse(features) - reference.fuse(features)).max() < 1e-4
    draft(9, graphs.fuse(features[:9]), 5, 9)
    assert graphs.length == 14
    graphs.forget(9)  # two of the five were accepted, whose states the target has given meanwhile
    draft(12, graphs.fuse(features[9:12]), 5, 3)
    graphs.forget(12)  # none was accepted
    draft(13, graphs.fuse(features[12:13]), 5, 1)


@pytest.mark.parametrize("made", RECURRENT, ids=lambda made: "-".join(sorted(made.switches)) or "plain")
def test_rows_of_a_head_are_those_of_a_plain_forward(made: MadeHead, target: Path, tmp_path: Path) -> None:
    weights = made_heads.target_weights()
    graphs = exported(made, target, tmp_path)
    reference = Reference(made, weights["model.embed_tokens.weight"], weights["lm_head.weight"])
    assert graphs.manifest.head.target_layers == made.layers
    require_rows_of_reference(graphs, reference)
