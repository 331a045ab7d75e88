"""Speculation and plain decoding of a model beside other runtimes, on your prompts, in the same run.

    pip install xllamacpp          # or openvino-genai, or onnxruntime-genai
    python bench/peers.py MODEL --prompts FILE [--against NAME[=PATH]] [options of edgespec bench]

Each runtime answers every prompt between the answers of edgespec, so that figures compare neighbours in time. It
runs in a process of its own (peers_worker.py): what it loads, prints or breaks stays there. Without --against, all
runtimes answer that are installed and can load the model.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from threading import Timer
from typing import IO, Any, NamedTuple, Protocol

import psutil

from edgespec.cli.bench import add_bench, bench
from edgespec.engine.engine import Engine
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.evaluation.document import PeerRow
from edgespec.manifest import Manifest, file_record
from edgespec.models.home import ModelHome, default_home
from edgespec.system.console import info

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

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime("xllamacpp", "xllamacpp", GGUF, ("plain", "ngram-cache")),
        Runtime("onnxruntime-genai", "onnxruntime_genai", GENAI_FOLDER, ("plain",)),
        Runtime("openvino-genai", "openvino_genai", GGUF, ("plain", "prompt-lookup")),
    )
}


def choose(
    wanted: Sequence[str], find: Callable[[Runtime], Path | None], report: Callable[[str], None]
) -> list[tuple[Runtime, Path]]:
    """The runtimes to compare with, and what each is to load.

    Args:
        wanted: NAME or NAME=PATH; none for all that are installed and have something to load.
        find: Finds what a runtime can load of the model that is measured.

    Raises:
        UsageError: A runtime that was named is unknown, not installed, or has nothing to load.
    """
    named = dict(each.partition("=")[::2] for each in wanted)
    for name in named.keys() - RUNTIMES.keys():
        raise UsageError(f"no runtime {name!r}; wanted {', '.join(RUNTIMES)}, or NAME=PATH")
    chosen = []
    for name, runtime in RUNTIMES.items():
        if named and name not in named:
            continue
        try:
            chosen.append((runtime, _path_for(runtime, named.get(name), find)))
        except UsageError as error:
            if named:
                raise
            report(str(error))
    return chosen


def _path_for(runtime: Runtime, stated: str | None, find: Callable[[Runtime], Path | None]) -> Path:
    name = runtime.name
    if not runtime.is_installed:
        raise UsageError(f"{name} is not installed; to compare with it: pip install {name}")
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


class Answer(NamedTuple):
    """An answer of a runtime. Its decoding leaves out the first token, which took first_s."""

    text: str
    num_decoded: int
    decode_s: float
    first_s: float


class Worker(Protocol):
    """A runtime in one of its ways to decode, with a model loaded."""

    name: str
    way: str
    version: str
    file: str
    peak_rss_bytes: int

    def answer(self, tokens: Sequence[int], max_tokens: int) -> Answer:
        """Raises EdgeSpecError: It failed, and is not asked again."""
        ...


@dataclass(slots=True)
class CountedPeer:
    """Counts the decoding of a worker by category, and its answers that equal those of plain decoding."""

    worker: Worker
    report: Callable[[str], None]
    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    first_tokens_s: list[float] = field(default_factory=list)
    same_answers: int = 0
    failure: str | None = None

    def answer(self, category: str | None, tokens: Sequence[int], max_tokens: int, plain: str) -> None:
        if self.failure is not None:
            return
        try:
            answer = self.worker.answer(tokens, max_tokens)
        except EdgeSpecError as error:
            self.failure = str(error)
            self.report(f"{self.worker.name} ({self.worker.way}) is left out from here on: {error}")
            return
        if category is None:
            return
        if answer.num_decoded > 0 and answer.decode_s > 0:
            self.tokens[category] += answer.num_decoded
            self.seconds[category] += answer.decode_s
        self.first_tokens_s.append(answer.first_s)
        self.same_answers += answer.text.strip() == plain.strip()

    def row(self, plain: Mapping[str, float]) -> PeerRow:
        speeds = {name: self.tokens[name] / self.seconds[name] for name in self.tokens}
        ratios = [speed / plain[name] for name, speed in speeds.items() if plain[name]]
        return {
            "name": self.worker.name,
            "way": self.worker.way,
            "version": self.worker.version,
            "file": self.worker.file,
            "categories": speeds,
            "mean_ratio": sum(ratios) / len(ratios) if ratios else None,
            "time_to_first_token_s": median(self.first_tokens_s) if self.first_tokens_s else None,
            "answers": len(self.first_tokens_s),
            "same_answers": self.same_answers,
            "peak_rss_bytes": self.worker.peak_rss_bytes,
            "failure": self.failure,
        }


class WorkerProcess:
    """A runtime in one of its ways to decode, in a process that is ended by close().

    Args:
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
    ) -> None:
        self.name, self.way, self.file = runtime, way, path.name
        self._eos, self._text_of = frozenset(eos), text_of
        self._stderr: IO[bytes] = TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, str(_WORKER)],
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
            )
        except BaseException:
            self.close()
            raise
        self.version = str(ready["version"])
        self.peak_rss_bytes = int(ready["peak_rss_bytes"])

    def answer(self, tokens: Sequence[int], max_tokens: int) -> Answer:
        reply = self._ask(tokens=list(tokens), max_tokens=max_tokens)
        self.peak_rss_bytes = int(reply["peak_rss_bytes"])
        made = reply["answer"]
        text = made if isinstance(made, str) else self._text_of([each for each in made if each not in self._eos])
        return Answer(text, int(reply["num_decoded"]), float(reply["decode_s"]), float(reply["first_s"]))

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
def open_peers(options: argparse.Namespace, engine: Engine) -> Iterator[list[CountedPeer]]:
    home = ModelHome(default_home(), True, info)
    folder = Path(options.model) if Path(options.model).is_dir() else None

    def find(runtime: Runtime) -> Path | None:
        return find_source(runtime, options.model, folder, home.path / "downloads", engine.manifest)

    peers = []
    with ExitStack() as stack:
        for runtime, path in choose(options.against, find, info):
            for way in runtime.ways:
                info(f"opening {path.name} in {runtime.name} ({way})")
                worker = WorkerProcess(
                    runtime.name,
                    way,
                    path,
                    num_threads=options.threads or psutil.cpu_count(logical=False) or 1,
                    context_length=min(engine.context_length, _CONTEXT_LENGTH),
                    eos=engine.manifest.eos_token_ids,
                    text_of=engine.tokenizer.decode,
                )
                stack.callback(worker.close)
                peers.append(CountedPeer(worker, info))
        if not peers:
            raise UsageError("there is no runtime to compare with; install one, or name what it is to load")
        yield peers


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
    parser.set_defaults(command="bench")
    options = parser.parse_args(arguments)
    try:
        if options.temperature:
            raise UsageError("other runtimes answer greedily; leave out --temperature")
        bench(options, partial(open_peers, options))
    except EdgeSpecError as error:
        print(f"peers: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
