"""The commands that measure: speculation against plain decoding, and how well a model predicts a text."""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import edgespec
from edgespec import ContextOverflow, EdgeSpecError, MemoryExhausted, UsageError, __version__
from edgespec.cli.arguments import (
    add_flags,
    add_model,
    add_options,
    attribute_name,
    load_engine,
    print_result,
    require_positive,
)
from edgespec.cli.parser import CommandParser
from edgespec.config.options import LOAD_PARAMETERS
from edgespec.system.console import info
from edgespec.system.context_managers import contextmanager
from edgespec.system.tables import read_table
from edgespec.system.text_files import explain_unreadable, read_text

if TYPE_CHECKING:
    from edgespec.evaluation.document import BenchDocument
    from edgespec.evaluation.journal import Journal
    from edgespec.evaluation.peer import Peer
    from edgespec.evaluation.prompts import BenchPrompt

_LARGEST_BYTES = 1 << 28  # of a text to score
OpenPeers = Callable[["edgespec.Engine"], AbstractContextManager[Sequence["Peer"]]]


def add_bench(parser: CommandParser) -> None:
    table = read_table(__file__, "bench.toml")
    add_model(parser, is_optional=True)
    add_flags(parser, table["measuring"])
    add_flags(parser.add_argument_group("reports"), table["reports"])
    add_options(parser)
    parser.show_first(*table["first"])
    parser.set_defaults(run=bench)


def bench(options: argparse.Namespace, open_peers: OpenPeers = lambda engine: nullcontext(())) -> None:
    """Run the command; bench/peers.py brings other runtimes to measure in the same run."""
    from edgespec.evaluation.table import table

    _require_writable(options)  # before minutes of work
    if options.report is not None:
        if options.model is not None:
            raise UsageError("--report reads the results of an earlier run; leave out the model")
        from edgespec.evaluation.document import read_document
        from edgespec.evaluation.journal import read_journal

        journal = read_journal(options.report)
        document = journal.document() if journal else read_document(options.report)
    elif options.model is None:
        raise UsageError("no model is named; give a model to measure, or --report FILE")
    else:
        document = _measure(options, open_peers)
    # Printed before the page is written, so that a file that cannot be written loses no measurement.
    if options.json or options.report is None or not options.html:
        print_result(options, document, *(() if options.json else (table(document),)))
    if options.html:
        _write_page(document, options)


def _require_writable(options: argparse.Namespace) -> None:
    path = options.html
    if path and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise UsageError(f"cannot write {path}; name a file in an existing folder that you may write to")


def _measure(options: argparse.Namespace, open_peers: OpenPeers) -> "BenchDocument":
    from edgespec.evaluation.benchmark import measure
    from edgespec.evaluation.prompts import own_prompts, read_prompts

    require_positive(options, "per-category", "max-tokens", "rounds")
    _require_other_drafters(options)
    sampling = edgespec.SamplingParams(temperature=options.temperature)
    if options.drafter == "none":
        info("--drafter none drafts nothing, so plain decoding is compared with itself")
    read = [prompt for path in options.prompts or () for prompt in read_prompts(path, options.per_category)]
    prompts = read or own_prompts(options.per_category)
    journal = _open_journal(options, prompts)
    places = [(number, i) for number in range(options.rounds) for i in range(len(prompts))]
    if journal and all(journal.is_done(*place) for place in places):
        info(f"{options.resume} has every answer already; nothing is measured")
        return journal.document()
    with (
        load_engine(options) as engine,
        _open_plain(options) as plain,
        _open_other_ways(options, engine) as others,
        open_peers(engine) as peers,
    ):
        return measure(
            engine,
            prompts,
            plain=plain,
            max_tokens=options.max_tokens,
            sampling=sampling,
            rounds=options.rounds,
            learned=options.learned,
            peers=[*others, *peers],
            journal=journal,
            report=info,
        )


@contextmanager
def _open_plain(options: argparse.Namespace) -> Iterator["edgespec.Engine | None"]:
    """The model as --drafter none opens it; None, which is reported, where there is no memory for both."""
    try:
        engine = load_engine(options, drafter="none", draft_length="auto", schedule="auto")
    except MemoryExhausted as error:
        info(
            "there is no memory for a second session, so plain decoding is measured in that of drafting, which "
            f"may be slower: {error}; close other programs"
        )
        yield None
        return
    with engine:
        yield engine


