"""Whether rows depend on how a text is cut into passes, for every family, head size and precision. Random weights.

    python bench/rows.py [--families gemma3,llama …] [--heads 64,256 …] [--precisions fp32,int8,int4] [--l2 BYTES]
                         [--tokens N] [--cuts N] [--threads N] [--as-they-are]

Each line is a model of two layers: rows that were compared with those of the whole text at once, and how many of
them differ. --as-they-are runs passes as speculative decoding without --deterministic does. --l2 imitates another
L2 cache, on Linux with a C compiler.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from command_line import command_line

from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from families import FAMILIES
from imitated_l2 import with_l2
from real_shapes import Shape, count_differing, random_tokens, walks, write_model

# Experts of a layer and how many a token chooses, for mixtures, by size of head.
EXPERTS = {64: (8, 2), 80: (16, 4), 96: (40, 8), 128: (64, 8), 160: (8, 3), 192: (16, 2), 256: (32, 5)}
HEADS = (64, 80, 96, 128, 160, 192, 256)
KV_HEADS = {64: 3, 80: 8, 96: 1, 128: 2, 160: 4, 192: 2, 256: 1}


def main() -> int:
    options = _parse(sys.argv[1:])
    if options.l2:
        again = [sys.executable, *sys.argv]
        again = [each for each in again if each != "--l2" and each != str(options.l2)]
        with tempfile.TemporaryDirectory() as folder:
            return subprocess.run(again, env=with_l2(options.l2, Path(folder)), check=False).returncode
    print(f"{'family':14} {'head':>4} {'kv':>3} {'precision':>9} {'rows':>7} {'differ':>7}")
    compared = differing = 0
    for family in options.families:
        for head_dim in options.heads:
            kv_heads = KV_HEADS.get(head_dim, 1)
            experts, used = EXPERTS.get(head_dim, (8, 2))
            shape = Shape(
                head_dim,
                heads=kv_heads * max(1, 4 // kv_heads),
                kv_heads=kv_heads,
                window=options.window,
                experts=experts,
                used=used,
            )
            with tempfile.TemporaryDirectory() as folder:
                for precision in options.precisions:
                    counts = _count(Path(folder), family, shape, precision, options)
                    compared, differing = compared + counts[0], differing + counts[1]
                    print(
                        f"{family:14} {head_dim:4} {kv_heads:3} {precision:>9} {counts[0]:7} {counts[1]:7}",
                        flush=True,
                    )
    print(f"{differing} of {compared} rows differ")
    return int(differing > 0)


def _count(
    folder: Path, family: str, shape: Shape, precision: str, options: argparse.Namespace
) -> tuple[int, int]:
    made = write_model(folder, family, shape, precision)
    decoder = OnnxDecoder(
        made,
        read_manifest(made),
        find_device("cpu"),
        num_threads=options.threads,
        deterministic=not options.as_they_are,
    )
    tokens = random_tokens(options.tokens, shape.head_dim)
    compared, differing = count_differing(decoder, tokens, walks(len(tokens), options.cuts, shape.head_dim))
    return int(compared), int(differing)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--families", type=_words, default=list(FAMILIES))
    parser.add_argument("--heads", type=_numbers, default=list(HEADS))
    parser.add_argument("--precisions", type=_words, default=["fp32", "int8", "int4"])
    parser.add_argument("--tokens", type=int, default=700)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--cuts", type=int, default=4)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--l2", type=int)
    parser.add_argument("--as-they-are", action="store_true")
    return parser.parse_args(arguments)


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
