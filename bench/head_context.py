"""How much of a prompt a drafting head has to read: how often its first token is right, by the tokens read.

    python bench/head_context.py PAIR --prompts FILE [--per-category N] [--max-tokens N] [--read 1,4,16,64,256,all]

PAIR is a pair folder whose drafter is a recurrent head. The target answers the last N prompts of each category of
FILE greedily; then the head runs over each answer after the last so many tokens of its prompt. A line of the table
is a number of tokens read. Figures repeat, and need no quiet machine.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from command_line import command_line

from edgespec.manifest import read_manifest
from edgespec.runtimes import recurrent_head
from edgespec.setup.head_target import open_pair
from edgespec.setup.open_model import ModelFolder, read_chat_template, read_tokenizer
from edgespec.text.prompt_encoder import PromptEncoder
from edgespec.types import TokenIds, append


class Answer(NamedTuple):
    """A prompt and its greedy answer as one text, with the number of tokens that the answer has."""

    tokens: TokenIds
    num_answered: int


def read_prompts(path: Path, per_category: int) -> list[str]:
    """The first turns of the last prompts of each category."""
    by_category: dict[str, list[str]] = defaultdict(list)
    with path.open(encoding="utf-8") as lines:
        for line in map(json.loads, filter(str.strip, lines)):
            by_category[line.get("category", "")].append(line["turns"][0])
    return [prompt for prompts in by_category.values() for prompt in prompts[-per_category:]]


def answer(target: Any, prompt: TokenIds, max_tokens: int, ends: tuple[int, ...]) -> Answer:
    tokens = prompt
    while len(tokens) - len(prompt) < max_tokens and len(tokens) < target.context_length:
        token = int(target.logits(tokens, 1)[-1].argmax())
        if token in ends:
            break
        tokens = append(tokens, [token])
    return Answer(tokens, len(tokens) - len(prompt))


def num_right(head: Any, told: Answer) -> int:
    """At how many places of an answer, but the first two, the head drafts its token."""
    head.forget()
    rows = head.known_rows(told.tokens[:-1], told.num_answered - 2)
    guesses = rows.argmax(axis=1) if head.columns is None else head.columns[rows.argmax(axis=1)]
    return int((guesses == told.tokens[2 - told.num_answered :]).sum())


def agreements(
    pair: Path, prompts: list[str], max_tokens: int, read: list[int | None]
) -> Iterator[tuple[int, int]]:
    """Places that are right and all places, for each number of tokens read; None for all of a prompt."""
    target, head = open_pair(pair / "target", pair / "drafter")
    manifest = read_manifest(pair / "target")
    template = read_chat_template(ModelFolder(pair / "target", manifest))
    counts = np.zeros((len(read), 2), np.int64)
    with closing(PromptEncoder(manifest, read_tokenizer(pair / "target", manifest), template)) as encoder:
        for prompt in prompts:
            told = answer(target, encoder.encode(prompt), max_tokens, tuple(manifest.eos_token_ids))
            if told.num_answered < 3:
                continue
            target.logits(told.tokens, 1)  # whose last token has a hidden state too
            for i, num_read in enumerate(read):
                recurrent_head.MAX_UNREAD = target.context_length if num_read is None else num_read
                counts[i] += num_right(head, told), told.num_answered - 2
    yield from ((int(right), int(places)) for right, places in counts)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("pair", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--per-category", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--read", default="1,4,16,64,256,all")
    options = parser.parse_args()
    read = [None if each == "all" else int(each) for each in options.read.split(",")]
    prompts = read_prompts(options.prompts, options.per_category)
    print(f"{'tokens read':>11} {'right':>7} {'places':>7}")
    found = agreements(options.pair, prompts, options.max_tokens, read)
    for num_read, (right, places) in zip(read, found, strict=True):
        print(f"{'all' if num_read is None else num_read:>11} {right / max(1, places):7.1%} {places:7}")


if __name__ == "__main__":
    main()