def _require_other_drafters(options: argparse.Namespace) -> None:
    """Raises UsageError: --compare names what is measured anyway."""
    measured = {"none": "plain decoding is part of every run", options.drafter: "--drafter names it already"}
    for drafter in options.compare:
        if drafter in measured:
            raise UsageError(f"--compare names '{drafter}', but {measured[drafter]}; leave it out")
        measured[drafter] = "--compare has it twice"


@contextmanager
def _open_other_ways(options: argparse.Namespace, engine: "edgespec.Engine") -> Iterator[list["Peer"]]:
    """Speculation in the other mode, where --both-modes asks for it, and with the drafters of --compare."""
    from edgespec.evaluation.benchmark import mode_of
    from edgespec.evaluation.peer import EnginePeer

    ways: list[dict[str, Any]] = [{"deterministic": not engine.is_deterministic}] if options.both_modes else []
    ways += [{"drafter": drafter} for drafter in options.compare]
    sampling = edgespec.SamplingParams(temperature=options.temperature)
    is_stored = options.learned == "stored"
    with ExitStack() as stack:
        peers: list[Peer] = []
        for settings in ways:
            other = stack.enter_context(load_engine(options, **settings))
            drafter = settings.get("drafter")
            way = f"--drafter {drafter}" if drafter else f"speculative, {mode_of(other)}"
            rates = other.speculation.rates if is_stored else {}  # with which a session begins each round
            peers.append(EnginePeer(other, way, __version__, sampling, rates))
        yield peers


def _open_journal(options: argparse.Namespace, prompts: Sequence["BenchPrompt"]) -> "Journal | None":
    """The file of --resume, which holds what its figures depend on."""
    if options.resume is None:
        return None
    from edgespec.evaluation.journal import Journal

    asked = {attribute_name(name): getattr(options, attribute_name(name), None) for name in LOAD_PARAMETERS}
    named = ("model", "max_tokens", "temperature", "learned", "both_modes")
    return Journal(
        options.resume,
        {
            **asked,
            **{name: getattr(options, name) for name in named},
            "against": getattr(options, "against", []),
            "compare": options.compare or None,  # as in files that were begun before there was the option
            "prompts": sha256(json.dumps(prompts).encode()).hexdigest()[:16],
        },
    )


def _write_page(document: "BenchDocument", options: argparse.Namespace) -> None:
    from edgespec.evaluation.page import page
    from edgespec.system.disk import replace_file

    try:
        replace_file(options.html, page(document).encode(errors="replace"), 0o666)
    except OSError as error:
        raise EdgeSpecError(
            f"cannot write {options.html} ({error.strerror}); name another file"
            + ("" if options.report else ", and give --report with the output of --json")
        ) from None
    info(f"wrote {options.html}")


def add_score(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_flags(parser, read_table(__file__, "bench.toml")["score"])
    add_options(parser)
    parser.set_defaults(run=_score)


def _score(options: argparse.Namespace) -> None:
    with explain_unreadable(options.file, "a text file"):
        text = read_text(options.file, _LARGEST_BYTES)
    with load_engine(options, drafter="none") as engine:
        tokens, nll = score(engine, text)
    print_result(options, {"tokens": tokens, "nll": nll}, f"{nll:.4f} nats/token over {tokens} tokens")


def score(engine: "edgespec.Engine", text: str) -> tuple[int, float]:
    """Number of tokens and their mean negative log-likelihood in nats, the first token left out.

    Raises:
        UsageError: The text has fewer than two tokens.
        ContextOverflow: The text has more tokens than the context length.
    """
    tokens = engine.tokenizer.encode(text)
    if len(tokens) < 2:
        raise UsageError(f"the text has {len(tokens)} tokens; scoring needs at least 2")
    if len(tokens) > engine.context_length:
        raise ContextOverflow(len(tokens), engine.context_length, engine.manifest.context_length)
    return len(tokens), edgespec.mean_nll(engine.target, tokens)
