"""Readers of input from outside, as functions of bytes: each reads them, or refuses them by an EdgeSpecError.

Used by test_fuzz.py on a few damaged inputs, and by scripts/fuzz.py on as many as there is time for.
"""

import io
import json
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import tiny

from edgespec.cli.main import command_parser
from edgespec.config.config_file import read_file
from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.transcript import Transcript
from edgespec.errors import EdgeSpecError
from edgespec.evaluation.prompts import read_prompts
from edgespec.export.convert import export_model
from edgespec.export.gguf import read_gguf
from edgespec.export.safetensors import read_tensors, weight_files
from edgespec.manifest import FILE_NAME, read_manifest
from edgespec.runtimes import foreign
from edgespec.setup.profile import LearnedStats, read_learned_stats, write_learned_stats
from edgespec.simulation.recording import read_recording
from edgespec.text.chat_template import Message
from edgespec.text.template_sandbox import render
from edgespec.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Target:
    """seeds: valid inputs, which are damaged to make others."""

    name: str
    take: Callable[[bytes], object]
    seeds: tuple[bytes, ...]

    def survives(self, data: bytes) -> bool:
        """Whether the input was read, and not refused with a message.

        Raises:
            Exception: Anything else is a finding.
        """
        try:
            self.take(data)
        except EdgeSpecError:
            return False
        return True


def targets(folder: Path) -> list[Target]:
    """All of them. Files are written into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny.write_gguf(folder / "seed.gguf", tiny.random_weights())
    model = folder / "model"
    export_model(folder / "seed.gguf", model, precision="fp32")
    huggingface = folder / "huggingface"
    tiny.write_huggingface(huggingface, tiny.random_weights())
    return [
        _gguf(folder),
        _safetensors(huggingface),
        _manifest(model),
        Target("tokenizer", _reading(folder / "tokenizer.json", Tokenizer), (_bytes(model, "tokenizer.json"),)),
        Target("chat template", _take_template, (tiny.TEMPLATE.encode(),)),
        _graph(folder / "foreign", model),
        Target(
            "configuration", _reading(folder / "config.toml", read_file), (b'threads = 2\ndrafter = "none"\n',)
        ),
        Target("transcript", _reading(folder / "talk.jsonl", Transcript.read), (_transcript(folder),)),
        Target(
            "experience",
            _in_folder(folder / "known", "experience.json", _take_experience),
            (_experience(folder / "seed"),),
        ),
        Target("recording", _reading(folder / "rounds.jsonl", read_recording), (_ROUNDS,)),
        Target("prompts", _reading(folder / "p.jsonl", lambda path: read_prompts(path, None)), (_PROMPTS,)),
        Target(
            "command line",
            partial(_take_arguments, command_parser()),
            (b"chat m --prompt hi --top-k 4", b"export a --output b"),
        ),
        Target("sampling", _take_sampling, (b'{"temperature": 0.8, "top_k": 4, "seed": 7}',)),
    ]


_GGUF_HEADER = 9000  # bytes of the seed
_PROMPTS = b'{"category": "a", "turns": ["hi", "and you"]}\n{"prompt": "hi"}\n'
_ROUNDS = b'{"round": 2, "source": "m", "num_draft": 3, "num_accepted": 1, "draft_ms": 2.0, "verify_ms": 9.0}\n'


def _transcript(folder: Path) -> bytes:
    path = folder / "seed.jsonl"
    Transcript(messages=(Message("user", "hi"), Message("assistant", "Hello.")), model="m").write(path)
    return path.read_bytes()


def _experience(folder: Path) -> bytes:
    folder.mkdir()
    known = LearnedStats({"here": {1: 1.0, 2: 1.2}}, {"here": {"m": (0.1, 0.01)}}, {("suffix", 3): (4.0, 9.0)})
    write_learned_stats(folder, known)
    return _bytes(folder, "experience.json")


def _bytes(folder: Path, name: str) -> bytes:
    return (folder / name).read_bytes()


def _reading(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def take(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return take


def _gguf(folder: Path) -> Target:
    """Its header is damaged, and what follows of weights stays."""
    whole = _bytes(folder, "seed.gguf")
    read = _reading(folder / "fuzzed.gguf", read_gguf)
    return Target("gguf", lambda data: read(data + whole[_GGUF_HEADER:]), (whole[:_GGUF_HEADER],))


def _in_folder(folder: Path, name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    folder.mkdir(exist_ok=True)
    return _reading(folder / name, lambda path: read(path.parent))


def _safetensors(folder: Path) -> Target:
    whole = _bytes(folder, "model.safetensors")

    def read(path: Path) -> None:
        for tensor in read_tensors(weight_files(path.parent))[0].values():
            tensor.vector() if tensor.rows == 1 else next(iter(tensor.floats()), None)

    return Target("safetensors", _reading(folder / "model.safetensors", read), (whole,))


def _manifest(folder: Path) -> Target:
    return Target("manifest", _in_folder(folder, FILE_NAME, read_manifest), (_bytes(folder, FILE_NAME),))


def _graph(folder: Path, model: Path) -> Target:
    """A graph that others made, with its weights beside it."""
    folder.mkdir()
    for name in ("model.onnx", "model.onnx.data", "tokenizer.json"):
        (folder / name).write_bytes(_bytes(model, name))
    manifest = read_manifest(model)
    graph = folder / "model.onnx"
    return Target("onnx", _reading(graph, lambda path: foreign.inspect(folder, manifest)), (graph.read_bytes(),))


def _take_experience(folder: Path) -> object:
    complaints: list[str] = []
    read_learned_stats(folder, complaints.append)
    if complaints:
        raise EdgeSpecError(complaints[0])
    return folder


def _take_template(data: bytes) -> object:
    """In the sandbox alone: what a template may take of time and memory is the affair of its process."""
    names = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}
    try:
        return render(data.decode(errors="replace"), names)
    except Exception as error:  # a template can raise anything; none of it may be a way out
        raise EdgeSpecError(str(error)) from None


def _take_arguments(parser: ArgumentParser, data: bytes) -> object:
    words = data.decode(errors="replace").split()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            return parser.parse_args(words)
    except SystemExit as ended:
        if ended.code in (0, 2):
            raise EdgeSpecError("refused") from None
        raise


def _take_sampling(data: bytes) -> object:
    """Values of any kind that JSON has."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        raise EdgeSpecError("no JSON") from None
    names = SamplingParams.__dataclass_fields__
    if not isinstance(values, dict) or not values.keys() <= names.keys():
        raise EdgeSpecError("no parameters")
    return SamplingParams(**values)


def damaged(seed: bytes, rng: np.random.Generator) -> bytes:
    """A seed with a few bytes changed, cut out, doubled or put in from elsewhere."""
    data = bytearray(seed)
    for _ in range(rng.integers(1, 5)):
        at, length = int(rng.integers(0, len(data) + 1)), int(rng.integers(1, 9))
        match rng.integers(0, 5):
            case 0:
                data[at : at + length] = rng.bytes(min(length, len(data) - at))
            case 1:
                del data[at : at + length]
            case 2:
                data[at:at] = data[at : at + length]
            case 3:
                data[at : at + length] = b"\xff" * length if rng.random() < 0.5 else b"\x00" * length
            case _:
                other = int(rng.integers(0, len(data) + 1))
                data[at:at] = data[other : other + length]
    return bytes(data)
