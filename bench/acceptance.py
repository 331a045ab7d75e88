"""What a drafter for an NPU loses in another precision: how much of what it drafts is kept.

    python bench/acceptance.py TARGET SOURCE [--precisions fp32,w8a16] [--prompts FILE] [--per-category N]

The target answers greedily. Each drafter is SOURCE in the npu form, on the CPU provider: this is about what it
says, not how fast. Printed are, over the tokens of the answers, each behind those before it:

    agree        share of positions where the drafter's likeliest token is the target's
    overlap      mean of Σ min(p, q), the share that is kept at temperature 1
    divergence   of the drafter's distributions from the target's, nats a token
    kept         of all drafted tokens, four a draft, answering the first prompts with that drafter
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

import edgespec
from edgespec.export.convert import export_model
from edgespec.home import ModelHome, default_home
from edgespec.manifest import read_manifest
from edgespec.opening import measure_ranges, open_decoder
from edgespec.prompts import own_prompts, read_prompts
from edgespec.talk import say_stage
from edgespec.types import Decoder, Logits, TokenIds

DRAFT_LENGTH = 4
BLOCK, CONTEXT = 64, 1024  # tokens that a pass of the npu form takes at most, and a context

Answer = tuple[TokenIds, int]  # tokens of a prompt and its answer, and how many are the answer's
Doubles = npt.NDArray[np.float64]


def answers(target: Path, prompts: list[str], max_tokens: int) -> list[Answer]:
    found = []
    with edgespec.load(target, drafter="none") as engine:
        for prompt in prompts:
            asked = engine.encode(prompt)
            if len(asked) + max_tokens + BLOCK > CONTEXT:
                continue
            answer = engine.generate(prompt, max_tokens=max_tokens).token_ids
            found.append((np.concatenate([asked, np.array(answer, np.int32)]).astype(np.int32), len(answer)))
    return found


def rows_of(decoder: Decoder, answer: Answer) -> Logits:
    """What each token of an answer was chosen by, [num_answered, vocab_size]; in whole blocks, which are fast."""
    tokens, num_answered = answer
    behind = len(tokens) - 1
    padded = np.pad(tokens[:-1], (0, -behind % BLOCK))
    return decoder.logits(padded, num_answered + len(padded) - behind)[:num_answered].copy()


def log_probabilities(rows: Logits) -> Doubles:
    shifted = rows.astype(np.float64) - rows.max(axis=1, keepdims=True)
    result: Doubles = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def compared(target: Logits, drafter: Logits) -> Doubles:
    """agree, overlap and divergence at each position, [num_rows, 3]."""
    p, q = log_probabilities(target), log_probabilities(drafter)
    agree = target.argmax(axis=1) == drafter.argmax(axis=1)
    overlap = np.minimum(np.exp(p), np.exp(q)).sum(axis=1)
    return np.stack([agree, overlap, (np.exp(p) * (p - q)).sum(axis=1)], axis=1)


def kept(target: Path, drafter: Path, prompts: list[str], max_tokens: int) -> tuple[int, int]:
    """Drafted tokens that were kept, and all."""
    with edgespec.load(target, drafter=str(drafter), draft_length=DRAFT_LENGTH, schedule="serial") as engine:
        stats = [engine.generate(prompt, max_tokens=max_tokens).stats for prompt in prompts]
    return sum(each.num_accepted for each in stats), sum(each.num_drafted for each in stats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="TARGET", help="a model, as for chat")
    parser.add_argument("source", metavar="SOURCE", help="what the drafters are made of, as for export")
    parser.add_argument("--precisions", default="fp32,w8a16")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON Lines; default: our own")
    parser.add_argument("--per-category", type=int, default=2, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--drafted", type=int, default=4, metavar="N", help="prompts that are drafted for")
    options = parser.parse_args()
    taken = read_prompts(options.prompts, options.per_category) if options.prompts else own_prompts()
    prompts = [prompt.turns[0] for prompt in taken]
    home = ModelHome(default_home(), True, say_stage)
    source, target = home.locate(options.source).path, home.resolve(options.target)
    texts = answers(target, prompts, options.max_tokens)
    decoder: Decoder = open_decoder(target, read_manifest(target), deterministic=False)
    wanted = [rows_of(decoder, text) for text in texts]
    print(f"{len(texts)} prompts, {sum(num for _, num in texts)} tokens of answers")
    print("precision      MB   agree  overlap  divergence  kept")
    measure = partial(measure_ranges, prompts=[prompt.turns[0] for prompt in own_prompts()])
    with tempfile.TemporaryDirectory() as scratch:
        for precision in options.precisions.split(","):
            folder = Path(scratch) / precision
            manifest = export_model(
                source, folder, precision=precision, form="npu", measure_ranges=measure, report=say_stage
            )
            decoder = open_decoder(folder, manifest, deterministic=False)
            found = np.concatenate(
                [compared(rows, rows_of(decoder, text)) for rows, text in zip(wanted, texts, strict=True)]
            )
            agree, overlap, divergence = found.mean(axis=0)
            accepted, drafted = kept(target, folder, prompts[: options.drafted], options.max_tokens)
            figures = f"{manifest.weights_bytes / 1e6:6.0f}  {agree:.4f}   {overlap:.4f}      {divergence:.4f}"
            print(f"{precision:10} {figures}  {accepted} of {drafted} ({accepted / drafted:.3f})", flush=True)


if __name__ == "__main__":
    main()
