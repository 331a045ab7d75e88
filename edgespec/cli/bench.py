"""The command that measures speculation against plain decoding."""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from edgespec.cli.arguments import add_count, add_file, add_model, add_options, load_engine
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.system.console import info

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine
    from edgespec.evaluation.benchmark import Peer
    from edgespec.evaluation.document import BenchDocument

OpenPeers = Callable[["Engine"], AbstractContextManager[Sequence["Peer"]]]


def add_bench(parser: argparse.ArgumentParser) -> None:
    add_model(parser, is_optional=True)
    add_file(
        parser, "--prompts", "JSON Lines with prompt or turns (default: built-in); repeatable", action="append"
    )
    add_count(parser, "--per-category", "only the first N prompts of each category")
    add_count(parser, "--max-tokens", "tokens per answer", 128)
    add_count(parser, "--rounds", "answer every prompt N times", 1)
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="as for chat (default: 0)")
    reports = parser.add_argument_group("reports")
    add_file(reports, "--html", "write a page with charts, one prompt and its answer")
    add_file(reports, "--report", "measure nothing: show what --json printed, or write it with --html")
    add_options(parser)
    parser.set_defaults(run=bench)


def bench(options: argparse.Namespace, open_peers: OpenPeers = lambda engine: nullcontext(())) -> None:
    """Run the command; bench/peers.py brings other runtimes to measure in the same run."""
    from edgespec.evaluation.document import read_document
    from edgespec.evaluation.table import table

    _require_writable(options)  # before minutes of work
    if options.report is not None:
        if options.model is not None:
            raise UsageError("--report reads the results of an earlier run; leave out the model")
        document = read_document(options.report)
    elif options.model is None:
        raise UsageError("no model is named; give a model to measure, or --report FILE")
    else:
        document = _measure(options, open_peers)
    # Printed before the page is written, so that a file that cannot be written loses no measurement.
    if options.json:
        print(json.dumps(document), flush=True)
    elif options.report is None or not options.html:
        print(table(document), flush=True)
    if options.html:
        _write_page(document, options)


def _require_writable(options: argparse.Namespace) -> None:
    path = options.html
    if path and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise UsageError(f"cannot write {path}; name a file in an existing folder that you may write to")


def _measure(options: argparse.Namespace, open_peers: OpenPeers) -> "BenchDocument":
    from edgespec.decoding.sampling import SamplingParams
    from edgespec.evaluation.benchmark import measure
    from edgespec.evaluation.prompts import own_prompts, read_prompts

    for name in ("per_category", "max_tokens", "rounds"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; wanted at least 1")
    prompts = [prompt for path in options.prompts or () for prompt in read_prompts(path, options.per_category)]
    with load_engine(options) as engine, open_peers(engine) as peers:
        return measure(
            engine,
            prompts or own_prompts(options.per_category),
            max_tokens=options.max_tokens,
            sampling=SamplingParams(temperature=options.temperature),
            rounds=options.rounds,
            peers=peers,
            report=info,
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
