"""Drafting heads of each dialect through the exporter, against a plain numpy forward."""

from pathlib import Path

import made_heads
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


@pytest.mark.parametrize("made", RECURRENT, ids=lambda made: "-".join(sorted(made.switches)) or "plain")
def test_rows_of_a_head_are_those_of_a_plain_forward(made: MadeHead, target: Path, tmp_path: Path) -> None:
    weights = made_heads.target_weights()
    graphs = exported(made, target, tmp_path)
    reference = Reference(made, weights["model.embed_tokens.weight"], weights["lm_head.weight"])
    assert graphs.manifest.head.target_layers == made.layers
    require_rows_of_reference(graphs, reference)
