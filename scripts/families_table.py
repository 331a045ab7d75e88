"""Print a table of all families of models: logits beside transformers, rows, and one text whatever drafts.

    make families                        all families, some ten minutes
    make families FAMILIES="lfm2 llama"  some of them

Small random models of each family (tests/support/families.py) are exported from safetensors and GGUF, in fp32 and
in 4 bits. A line has the largest difference of a logit to those of transformers in tests/support/data, or in
4 bits the error as a share of their spread; the rows that differ by how a text is cut into passes; and how many
answers differ from those without a drafter, by three drafters that read the text, and under three schedules by a
drafter model, which is the same model in the other precision. Exits with 1 where something differs.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from families import CONTEXT_LENGTHS, FAMILIES, LOGITS, SOURCES, TOKENS, write_source
from real_shapes import count_differing, walks

from edgespec import Engine, SamplingParams, load
from edgespec.errors import EdgeSpecError
from edgespec.export.convert import export_model
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder

PRECISIONS = {"fp32": 1e-4, "int4": 0.75}  # and the largest difference or error
TEXT_DRAFTERS, SCHEDULES = ("ngram", "suffix", "lookahead"), ("serial", "pipelined", "hedged")
WORDS = ("the", "in", "an", "on", "er", "at", "to", "he")
SAMPLED = SamplingParams(temperature=0.7, seed=5)
Answers = list[tuple[int, ...]]
LINE = "{:24} {:12} {:10} {:>9} {:>10} {:>10}  {}"


class Options(NamedTuple):
    """How many prompts are answered, with how many tokens each."""

    num_prompts: int
    num_tokens: int


class Texts(NamedTuple):
    """Answers that were compared and that differ, their drafted and accepted tokens, and what was refused."""

    compared: int
    differing: int
    drafted: int
    accepted: int
    refused: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join([f"{self.accepted} of {self.drafted} drafts accepted", *self.refused])


def main() -> int:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; all where none is named")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=16)
    given = parser.parse_args()
    if unknown := set(given.families) - set(FAMILIES):
        parser.error(f"the family {min(unknown)!r} is unknown; known are {', '.join(FAMILIES)}")
    wrong = 0
    print(LINE.format("family", "from", "precision", "logits", "rows", "answers", "drafts"))
    for family, form in SOURCES:
        if given.families and family not in given.families:
            continue
        with TemporaryDirectory() as folder:
            wrong += sum(lines(Path(folder), family, form, Options(given.prompts, given.tokens)))
    print(f"{wrong or 'none'} of the lines differ")
    return int(wrong > 0)


def lines(folder: Path, family: str, form: str, options: Options) -> Iterator[bool]:
    """Print the lines of a family from one kind of file; True for each where something differs."""
    source = write_source(folder, family, form)
    made = {precision: folder / precision for precision in PRECISIONS}
    for precision, output in made.items():
        export_model(source, output, precision=precision, context_length=CONTEXT_LENGTHS.get(family))
    names = family, "safetensors" if form == "huggingface" else "GGUF"
    for precision, output in made.items():
        other = next(each for each in made.values() if each != output)
        error, (compared, differing) = logit_error(output, family, precision), rows(output)
        texts = compare_texts(output, other, options)
        shown = f"{differing}/{compared}", f"{texts.differing}/{texts.compared}", texts
        print(LINE.format(*names, precision, f"{error:.1e}", *map(str, shown)), flush=True)
        yield error > PRECISIONS[precision] or differing > 0 or texts.differing > 0


def logit_error(folder: Path, family: str, precision: str) -> float:
    """The largest difference of a logit to that of transformers; in 4 bits the error of a row in the middle."""
    wanted = LOGITS[family]
    found = OnnxDecoder(folder, read_manifest(folder), find_device("cpu")).logits(TOKENS, len(wanted))
    if precision == "fp32":
        return float(np.abs(found - wanted).max())
    return float(np.median((found - wanted).std(axis=1)) / wanted.std())


def rows(folder: Path) -> tuple[int, int]:
    """Rows that were compared with those of one pass over the text, and those that differ."""
    decoder = OnnxDecoder(folder, read_manifest(folder), find_device("cpu"), deterministic=True)
    compared, differing = count_differing(decoder, TOKENS, walks(len(TOKENS), 12, seed=1))
    return compared, differing


def compare_texts(folder: Path, other: Path, options: Options) -> Texts:
    """Answers of each drafter and schedule beside those without a drafter."""
    wanted, _, _ = answers(folder, options, drafter="none")
    ways = [{"drafter": name} for name in TEXT_DRAFTERS]
    ways += [{"drafter": str(other), "schedule": schedule} for schedule in SCHEDULES]
    compared = differing = drafted = accepted = 0
    refused = []
    for way in ways:
        try:
            found, *counts = answers(folder, options, draft_length=3, **way)
        except EdgeSpecError:
            refused.append(f"{way.get('schedule', way['drafter'])} refused")
            continue
        compared += len(found)
        differing += sum(ours != theirs for ours, theirs in zip(found, wanted, strict=True))
        drafted, accepted = drafted + counts[0], accepted + counts[1]
    return Texts(compared, differing, drafted, accepted, tuple(refused))


def answers(folder: Path, options: Options, **how: object) -> tuple[Answers, int, int]:
    """Answers, half of them greedy, and how many of their tokens were drafted and accepted."""
    rng = np.random.default_rng(7)
    # With one thread, as models of this size wait for two: two lines took 19 s of a core and not 29.
    with load(folder, deterministic=True, num_threads=1, **how) as engine:  # type: ignore[arg-type]
        found = [
            engine.generate(
                _fitting(engine, rng.choice(WORDS, 6).tolist(), options.num_tokens),
                sampling=SAMPLED if number % 2 else SamplingParams(),
                max_tokens=options.num_tokens,
            )
            for number in range(options.num_prompts)
        ]
    tokens = [each.token_ids for each in found]
    return tokens, sum(each.stats.num_drafted for each in found), sum(each.stats.num_accepted for each in found)


def _fitting(engine: Engine, words: list[str], num_tokens: int) -> str:
    """A prompt of these words, or of the first of them, which leaves room for so many tokens."""
    while len(engine.encode(text := " ".join(words))) + num_tokens > engine.context_length and len(words) > 1:
        words.pop()
    return text


if __name__ == "__main__":
    sys.exit(main())
