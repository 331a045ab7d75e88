"""The command that measures how well a model predicts a text."""

import argparse

from edgespec.cli.arguments import add_file, add_model, add_options, load_engine, print_result
from edgespec.errors import UsageError


def add_score(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_model(parser)
    add_file(parser, "--file", "a text file", required=True)
    add_options(parser)
    parser.set_defaults(run=_score)


def _score(options: argparse.Namespace) -> None:
    from edgespec.evaluation.scoring import score

    try:
        text = options.file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {options.file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"cannot read {options.file}: it is not text in UTF-8; save it as UTF-8") from None
    with load_engine(options, drafter="none") as engine:
        tokens, nll = score(engine, text)
    print_result(options, {"tokens": tokens, "nll": nll}, f"{nll:.4f} nats/token over {tokens} tokens")
