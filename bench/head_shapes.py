"""Drafting heads of published shapes with random weights: drafts in fp32 beside the same arithmetic in numpy.

    python bench/head_shapes.py FOLDER [--heads NAME,…] [--before N] [--drafts N]

The heads are those of tests/support/published_heads.py that draft blocks. A line has the largest difference of a
logit over drafts after texts of N tokens and a few more, and the spread of the logits. The exit code is 1 where it
is more than 1e-4 of them. A head takes up to 10 GB of memory and some minutes.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from command_line import command_line
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import tiny
from draft_runs import draft_greedily
from head_folders import random_features, store_of
from published_heads import PublishedHead, published
from tiny_blocks import BlockCase, expected_draft

from edgespec.export.heads.block_graphs import BlockShape
from edgespec.export.heads.convert import PlannedHead, export_head, plan_head
from edgespec.export.heads.head_source import read_head
from edgespec.export.safetensors import read_tensors
from edgespec.export.sources import read_source
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.heads import open_head

HEADS = (
    *("LiquidAI/LFM2.5-1.2B-Instruct-DSpark", "openbmb/MiniCPM5-2B-DSpark"),
    *("rasyosef/Llama-3.2-1B-Instruct-DSpark", "z-lab/Qwen3-4B-DFlash-b16"),
    *("z-lab/Qwen3.6-35B-A3B-DFlash", "incoai/Qwen3.6-35B-A3B-DFlash2"),
)
MOST = 1e-4


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--heads", type=lambda text: text.split(","), default=HEADS)
    parser.add_argument("--before", type=int, default=2100)
    parser.add_argument("--drafts", type=int, default=3)
    options = parser.parse_args()
    known = {head.name: head for head in published()}
    is_right = True
    for name in options.heads:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            apart, spread = compare(Path(folder), known[name], options.before, options.drafts)
        print(f"{name:40} {apart:.1e} of logits that spread by {spread:.2f}", flush=True)
        is_right &= apart < MOST * max(1.0, spread)
    return int(not is_right)


def draw(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    rng, made = np.random.default_rng(seed), {}
    for name, shape in shapes.items():
        drawn = rng.standard_normal(shape, np.float32)
        is_gain = name.endswith(("norm.weight", "layernorm.weight"))
        made[name] = 1 + 0.1 * drawn if is_gain else drawn * np.float32(shape[-1] ** -0.5)
    return made


def compare(folder: Path, head: PublishedHead, num_before: int, num_drafts: int) -> tuple[float, float]:
    """The largest difference of a logit of a few drafts, and the standard deviation of the logits."""
    hidden, vocab_size, _ = head.target
    weights, lent = draw(head.shapes, 1), draw({"model.embed_tokens.weight": (vocab_size, hidden)}, 2)
    head.write(folder / "head")
    lists = {name: each.values() for name, each in read_head(folder / "head").integers.items()}
    save_file({**weights, **lists}, folder / "head" / "model.safetensors")
    save_file(lent, folder / "lent.safetensors")
    planned = plan(folder, head, num_before + 64)
    manifest = export_head(planned, folder / "out", "head")
    features = random_features(head.reads, hidden, num_before + 64)
    text = np.random.default_rng(3).integers(0, vocab_size, num_before).astype(np.int32)
    subset = np.arange(head.tokens, dtype=np.int32) if head.tokens else None
    case, apart, spread = as_case(planned, head, weights), 0.0, 0.0
    for number in range(num_drafts):
        store = store_of(manifest, text, features)
        opened = open_head(folder / "out", manifest, find_device("cpu"), store, subset)
        rows, drafted = draft_greedily(opened, text, min(4, head.num_drafted))
        wanted, _ = expected_draft(case, lent, text, features, len(rows), np.float32)
        shown = wanted > -1e4
        apart = max(apart, float(np.abs(rows[:, : wanted.shape[1]] - wanted)[shown].max()))
        spread = float(wanted[shown].std())
        text = np.concatenate([text, drafted[:number], [7]]).astype(np.int32)
    return apart, spread


def plan(folder: Path, head: PublishedHead, context_length: int) -> PlannedHead:
    """The plan of a head for a target of which only the embedding is there."""
    tiny.write_huggingface(folder / "target", tiny.random_weights())
    target = read_source(folder / "target")
    hidden, vocab_size, num_layers = head.target
    layers = target.config.layers[:1] * num_layers
    sizes: dict[str, Any] = {"hidden_size": hidden, "vocab_size": vocab_size, "context_length": context_length}
    embedding = read_tensors([folder / "lent.safetensors"])[0]["model.embed_tokens.weight"]
    config = replace(target.config, layers=layers, **sizes)
    target = replace(target, config=config, tensors={"embedding": embedding})
    return plan_head(target, read_head(folder / "head"), "fp32")


def as_case(planned: PlannedHead, head: PublishedHead, weights: dict[str, np.ndarray]) -> BlockCase:
    """The head as the reference takes it; what a layer sees and rotates is read anew from its settings."""
    block: BlockShape = planned.plan.write_graphs.__self__  # type: ignore[attr-defined]
    inner = head.config.get("transformer_layer_config", head.config)
    own = {**head.config.get("dflash_config", {}), **head.config}
    sees_window = [kind == "S" for kind in head.kinds]
    both_sides = own.get("is_causal") is False or own.get("sliding_window_non_causal")
    return BlockCase(
        head.config,
        head.reads,
        block.num_tokens,
        head.num_drafted < block.num_tokens,
        own.get("markov_head_type"),
        None,
        windows=tuple(inner["sliding_window"] if sees else None for sees in sees_window),
        are_causal=tuple(sees and not both_sides for sees in sees_window),
        counts_from_known="transformer_layer_config" in head.config,
        is_interleaved=own.get("rope_is_neox_style") is False,
        num_taps=own.get("conv_kernel_size", 0),
        num_candidates=own.get("selector_top_k", 0),
        eps=inner["rms_norm_eps"],
        theta=inner["rope_theta"],
        mask=own["mask_token_id"],
        given=weights,
        tokens=np.arange(head.tokens) if head.tokens else None,
    )


if __name__ == "__main__":
    sys.exit(main())
