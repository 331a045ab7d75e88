"""The command that measures how well a model predicts a text."""

import argparse
import json
from pathlib import Path

from edgespec.arguments import add_model, add_option
from edgespec.errors import UsageError
from edgespec.talk import say_stage


def add_score(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--file", metavar="FILE", type=Path, required=True, help="a text file")
    add_option(parser, "device", "where the model runs: auto, or one of edgespec devices")
    add_option(parser, "allow-fallback")
    parser.add_argument("--json", action="store_true", help="print tokens and nll as one document")
    parser.set_defaults(run=_score)


def _score(options: argparse.Namespace) -> int:
    from edgespec.loading import load
    from edgespec.scoring import score

    try:
        text = options.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {options.file}: {error}") from None
    with load(
        options.model,
        drafter="none",
        device=options.device,
        num_threads=options.threads,
        allow_fallback=options.allow_fallback,
        offline=options.offline,
        report=say_stage,
    ) as engine:
        tokens, nll = score(engine, text)
    print(
        json.dumps({"tokens": tokens, "nll": nll})
        if options.json
        else f"{nll:.4f} nats/token over {tokens} tokens"
    )
    return 0
