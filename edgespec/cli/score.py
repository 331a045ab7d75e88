"""The command that measures how well a model predicts a text."""

import argparse
from typing import TYPE_CHECKING

from edgespec.cli.arguments import add_file, add_model, add_options, load_engine, print_result
from edgespec.errors import ContextOverflow, UsageError

if TYPE_CHECKING:
    from edgespec import Engine


def add_score(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_model(parser)
    add_file(parser, "--file", "a text file", required=True)
    add_options(parser)
    parser.set_defaults(run=_score)


def _score(options: argparse.Namespace) -> None:
    try:
        text = options.file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {options.file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"cannot read {options.file}: it is not text in UTF-8; save it as UTF-8") from None
    with load_engine(options, drafter="none") as engine:
        tokens, nll = score(engine, text)
    print_result(options, {"tokens": tokens, "nll": nll}, f"{nll:.4f} nats/token over {tokens} tokens")


def score(engine: "Engine", text: str) -> tuple[int, float]:
    """Number of tokens and their mean negative log-likelihood in nats, the first token left out.

    Raises:
        UsageError: The text has fewer than two tokens.
        ContextOverflow: The text has more tokens than the context length.
    """
    from edgespec import mean_nll

    tokens = engine.tokenizer.encode(text)
    if len(tokens) < 2:
        raise UsageError(f"the text has {len(tokens)} tokens; scoring needs at least 2")
    if len(tokens) > engine.context_length:
        raise ContextOverflow(len(tokens), engine.context_length, engine.manifest.context_length)
    return len(tokens), mean_nll(engine.target, tokens)
