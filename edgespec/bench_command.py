"""The command that compares speculation with plain decoding, and other runtimes with both."""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.arguments import add_model, add_speculation, load_engine
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.talk import say_stage

if TYPE_CHECKING:
    from edgespec.engine import Engine
    from edgespec.peers import Against, WorkerPeer

_PEER_CONTEXT = 8192


def add_bench(parser: argparse.ArgumentParser) -> None:
    add_model(parser, is_optional=True)
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        action="append",
        help="JSON Lines with turns or prompt; repeatable (default: a dozen short ones of our own)",
    )
    parser.add_argument("--per-category", type=int, metavar="N", help="the first N prompts of each category")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens an answer (default 128)")
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="answer every prompt N times (default 1)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T")
    parser.add_argument(
        "--against",
        metavar="RUNTIME",
        action="append",
        default=[],
        help="compare with xllamacpp, onnxruntime-genai, openvino-genai or all, in the same run; NAME=PATH says "
        "what it is to load; repeatable",
    )
    add_speculation(parser)
    parser.add_argument("--json", action="store_true", help="print one document")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with charts; it shows one prompt and its answer"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture (needs matplotlib)")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="run nothing; read what --json printed, for --html and --png"
    )
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    from edgespec.report import read_document, table

    _expect_writable(options)
    if options.report is not None:
        if options.model is not None:
            raise UsageError("--report reads a document of an earlier run; leave out the model")
        document = read_document(options.report)
    elif options.model is None:
        raise UsageError("name a model to measure, or --report FILE")
    else:
        document = _measured(options)
    # Before the files: what was measured is not lost with one that cannot be written.
    if options.json:
        print(json.dumps(document), flush=True)
    elif options.report is None or not (options.html or options.png):
        print(table(document), flush=True)
    _write(document, options)
    return 0


def _expect_writable(options: argparse.Namespace) -> None:
    """What can be known of files to write, before minutes of work."""
    from edgespec.report_png import expect_matplotlib

    for path in filter(None, (options.html, options.png)):
        if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
            raise UsageError(f"cannot write {path}; name a file in a folder that is there and may be written")
    if options.png:
        expect_matplotlib()


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    from edgespec.benchmark import measure
    from edgespec.host import host
    from edgespec.prompts import own_prompts, read_prompts
    from edgespec.sampling import SamplingParams

    for name in ("per_category", "max_tokens", "rounds"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; wanted at least 1")
    if options.against and options.temperature:
        raise UsageError("--against compares greedy answers; leave out --temperature")
    prompts = [prompt for path in options.prompts or () for prompt in read_prompts(path, options.per_category)]
    sampling = SamplingParams(temperature=options.temperature)
    measured_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    with load_engine(options) as engine, _peers(options, engine) as (peers, files, absent):
        document = measure(
            engine,
            prompts or own_prompts(options.per_category),
            max_tokens=options.max_tokens,
            sampling=sampling,
            rounds=options.rounds,
            peers=peers,
            report=say_stage,
        )
    for row, file in zip(document["peers"], files, strict=True):
        row["file"] = file
    return {**document, "absent": absent, "measured_at": measured_at, "host": host()}


@contextmanager
def _peers(
    options: argparse.Namespace, engine: "Engine"
) -> Iterator[tuple[Sequence["WorkerPeer"], Sequence[str], list[dict[str, str]]]]:
    """The other runtimes, the file of each, and those that are not installed."""
    if not options.against:
        yield [], [], []
        return
    from edgespec.home import ModelHome, default_home
    from edgespec.peers import Kind, choose, loadable

    home = ModelHome(default_home(), True, say_stage)
    folder = Path(options.model) if Path(options.model).is_dir() else None

    def find(kind: Kind) -> Path | None:
        return loadable(kind, options.model, folder, home.path / "downloads", engine.manifest)

    chosen, absent = choose(options.against, find, say_stage)
    with ExitStack() as stack:
        opened = [(peer, each.path.name) for each in chosen for peer in _opened(each, options, engine, stack)]
        yield (
            [peer for peer, _ in opened],
            [file for _, file in opened],
            [{"name": kind.name, "install": kind.install} for kind in absent],
        )


def _opened(
    against: "Against", options: argparse.Namespace, engine: "Engine", stack: ExitStack
) -> Iterator["WorkerPeer"]:
    import psutil

    from edgespec.peers import WorkerPeer

    for way in against.kind.ways:
        say_stage(f"opening {against.path.name} in {against.kind.name} ({way})")
        peer = WorkerPeer(
            against,
            way,
            num_threads=options.threads or psutil.cpu_count(logical=False) or 1,
            context_length=min(engine.context_length, _PEER_CONTEXT),
            eos=engine.manifest.eos_token_ids,
            text_of=engine.tokenizer.decode,
        )
        stack.callback(peer.close)
        yield peer


def _write(document: Any, options: argparse.Namespace) -> None:
    from edgespec.disk import replace_file

    pages: list[tuple[Path, bytes]] = []
    if options.html:
        from edgespec.report import page

        pages.append((options.html, page(document).encode()))
    if options.png:
        from edgespec.report_png import picture

        pages.append((options.png, picture(document)))
    for path, data in pages:
        try:
            replace_file(path, data, 0o666)
        except OSError as error:
            raise EdgeSpecError(
                f"cannot write {path} ({error.strerror}); name another place"
                + ("" if options.report else ", with --report and what --json printed")
            ) from None
        say_stage(f"wrote {path}")
