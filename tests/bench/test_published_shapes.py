from pathlib import Path
from typing import Any

import numpy as np
import published_shapes
import pytest
import random_checkpoint
from published_shapes import Published
from safetensors.numpy import load_file

pytestmark = pytest.mark.slow  # exports, and opens each export several times

SMALL: dict[str, Any] = {
    "model_type": "phi3", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 300, "rope_theta": 10000.0, "max_position_embeddings": 1024,
    "original_max_position_embeddings": 256, "rope_scaling": published_shapes._longrope(16),
    "tie_word_embeddings": True,
}  # fmt: skip


def run(folder: Path, model: Published, precisions: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(published_shapes, "MODELS", {"small": model})
    given = ["published_shapes.py", str(folder), "--precisions", precisions, "--tokens", "8"]
    monkeypatch.setattr("sys.argv", given)
    return published_shapes.main()


def test_shape_is_exported_and_decoded_in_each_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, Published(SMALL, context_length=512), "fp32,int4", monkeypatch) == 0
    _, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(line[0], line[1]) for line in lines] == [("small", "fp32"), ("small", "int4")]
    assert all(line[6].startswith("0/") and line[7] == "yes," for line in lines)
    assert not list(tmp_path.iterdir())


def test_refused_shape_is_told_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {**SMALL, "rope_scaling": published_shapes._longrope(15)}
    assert run(tmp_path, Published(broken), "fp32", monkeypatch) == 1
    assert "small fp32: SourceError: " in capsys.readouterr().out


def test_logits_of_a_tied_head_have_the_spread_of_an_own_one(tmp_path: Path) -> None:
    random_checkpoint.write_source(tmp_path / "source", {**SMALL, "logits_scaling": 2.0}, 1)
    embedding = load_file(tmp_path / "source" / "model.safetensors")["model.embed_tokens.weight"].astype(
        np.float32
    )
    assert embedding.std() * np.sqrt(64) / 2 == pytest.approx(random_checkpoint.LOGITS_SPREAD, rel=0.03)
