"""Whether a model gives one text in deterministic mode, whatever drafts, with long prompts and short ones.

    python bench/one_text.py MODEL --drafter MODEL [--prompts FILE] [--short N] [--long N] [--tokens N]
                             [--draft-length N|auto] [--temperatures T,…] [--conversations N] [--only NAME,…]
                             [--device NAME] [--threads N] [--json]

The reference is the text without a drafter. It is compared, token by token, with that of each drafter that drafts
from the text, of the drafter model under each schedule, and of default settings, twice. Drafts have a fixed
length, so that passes draft even where it would not pay, but with default settings. The second turn of some
conversations is compared too: once in a prompt read at once, once over the cache that the first turn left.

Prompts are spread over FILE, JSON Lines as Spec-Bench has them; by default the prompts of this folder and those of
edgespec bench. A long prompt begins with prompts that are joined until they have more than 1,000
tokens, as all long ones do, and has its own end, so that reading it uses what is cached of the one before.

Each line is a configuration: its answers, how many differ from the reference, their tokens, drafted and accepted
tokens, and the first difference. The exit code is 1 if an answer differs.
"""

import itertools
import json
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from command_line import command_line

from edgespec import Engine, SamplingParams, load
from edgespec.config.drafter_names import TEXT
from edgespec.engine.answers import Completion
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.evaluation.prompts import BenchPrompt, own_prompts, read_prompts
from edgespec.system.console import print_stderr

TEXT_DRAFTERS = (*TEXT, "lookahead")
SCHEDULES = ("serial", "pipelined", "hedged")
REFERENCE = "none"
LINE = "{:16} {:>7} {:>9} {:>7} {:>7} {:>8}  {}"
LONG, LONGEST_SHORT = 1000, 300  # tokens
SECOND_TURN = "Say the same again in other words."  # where a prompt has one turn only


class Key(NamedTuple):
    """Prompt, turn and temperature, by which an answer is found."""

    prompt: int
    temperature: float
    turn: int  # of a conversation, from 0


Answers = Mapping[Key, Completion]


class Row(NamedTuple):
    """The answers of a configuration, compared with those of the reference."""

    configuration: str
    answers: int
    different: int
    tokens: int
    drafted: int
    accepted: int
    first: str  # of the differences


def main() -> int:
    options = _parse(sys.argv[1:])
    say = print_stderr if options.json else _print
    rows = []
    say(LINE.format(*Row._fields))
    try:
        for row in _rows(options):
            say(LINE.format(*row))
            rows.append(row)
    except EdgeSpecError as error:
        print_stderr(f"one_text.py: {error}")
        return error.exit_code
    compared, different = sum(row.answers for row in rows[1:]), sum(row.different for row in rows[1:])
    say(f"{different} of {compared} answers differ from the reference")
    if options.json:
        print(json.dumps({"model": options.model, "rows": [row._asdict() for row in rows]}, indent=1))
    return int(different > 0)


def _print(line: str) -> None:
    print(line, flush=True)


def _rows(options: Namespace) -> Iterator[Row]:
    """The reference's row, then that of each other configuration."""
    prompts: list[BenchPrompt] = []
    reference: dict[Key, Completion] = {}
    known = configurations(options.drafter, options.draft_length)
    if unknown := [name for name in options.only if name not in known]:
        raise UsageError(f"--only names {', '.join(unknown)}; wanted some of: {', '.join(known)}")
    for name, settings in known.items():
        if name != REFERENCE and options.only and name not in options.only:
            continue
        with load(
            options.model, device=options.device, num_threads=options.threads, report=print_stderr, **settings
        ) as engine:
            if name == REFERENCE:
                prompts = choose(engine, _read(options.prompts), options.short, options.long)
                reference = answer(engine, prompts, options)
                reference.update(second_turns(engine, prompts, reference, options))
                found: Answers = reference
            elif settings:
                found = answer(engine, prompts, options)
            else:
                found = {**answer(engine, prompts, options), **converse(engine, prompts, options)}
        yield compare(name, reference, found)


def configurations(drafter: str, length: int | str) -> dict[str, dict[str, Any]]:
    """Arguments of load() by the name of a configuration, the reference first."""
    fixed = {"deterministic": True, "draft_length": length}
    text = {name: {"drafter": name, **fixed} for name in TEXT_DRAFTERS}
    model = {f"model {each}": {"drafter": drafter, "schedule": each, **fixed} for each in SCHEDULES}
    reference = {REFERENCE: {"drafter": "none", "deterministic": True}}
    return {**reference, **text, **model, "default": {}, "default again": {}}


