"""Export models in each precision, with the check of the export, and print what each loses, as in docs/models.md.

    make check-models MODELS="FILE.gguf FOLDER …"
    python bench/check_models.py SOURCE … [--precisions source,int8,int4,fp32] [--quick]

A loss is in nats a token on two texts of this project, prose and code, of 1,000 to 1,200 tokens, beside the
source's own weights in numpy. Exports lie in a temporary folder, one at a time. --quick lets the check compare the
few tokens of a first use.
"""

import sys
import tempfile
from pathlib import Path
from time import process_time
from typing import NamedTuple

import numpy as np
from command_line import command_line

from edgespec.decoding.logprobs import mean_nll, negative_log_likelihood
from edgespec.errors import ExportMismatch
from edgespec.export.convert import export_model
from edgespec.export.reference import reference_logits
from edgespec.export.sources import read_source
from edgespec.manifest import Check
from edgespec.setup.open_model import open_decoder
from edgespec.types import TokenIds

TEXTS = [Path(__file__).parent / "texts" / f"{name}.txt" for name in ("prose", "code")]
PRECISIONS = ("source", "int8", "int4", "fp32")
MAX_TOKENS = 1200


class Losses(NamedTuple):
    """Nats a token of each text, and its number of tokens."""

    tokens: list[TokenIds]
    nll: list[float]


def source_losses(source: Path) -> Losses:
    """The source's own losses on the texts, by its weights in numpy."""
    from tokenizers import Tokenizer

    loaded = read_source(source)
    tokenizer = Tokenizer.from_str(loaded.vocabulary.tokenizer_json)
    texts = [np.array(tokenizer.encode(path.read_text()).ids, np.int32)[:MAX_TOKENS] for path in TEXTS]
    nll = []
    for tokens in texts:
        rows = reference_logits(loaded.config, loaded.tensors, tokens)
        nll.append(float(negative_log_likelihood(rows[:-1], tokens[1:]).mean()))
    return Losses(texts, nll)


def print_row(source: Path, name: str, precision: str, expected: Losses, *, is_quick: bool) -> bool:
    """Export in a precision and print its row; returns whether the check passed."""
    with tempfile.TemporaryDirectory() as place:
        folder, started_s = Path(place) / "model", process_time()
        try:
            manifest = export_model(
                source, folder, precision=precision, open_decoder=open_decoder, is_quick=is_quick
            )
        except ExportMismatch as error:
            print(f"| {name} | {precision} | | | | | refused: {error} |", flush=True)
            return False
        spent_s = process_time() - started_s
        decoder = open_decoder(folder, manifest)
        lost = [mean_nll(decoder, tokens) - nll for tokens, nll in zip(*expected, strict=True)]
        del decoder
    check = manifest.check
    cells = [f"{manifest.weights_bytes / 1e6:.0f}", *(f"{value:+.4f}" for value in lost), f"{spent_s:.0f}"]
    print(f"| {name} | {precision} | {' | '.join(cells)} | {describe(check)} |", flush=True)
    return True


def describe(check: Check | None) -> str:
    if check is None:
        return "not checked"
    structure = check.structure
    found = f"{structure.difference:.1g} of {structure.allowed:.1g}" if structure else "not compared"
    return f"passes on {check.num_tokens} tokens: divergence {check.divergence:.4f}, structure {found}"


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("sources", nargs="+", type=Path, metavar="SOURCE", help="a .gguf file or a local folder")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="check as a first use does")
    options = parser.parse_args()
    passed = True
    print("| model | precision | MB | prose | code | processor s | check |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for source in options.sources:
        expected = source_losses(source)
        counts = " and ".join(str(len(tokens)) for tokens in expected.tokens)
        losses = " | ".join(f"{nll:.4f}" for nll in expected.nll)
        print(f"| {source.stem} | its file, {counts} tokens | | {losses} | | |", flush=True)
        for precision in options.precisions.split(","):
            passed &= print_row(source, source.stem, precision, expected, is_quick=options.quick)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
