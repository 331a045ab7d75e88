"""Rows of models with the head sizes of real ones do not depend on how a text is cut into passes, to the bit."""

import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from calls import decoder
from families import FAMILIES, MIXTURES
from real_shapes import Shape, count_differing, random_tokens, walks, write_model

from edgespec.runtimes.pass_shapes import RowRule

ROOT = Path(__file__).parents[2]
# Hidden sizes are no multiples of 256; windows are shorter and longer than the text.
SHAPES = [
    Shape(64, heads=9, kv_heads=3, hidden=576, inner=480, window=1700, experts=8, used=2),
    Shape(80, heads=8, kv_heads=8, hidden=320, window=40),
    Shape(96, heads=4, kv_heads=4, hidden=384, window=300),
    Shape(128, heads=6, kv_heads=2, hidden=416, inner=160, window=600, experts=64, used=8),
    Shape(160, heads=4, kv_heads=4, hidden=352, window=64),
    Shape(192, heads=4, kv_heads=2, hidden=320, window=1700),
    Shape(256, heads=4, kv_heads=1, hidden=640, inner=160, window=512, experts=32, used=5),
]

# Sizes of heads and blocks choose the kernels, and so does what attention does to queries, keys and scores. Other
# families differ from these in constants, biases and what a layer leaves out, so each has some of the shapes.
KINDS_OF_ATTENTION = ("llama", "qwen3", "olmo2", "gemma2", "gemma3", "phi3")


def shapes_of(family: str) -> list[Shape]:
    """All for each kind of attention, those with experts for one mixture, a third for other families in turn."""
    if family in KINDS_OF_ATTENTION:
        return SHAPES
    if family == "gemma4-shared":  # it takes more than two layers
        return []
    if family in (
        "hunyuan_v1_moe",
        "gpt_oss-limit",
        "minimax_m2",
        "glm4_moe-air",
        "qwen3_next",
        "falcon_h1",
    ):  # nodes of others
        return []
    if family == "falcon_h1-normed":  # nodes of llama and granitemoehybrid, of which it has both in a layer
        return [SHAPES[3]]
    if family in MIXTURES:  # which differ in names and in what is done to the router's rows, not in kernels
        at = MIXTURES.index(family)
        return SHAPES[::3] if at == 0 else [SHAPES[3 * (at - 1) % len(SHAPES)]]
    others = [each for each in FAMILIES if each not in (*KINDS_OF_ATTENTION, *MIXTURES)]
    return SHAPES[others.index(family) % 3 :: 3]


PRECISIONS = ("fp32", "int8", "int4")
OWN_KERNELS = (MIXTURES[0], "qwen3_5", "lfm2", "granitemoehybrid-mamba")  # beside attention and matrices


def precisions_of(family: str, shape: Shape) -> tuple[str, ...]:
    """All for families with kernels of their own; else one in turn.

    Attention does not know how weights are stored; each size of head meets each precision in KINDS_OF_ATTENTION.
    """
    if family in OWN_KERNELS:
        return PRECISIONS
    number = SHAPES.index(shape)
    at = list(FAMILIES).index(family) + number + number // 3  # shapes of most families are each third
    return (PRECISIONS[at % len(PRECISIONS)],)


CASES = [(family, shape) for family in FAMILIES for shape in shapes_of(family)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shape"), CASES, ids=lambda it: it if isinstance(it, str) else f"heads of {it[0]}"
)
def test_rows_are_equal_in_every_cut(family: str, shape: Shape, tmp_path: Path) -> None:
    tokens, seed = random_tokens(500), zlib.crc32(f"{family} {shape}".encode())  # cuts of its own for each
    for precision in precisions_of(family, shape):
        loaded = decoder(write_model(tmp_path, family, shape, precision))
        compared, differing = count_differing(loaded, tokens, walks(len(tokens), 4, seed))
        assert compared > 600
        assert differing == 0, precision


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("block_size", [64, 128])
def test_rows_of_mixtures_are_equal_with_longer_blocks(precision: str, block_size: int, tmp_path: Path) -> None:
    shape = Shape(64, heads=8, kv_heads=2, hidden=640, inner=384, experts=16, used=3)
    loaded = decoder(write_model(tmp_path, "olmoe", shape, precision, block_size))
    tokens = random_tokens(500)
    compared, differing = count_differing(loaded, tokens, walks(len(tokens), 4, seed=4))
    assert compared > 700
    assert differing == 0


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "block_size"), [(256, 32), (96, 64), (256, 128)])
def test_rows_of_long_texts_are_equal_in_every_cut(head_dim: int, block_size: int, tmp_path: Path) -> None:
    shape = Shape(head_dim, heads=4, kv_heads=1, hidden=640, inner=1152, window=512)
    loaded = decoder(write_model(tmp_path, "gemma3", shape, "int4", block_size))
    tokens = random_tokens(1500)
    compared, differing = count_differing(loaded, tokens, walks(len(tokens), 8, seed=3))
    assert compared > 4000
    assert differing == 0


@pytest.mark.slow
def test_rows_differ_without_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without flash attention, whose tiles are as short as sums want them where the L2 cache has 512 KiB.
    no_rule = RowRule(has_flash_attention=False, borders=())
    monkeypatch.setattr("edgespec.runtimes.passes.row_rule", lambda head_dims, l2_bytes: no_rule)
    tokens = random_tokens(500)
    for precision in PRECISIONS:
        loaded = decoder(write_model(tmp_path, "gemma3", SHAPES[-1], precision))
        compared, differing = count_differing(loaded, tokens, walks(len(tokens), 4, seed=2))
        assert differing > compared // 10, precision


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="imitates the C library of Linux")
@pytest.mark.parametrize("l2_kib", [128, 256, 512, 1280, 3072])
def test_rows_are_equal_on_machines_with_other_caches(l2_kib: int) -> None:
    # Half the layers of Gemma 3 see all tokens, as those of others do.
    command = [sys.executable, ROOT / "bench" / "rows.py", "--families", "gemma3"]
    command += ["--heads", "80,96,256", "--precisions", "int8", "--tokens", "500", "--l2", str(l2_kib << 10)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert re.search(r"^0 of [1-9]\d{3,} rows differ$", done.stdout, re.MULTILINE), done.stdout + done.stderr
