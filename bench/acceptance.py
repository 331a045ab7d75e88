"""What a drafter for an NPU loses in another precision: the share of its drafted tokens that the target accepts.

    python bench/acceptance.py TARGET SOURCE [--precisions fp32,w8a16] [--prompts FILE] [--per-category N]

The target answers greedily. Each drafter is SOURCE in the npu form, run on the CPU provider, because this is about
what it drafts and not about speed. Printed are, over the tokens of the answers, each given the text before it:

    agree        share of positions where drafter and target have the same likeliest token
    overlap      mean of Σ min(p, q), the share that is accepted at temperature 1
    divergence   of the drafter's distributions from the target's, nats a token
    accepted     of all drafted tokens, four a draft, in answers to the first prompts with this drafter
"""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from command_line import command_line

import edgespec
from edgespec.decoding.decoder import Decoder
from edgespec.evaluation.prompts import own_prompts, read_prompts
from edgespec.export.convert import export_model
from edgespec.manifest import read_manifest
from edgespec.setup.home import ModelHome, default_home
from edgespec.setup.open_model import measure_ranges, open_decoder
from edgespec.system.console import info
from edgespec.types import Logits, TokenIds

DRAFT_LENGTH = 4
BLOCK, CONTEXT = 64, 1024  # of the npu form: the most tokens of a pass, and the context length

Answer = tuple[TokenIds, int]  # prompt and answer, and the number of tokens in the answer
Doubles = npt.NDArray[np.float64]


def collect_answers(target: Path, prompts: list[str], max_tokens: int) -> list[Answer]:
    answers = []
    with edgespec.load(target, drafter="none") as engine:
        for prompt in prompts:
            prompt_ids = np.array(engine.encode(prompt), np.int32)
            if len(prompt_ids) + max_tokens + BLOCK > CONTEXT:
                continue
            answer = engine.generate(prompt, max_tokens=max_tokens, temperature=0.0).token_ids
            answers.append((np.append(prompt_ids, np.array(answer, np.int32)), len(answer)))
    return answers


def answer_logits(decoder: Decoder, answer: Answer) -> Logits:
    """The logits that each token of an answer was chosen by, [num_answered, vocab_size].

    The text is padded to whole blocks, because passes of one token are slow in the npu form.
    """
    tokens, num_answered = answer
    num_padding = -(len(tokens) - 1) % BLOCK
    return decoder.logits(np.pad(tokens[:-1], (0, num_padding)), num_answered + num_padding)[:num_answered].copy()


def log_probabilities(rows: Logits) -> Doubles:
    shifted = rows.astype(np.float64) - rows.max(axis=1, keepdims=True)
    result: Doubles = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def compare(target: Logits, drafter: Logits) -> Doubles:
    """Agreement, overlap and divergence at each position, [num_rows, 3]."""
    p, q = log_probabilities(target), log_probabilities(drafter)
    agree = target.argmax(axis=1) == drafter.argmax(axis=1)
    overlap = np.minimum(np.exp(p), np.exp(q)).sum(axis=1)
    return np.stack([agree, overlap, (np.exp(p) * (p - q)).sum(axis=1)], axis=1)


def count_accepted(target: Path, drafter: Path, prompts: list[str], max_tokens: int) -> tuple[int, int]:
    """The number of drafted tokens that were accepted, and of all drafted tokens."""
    with edgespec.load(target, drafter=str(drafter), draft_length=DRAFT_LENGTH, schedule="serial") as engine:
        stats = [engine.generate(prompt, max_tokens=max_tokens, temperature=0.0).stats for prompt in prompts]
    return sum(each.num_accepted for each in stats), sum(each.num_drafted for each in stats)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("target", metavar="TARGET", help="a model, as for chat")
    parser.add_argument("source", metavar="SOURCE", help="what the drafters are exported from, as for export")
    parser.add_argument("--precisions", default="fp32,w8a16")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="prompts in JSON Lines (default: edgespec's own)"
    )
    parser.add_argument("--per-category", type=int, default=2, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    parser.add_argument(
        "--drafted", type=int, default=4, metavar="N", help="prompts answered with each drafter (default 4)"
    )
    options = parser.parse_args()
    chosen = read_prompts(options.prompts, options.per_category) if options.prompts else own_prompts()
    prompts = [prompt.turns[0] for prompt in chosen]
    home = ModelHome(default_home(), True, info)
    source, target = home.locate(options.source).path, home.resolve(options.target)
    answers = collect_answers(target, prompts, options.max_tokens)
    decoder: Decoder = open_decoder(target, read_manifest(target), deterministic=False)
    target_logits = [answer_logits(decoder, answer) for answer in answers]
    print(f"{len(answers)} prompts, {sum(num for _, num in answers)} tokens of answers")
    print("precision      MB   agree  overlap  divergence  accepted")
    measure = partial(measure_ranges, prompts=[prompt.turns[0] for prompt in own_prompts()])
    with tempfile.TemporaryDirectory() as scratch:
        for precision in options.precisions.split(","):
            folder = Path(scratch) / precision
            manifest = export_model(
                source, folder, precision=precision, form="npu", measure_ranges=measure, report=info
            )
            decoder = open_decoder(folder, manifest, deterministic=False)
            compared = [
                compare(logits, answer_logits(decoder, answer))
                for logits, answer in zip(target_logits, answers, strict=True)
            ]
            agree, overlap, divergence = np.concatenate(compared).mean(axis=0)
            accepted, drafted = count_accepted(target, folder, prompts[: options.drafted], options.max_tokens)
            figures = f"{manifest.weights_bytes / 1e6:6.0f}  {agree:.4f}   {overlap:.4f}      {divergence:.4f}"
            print(f"{precision:10} {figures}  {accepted} of {drafted} ({accepted / drafted:.3f})", flush=True)


if __name__ == "__main__":
    main()
