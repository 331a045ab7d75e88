"""Heads by the names and shapes under which they are published: read, or refused with the part that is missing."""

import math
from pathlib import Path

import pytest
import tiny
from published_heads import published, shaped

from edgespec.errors import SourceError
from edgespec.export.heads.block_graphs import BlockShape
from edgespec.export.heads.convert import plan_head
from edgespec.export.heads.head_source import read_head
from edgespec.export.sources import LoadedSource, read_source

HEADS = {head.name: head for head in published()}
QUICK = (
    "the MTP layer of Qwen/Qwen3.5-0.8B",
    "LiquidAI/LFM2.5-1.2B-Instruct-DSpark",
    "google/gemma-4-E2B-it-assistant",
    "thyways/qwen3_8b_peagle_demo",
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedSource:
    folder = tmp_path_factory.mktemp("target") / "source"
    tiny.write_huggingface(folder, tiny.random_weights())
    return read_source(folder)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in HEADS]
)
def test_a_published_head_is_read_or_refused_with_what_is_missing(
    name: str, target: LoadedSource, tmp_path: Path
) -> None:
    head = HEADS[name]
    folder = head.write(tmp_path / "head")
    if head.refusal:
        with pytest.raises(SourceError, match=head.refusal):
            plan_head(shaped(target, head), read_head(folder))
        return
    plan = plan_head(shaped(target, head), read_head(folder)).plan
    assert (plan.head.kind, plan.head.target_layers) == (head.kind, head.reads)
    assert head.num_weights in (None, sum(map(math.prod, head.shapes.values())))
    if head.kind == "recurrent":
        assert plan.head.block_tokens == head.num_drafted
        return
    block: BlockShape = plan.write_graphs.__self__  # type: ignore[attr-defined]
    assert block.num_tokens - block.skips_known == head.num_drafted
    assert "".join("S" if layer.sliding_window else "F" for layer in block.config.layers) == head.kinds


def test_enough_heads_are_read() -> None:
    assert len(HEADS) >= 42
    assert sum(not head.refusal for head in HEADS.values()) >= 38