def choose(engine: Engine, prompts: Sequence[BenchPrompt], num_short: int, num_long: int) -> list[BenchPrompt]:
    """Short prompts, spread over those that there are, and long ones, which differ in their end.

    Raises UsageError: There are too few short ones.
    """
    short = [prompt for prompt in prompts if engine.count(prompt.turns[0]) <= LONGEST_SHORT]
    if len(short) < max(num_short, 1):
        raise UsageError(
            f"{len(short)} prompts have up to {LONGEST_SHORT} tokens; wanted {num_short}; name others"
        )
    chosen = [short[i * len(short) // num_short] for i in range(num_short)]
    text = _join(engine, short) if num_long else ""
    ends = [short[-1 - i % len(short)].turns[0] for i in range(num_long)]
    return [*chosen, *(BenchPrompt("long", (text + end,)) for end in ends)]


def _join(engine: Engine, prompts: Sequence[BenchPrompt]) -> str:
    text = ""
    for prompt in itertools.cycle(prompts):
        text += prompt.turns[0] + "\n\n"
        if engine.count(text) > LONG:
            break
    return text


def answer(engine: Engine, prompts: Sequence[BenchPrompt], options: Namespace) -> dict[Key, Completion]:
    """Each prompt's answer at each temperature."""
    return {
        Key(i, temperature, 0): engine.generate(
            prompt.turns[0], sampling=_sampling(temperature), max_tokens=options.tokens
        )
        for i, prompt in enumerate(prompts)
        for temperature in options.temperatures
    }


def converse(engine: Engine, prompts: Sequence[BenchPrompt], options: Namespace) -> dict[Key, Completion]:
    """The second answers of conversations, each over the cache that its first answer left."""
    found = {}
    for key in _second(prompts, options):
        talk = engine.chat(sampling=_sampling(key.temperature), max_tokens=options.tokens)
        talk.say(prompts[key.prompt].turns[0])
        found[key] = talk.say(_second_message(prompts[key.prompt]))
    return found


def second_turns(
    engine: Engine, prompts: Sequence[BenchPrompt], first: Answers, options: Namespace
) -> dict[Key, Completion]:
    """Second answers of conversations, each over a whole prompt of which the cache holds nothing."""
    found = {}
    for key in _second(prompts, options):
        engine.generate(prompts[-1 if key.prompt == 0 else key.prompt - 1].turns[0], max_tokens=1)
        messages = [
            {"role": "user", "content": prompts[key.prompt].turns[0]},
            {"role": "assistant", "content": first[key._replace(turn=0)].text},
            {"role": "user", "content": _second_message(prompts[key.prompt])},
        ]
        found[key] = engine.generate(messages, sampling=_sampling(key.temperature), max_tokens=options.tokens)
    return found


def _second(prompts: Sequence[BenchPrompt], options: Namespace) -> Iterator[Key]:
    for i in range(min(options.conversations, len(prompts))):
        for temperature in options.temperatures:
            yield Key(i, temperature, 1)


def _second_message(prompt: BenchPrompt) -> str:
    return prompt.turns[1] if len(prompt.turns) > 1 else SECOND_TURN


def _sampling(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=7)


def compare(name: str, reference: Answers, found: Answers) -> Row:
    differences = [
        difference
        for key, completion in found.items()
        if (difference := _difference(key, reference[key], completion)) is not None
    ]
    stats = [completion.stats for completion in found.values()]
    return Row(
        configuration=name,
        answers=len(found),
        different=len(differences),
        tokens=sum(len(completion.token_ids) for completion in found.values()),
        drafted=sum(each.num_drafted for each in stats),
        accepted=sum(each.num_accepted for each in stats),
        first=differences[0] if differences else "-",
    )


def _difference(key: Key, wanted: Completion, found: Completion) -> str | None:
    """The first token at which two answers differ; None if they are equal."""
    one, other = ([*answer.token_ids, answer.finish_reason, answer.text] for answer in (wanted, found))
    if one == other:
        return None
    place = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    where = f"prompt {key.prompt}, temperature {key.temperature:g}" + ", second turn" * key.turn
    return f"{where}, token {place}: {one[place]!r}, here {other[place]!r}"


def _read(path: Path | None) -> list[BenchPrompt]:
    if path is not None:
        return read_prompts(path, None)
    return [*read_prompts(Path(__file__).with_name("prompts.jsonl"), None), *own_prompts()]


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = command_line(__doc__)
    parser.add_argument("model")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--short", type=int, default=15)
    parser.add_argument("--long", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--draft-length", type=_length, default=4)
    parser.add_argument("--temperatures", type=_numbers, default=[0.0, 0.9])
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def _length(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no list of numbers such as 0,0.9") from None


if __name__ == "__main__":
    raise SystemExit(main())
