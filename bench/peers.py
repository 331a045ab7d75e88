"""Speculation and plain decoding of a model beside other runtimes, on your prompts, in the same run.

    pip install xllamacpp          # or openvino-genai, onnxruntime-genai, dejavuu (Python 3.13)
    python bench/peers.py MODEL --prompts FILE [--against NAME[=PATH]] [options of edgespec bench]

Each runtime answers every prompt between the answers of edgespec, so that figures compare neighbours in time. It
runs in a process of its own (peers_worker.py): what it loads, prints or breaks stays there. Without --against, all
runtimes answer that are installed and can load the model. --python says which interpreter has a runtime that is
installed in an environment of its own. onnxruntime-genai and dejavuu load a folder that peer_folder.py makes.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import psutil

from edgespec.cli.bench import add_bench, bench
from edgespec.engine.engine import Engine
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.evaluation.peer import PeerReply
from edgespec.manifest import Manifest, file_record
from edgespec.models.home import ModelHome, default_home
from edgespec.system.console import info, log_to_stderr
from edgespec.tokenization.chat_template import Message

_WORKER = Path(__file__).with_name("peers_worker.py")
# A runtime that takes longer than this to load a model, or to answer, is ended.
_TIMEOUT_S = 900.0
_STDERR_BYTES = 2000
_CONTEXT_LENGTH = 8192
GGUF, GENAI_FOLDER = "a .gguf file", "a folder with genai_config.json"


class Runtime(NamedTuple):
    """name is that of its distribution; loads says what it can load, and ways how it can decode."""

    name: str
    module: str
    loads: str
    ways: tuple[str, ...]
    has_draft_model: bool = False

    def is_installed_in(self, python: str) -> bool:
        if python == sys.executable:
            return importlib.util.find_spec(self.module) is not None
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({self.module!r}) is None)"
        return subprocess.run([python, "-c", code], check=False).returncode == 0

    @property
    def is_installed(self) -> bool:
        return self.is_installed_in(sys.executable)


_NGRAM_WAYS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
# dejavuu's methods that need no corpus and were best in a replay of recorded answers.
_DEJAVUU_WAYS = ("plain", "pld", "suffix-decoding", "suffix-recycle-tail", "asd-verify")
RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime("xllamacpp", "xllamacpp", GGUF, ("plain", *_NGRAM_WAYS), has_draft_model=True),
        Runtime("onnxruntime-genai", "onnxruntime_genai", GENAI_FOLDER, ("plain", "ngram")),
        Runtime("openvino-genai", "openvino_genai", GGUF, ("plain", "prompt-lookup"), has_draft_model=True),
        Runtime("dejavuu", "dejavuu", GENAI_FOLDER, _DEJAVUU_WAYS),
    )
}


def choose(
    wanted: Sequence[str],
    find: Callable[[Runtime], Path | None],
    report: Callable[[str], None],
    pythons: Mapping[str, str] = MappingProxyType({}),
) -> list[tuple[Runtime, Path]]:
    """The runtimes to compare with, and what each is to load.

    Args:
        wanted: NAME or NAME=PATH; none for all that are installed and have something to load.
        find: Finds what a runtime can load of the model that is measured.
        pythons: The interpreters that have a runtime, by its name, where it is not this one.

    Raises:
        UsageError: A runtime that was named is unknown, not installed, or has nothing to load.
    """
    named = dict(each.partition("=")[::2] for each in wanted)
    for name in (named.keys() | pythons.keys()) - RUNTIMES.keys():
        raise UsageError(f"no runtime {name!r}; wanted {', '.join(RUNTIMES)}, or NAME=PATH")
    chosen = []
    for name, runtime in RUNTIMES.items():
        if named and name not in named:
            continue
        try:
            chosen.append((runtime, _path_for(runtime, named.get(name), find, pythons.get(name, sys.executable))))
        except UsageError as error:
            if named:
                raise
            report(str(error))
    return chosen


def _path_for(runtime: Runtime, stated: str | None, find: Callable[[Runtime], Path | None], python: str) -> Path:
    name = runtime.name
    if not runtime.is_installed_in(python):
        raise UsageError(
            f"{name} is not installed; to compare with it: pip install {name}, or --python {name}=PYTHON with an "
            "interpreter that has it"
        )
    path = Path(stated) if stated else find(runtime)
    if path is None:
        raise UsageError(
            f"{name} has nothing to load; to compare with it, name {runtime.loads}: --against {name}=PATH"
        )
    if not path.exists():
        raise UsageError(f"{path} does not exist; {name} loads {runtime.loads}")
    return path


def find_source(
    runtime: Runtime, model: str, folder: Path | None, downloads: Path, manifest: Manifest
) -> Path | None:
    """What a runtime can load of a model: the very file that it was exported from, or its folder.

    Args:
        model: As the user named it.
        folder: The model's folder; None where it is no folder.
        downloads: Where the files of named models are kept.
    """
    if runtime.loads == GENAI_FOLDER:
        return folder if folder and (folder / "genai_config.json").is_file() else None
    source = manifest.source
    for path in (Path(model), downloads / Path(source.name).name):
        if path.suffix == ".gguf" and path.is_file() and file_record(path).sha256 == source.sha256:
            return path
    return None


class WorkerProcess:
    """A runtime in one of its ways to decode, in a process that is ended by close().

    Args:
        python: The interpreter that has it.
        draft_path: The file of a drafter model, for the way draft-model.
        eos: Tokens that end an answer, and are no text.
        text_of: The text of tokens, by the tokenizer of the model that is measured.

    Raises:
        EdgeSpecError: It cannot load the file, or ends.
    """

    def __init__(
        self,
        runtime: str,
        way: str,
        path: Path,
        *,
        num_threads: int,
        context_length: int,
        eos: Sequence[int],
        text_of: Callable[[Sequence[int]], str],
        python: str | None = None,
        draft_path: Path | None = None,
    ) -> None:
        self.name, self.way, self.file = runtime, way, path.name
        self._eos, self._text_of = frozenset(eos), text_of
        self._stderr: IO[bytes] = TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [python or sys.executable, str(_WORKER)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True, encoding="utf-8",
        )  # fmt: skip
        try:
            ready = self._ask(
                runtime=runtime,
                way=way,
                path=str(path.absolute()),
                num_threads=num_threads,
                context_length=context_length,
                eos_token_ids=list(eos),
                draft_path=str(draft_path.absolute()) if draft_path else None,
            )
        except BaseException:
            self.close()
            raise
        self.version = str(ready["version"])
        self.peak_rss_bytes = int(ready["peak_rss_bytes"])

    def answer(self, messages: Sequence[Message], tokens: Sequence[int], max_tokens: int) -> PeerReply:
        reply = self._ask(tokens=list(tokens), max_tokens=max_tokens)
        self.peak_rss_bytes = int(reply["peak_rss_bytes"])
        made = reply["answer"]
        ids = None if isinstance(made, str) else [int(each) for each in made if each not in self._eos]
        return PeerReply(
            made if ids is None else self._text_of(ids),
            int(reply["num_decoded"]),
            float(reply["decode_s"]),
            float(reply["first_s"]),
            ids,
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            with suppress(OSError):  # a question may be left that the process never read
                if stream:
                    stream.close()

    def _ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = Timer(_TIMEOUT_S, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise EdgeSpecError(f"{self.name} ended: {self._last_line()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EdgeSpecError(f"{self.name}: {reply['error']}")
        return reply

    def _last_line(self) -> str:
        """The last line that the process wrote to stderr, and its exit code."""
        code = self._process.wait()
        self._stderr.seek(0, 2)
        self._stderr.seek(max(0, self._stderr.tell() - _STDERR_BYTES))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"{lines[-1] if lines else 'without a message'} (exit code {code})"


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
                        num_threads=options.threads or psutil.cpu_count(logical=False) or 1,
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
    parser = argparse.ArgumentParser(
        "peers.py bench", description="Compare edgespec with other runtimes in one run."
    )
    add_bench(parser)
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
