"""Speculation and plain decoding of a model beside other runtimes, on your prompts, in the same run.

    pip install xllamacpp          # or openvino-genai, onnxruntime-genai, dejavuu (Python 3.13)
    python bench/peers.py MODEL --prompts FILE [--against NAME[=PATH]] [options of edgespec bench]

Each runtime answers every prompt between the answers of edgespec, so that figures compare neighbours in time. It
runs in a process of its own (peers_worker.py): what it loads, prints or breaks stays there. Without --against, all
runtimes answer that are installed and can load the model. --python says which interpreter has a runtime that is
installed in an environment of its own. onnxruntime-genai and dejavuu load a folder that peer_folder.py makes.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from peer_process import WorkerProcess
from peer_runtimes import RUNTIMES, Runtime, choose, find_source

from edgespec.cli.bench import add_bench, bench
from edgespec.cli.parser import CommandParser
from edgespec.engine.engine import Engine
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.setup.home import ModelHome, default_home
from edgespec.system.console import info, log_to_stderr
from edgespec.system.system_info import physical_cores

_CONTEXT_LENGTH = 8192


@contextmanager
def open_peers(options: argparse.Namespace, engine: Engine) -> Iterator[list[WorkerProcess]]:
    home = ModelHome(default_home(), True, info)
    folder = Path(options.model) if Path(options.model).is_dir() else None
    pythons = _named(options.python, "--python")

    def find(runtime: Runtime) -> Path | None:
        return find_source(runtime, options.model, folder, home.path / "downloads", engine.manifest)

    peers = []
    with ExitStack() as stack:
        for runtime, path in choose(options.against, find, info, pythons):
            for way in _ways(runtime, options):
                info(f"opening {path.name} in {runtime.name} ({way})")
                try:
                    worker = WorkerProcess(
                        runtime.name,
                        way,
                        path,
                        num_threads=options.threads or physical_cores(),
                        context_length=min(engine.context_length, _CONTEXT_LENGTH),
                        eos=engine.manifest.eos_token_ids,
                        text_of=engine.tokenizer.decode,
                        python=pythons.get(runtime.name),
                        draft_path=options.draft_model if way == "draft-model" else None,
                    )
                except EdgeSpecError as error:
                    info(f"{runtime.name} ({way}) is left out: {error}")
                    continue
                stack.callback(worker.close)
                peers.append(worker)
        if not peers:
            raise UsageError("there is no runtime to compare with; install one, or name what it is to load")
        yield peers


def _ways(runtime: Runtime, options: argparse.Namespace) -> list[str]:
    has_draft_model = runtime.has_draft_model and options.draft_model is not None
    ways = [*runtime.ways, *(["draft-model"] if has_draft_model else [])]
    return [way for way in ways if not options.way or way in options.way]


def _named(pairs: Sequence[str], flag: str) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise UsageError(f"{flag} is {pair!r}; wanted NAME=PATH")
    return dict(pair.split("=", 1) for pair in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    # The options are those of the command bench, by which they are looked up.
    parser = CommandParser(prog="peers.py bench", description="Compare edgespec with other runtimes in one run.")
    add_bench(parser)
    parser.everyday = None  # all are listed, with those below
    parser.add_argument(
        "--against",
        metavar="NAME[=PATH]",
        action="append",
        default=[],
        help=f"a runtime to compare with, and what it is to load: {', '.join(RUNTIMES)}; repeatable (default: all "
        "that are installed and can load the model)",
    )
    parser.add_argument(
        "--python",
        metavar="NAME=PYTHON",
        action="append",
        default=[],
        help="the interpreter that has a runtime; repeatable (default: this one)",
    )
    parser.add_argument(
        "--way",
        metavar="WAY",
        action="append",
        help="only this way to decode, such as plain, ngram-cache or draft-model; repeatable (default: all)",
    )
    parser.add_argument(
        "--draft-model",
        metavar="PATH",
        type=Path,
        help="a drafter model for runtimes that take one: a .gguf file for xllamacpp, a folder for openvino-genai",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(command="bench")
    options = parser.parse_args(arguments)
    try:
        if options.temperature:
            raise UsageError("other runtimes answer greedily; leave out --temperature")
        with log_to_stderr():
            bench(options, partial(open_peers, options))
    except EdgeSpecError as error:
        print(f"peers: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
