"""The command that compares speculation with plain decoding."""

import argparse
import json
from pathlib import Path

from edgespec.arguments import add_model, add_speculation, load_engine
from edgespec.errors import UsageError
from edgespec.talk import say_stage


def add_bench(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        required=True,
        action="append",
        help="JSON Lines with turns or prompt; repeatable",
    )
    parser.add_argument("--per-category", type=int, metavar="N", help="the first N prompts of each category")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens an answer (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T")
    add_speculation(parser)
    parser.add_argument("--json", action="store_true", help="print one document")
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    from edgespec.benchmark import measure, read_prompts, table
    from edgespec.sampling import SamplingParams

    for name in ("per_category", "max_tokens"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; wanted at least 1")
    prompts = [prompt for path in options.prompts for prompt in read_prompts(path, options.per_category)]
    sampling = SamplingParams(temperature=options.temperature)
    with load_engine(options) as engine:
        document = measure(engine, prompts, max_tokens=options.max_tokens, sampling=sampling, report=say_stage)
    print(json.dumps(document) if options.json else table(document))
    return 0
