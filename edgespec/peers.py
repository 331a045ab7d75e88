"""Other runtimes to compare with, each in a process of its own: what they load, print or break stays there."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
from typing import IO, Any, NamedTuple

from edgespec.benchmark import PeerAnswer
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.manifest import Manifest, file_record

# Loading a model, or an answer, that takes longer than this does not come.
_LONGEST_S = 900.0
_TOLD_BYTES = 2000
GGUF, GENAI_FOLDER = "a .gguf file", "a folder with genai_config.json"


class Kind(NamedTuple):
    """A runtime: its distribution, which is its name, its module, what it loads, and how it can decode."""

    name: str
    module: str
    loads: str
    ways: tuple[str, ...]

    @property
    def install(self) -> str:
        return f"pip install {self.name}"

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


KINDS = {
    kind.name: kind
    for kind in (
        Kind("xllamacpp", "xllamacpp", GGUF, ("plain", "ngram-cache")),
        Kind("onnxruntime-genai", "onnxruntime_genai", GENAI_FOLDER, ("plain",)),
        Kind("openvino-genai", "openvino_genai", GGUF, ("plain", "prompt-lookup")),
    )
}


@dataclass(frozen=True, slots=True)
class Against:
    """A runtime to compare with and what it is to load."""

    kind: Kind
    path: Path


def choose(
    wanted: Sequence[str], find: Callable[[Kind], Path | None], report: Callable[[str], None]
) -> tuple[list[Against], list[Kind]]:
    """The runtimes to compare with, and of `all`, which is those that are not named, what is not installed.

    Args:
        wanted: NAME, NAME=PATH or all.
        find: What a runtime can load of the model that is measured, if there is anything.

    Raises:
        UsageError: One that was named is unknown, not installed, or has nothing to load.
    """
    named = dict(each.partition("=")[::2] for each in wanted)
    for name in named.keys() - KINDS.keys() - {"all"}:
        raise UsageError(f"no runtime {name!r}; wanted all, {', '.join(KINDS)}, or NAME=PATH")
    chosen = [
        _named(kind, Path(named[name]) if named[name] else None, find)
        for name, kind in KINDS.items()
        if name in named
    ]
    if "all" not in named:
        return chosen, []
    others = [kind for name, kind in KINDS.items() if name not in named]
    return chosen + _present(others, find, report), [kind for kind in others if not kind.is_installed]


def _present(
    kinds: Sequence[Kind], find: Callable[[Kind], Path | None], report: Callable[[str], None]
) -> list[Against]:
    found = []
    for kind in kinds:
        if not kind.is_installed:
            report(f"{kind.name} is not here; to compare with it: {kind.install}")
        elif (path := find(kind)) is None:
            report(
                f"{kind.name} has nothing to load; to compare with it: --against {kind.name}=PATH ({kind.loads})"
            )
        else:
            found.append(Against(kind, path))
    return found


def _named(kind: Kind, path: Path | None, find: Callable[[Kind], Path | None]) -> Against:
    if not kind.is_installed:
        raise UsageError(f"{kind.name} is not installed; to compare with it: {kind.install}")
    path = path or find(kind)
    if path is None:
        raise UsageError(
            f"the file that this model was made of is not here; name {kind.loads}: --against {kind.name}=PATH"
        )
    if not path.exists():
        raise UsageError(f"{path} does not exist; {kind.name} loads {kind.loads}")
    return Against(kind, path)


def loadable(kind: Kind, model: str, folder: Path | None, downloads: Path, manifest: Manifest) -> Path | None:
    """What a runtime can load of a model: the very file that it was exported from, or its folder.

    Args:
        model: As the user named it.
        folder: Of the model, where there is one.
        downloads: Where the files of named models are kept.
    """
    if kind.loads == GENAI_FOLDER:
        return folder if folder and (folder / "genai_config.json").is_file() else None
    source = manifest.source
    places = [Path(model), downloads / Path(source.name).name]
    for path in places:
        if path.suffix == ".gguf" and path.is_file() and file_record(path).sha256 == source.sha256:
            return path
    return None


class WorkerPeer:
    """A runtime in one of its ways to decode, in a process that is ended by close().

    Args:
        eos: Tokens that end an answer, and are no text.
        text_of: What tokens say, by the tokenizer of the model that is measured.

    Raises:
        EdgeSpecError: It cannot load the file, or ends.
    """

    def __init__(
        self,
        against: Against,
        way: str,
        *,
        num_threads: int,
        context_length: int,
        eos: Sequence[int],
        text_of: Callable[[Sequence[int]], str],
    ) -> None:
        self.name, self.way = against.kind.name, way
        self._eos, self._text_of = frozenset(eos), text_of
        self._said: IO[bytes] = TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "edgespec.peers_worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True, encoding="utf-8",
        )  # fmt: skip
        try:
            ready = self._ask(
                runtime=self.name,
                way=way,
                path=str(against.path.absolute()),
                num_threads=num_threads,
                context_length=context_length,
                eos_token_ids=list(eos),
            )
        except BaseException:
            self.close()
            raise
        self.version = str(ready["version"])
        self._peak_rss_bytes = int(ready["peak_rss_bytes"])

    def answer(self, tokens: Sequence[int], max_tokens: int) -> PeerAnswer:
        said = self._ask(tokens=list(tokens), max_tokens=max_tokens)
        self._peak_rss_bytes = int(said["peak_rss_bytes"])
        made = said["answer"]
        text = made if isinstance(made, str) else self._text_of([each for each in made if each not in self._eos])
        return PeerAnswer(text, int(said["num_decoded"]), float(said["decode_s"]), float(said["first_s"]))

    def peak_rss_bytes(self) -> int:
        return self._peak_rss_bytes

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._said):
            with suppress(OSError):  # what was not sent any more
                if stream:
                    stream.close()

    def _ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = Timer(_LONGEST_S, self._process.kill)
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
            raise EdgeSpecError(f"{self.name} ended: {self._last_words()}")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise EdgeSpecError(f"{self.name}: {said['error']}")
        return said

    def _last_words(self) -> str:
        code = self._process.wait()
        self._said.seek(0, 2)
        self._said.seek(max(0, self._said.tell() - _TOLD_BYTES))
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return f"{lines[-1] if lines else 'without a word'} (code {code})"
