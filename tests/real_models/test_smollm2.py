"""The promises, on the real default model."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import jsonschema
import numpy as np
import pytest

import edgespec
from edgespec.cli.bench import score
from edgespec.cli.main import main
from edgespec.errors import EdgeSpecError
from edgespec.export.convert import export_model
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[2]
PROMPT = "Write a Python function that counts the words of a text, then explain each line of the function."


def answer(capsys: pytest.CaptureFixture[str], model: Path, *options: object) -> dict[str, object]:
    arguments = ["chat", model, "--prompt", PROMPT, "--max-tokens", 96, "--deterministic", "--json", *options]
    assert main([str(argument) for argument in arguments]) == 0
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    return document


def test_token_ids_of_the_command_are_the_same_with_a_drafter(
    capsys: pytest.CaptureFixture[str], smollm2: Path, smollm2_int8: Path
) -> None:
    """test_smollm2_exactness.py has all drafters, lengths and sampling."""
    plain = answer(capsys, smollm2, "--drafter", "none")
    assert len(plain["token_ids"]) > 60  # type: ignore[arg-type]
    drafted = answer(capsys, smollm2, "--drafter", smollm2_int8, "--draft-length", 3)
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["text"] == plain["text"]
    assert drafted["stats"]["acceptance_rate"] > 0.3  # type: ignore[index]


def test_tokens_are_those_of_the_reference(smollm2: Path) -> None:
    reference = json.loads((ROOT / "tests/support/data/reference_tokens.json").read_text())
    tokenizer = Tokenizer(smollm2 / "tokenizer.json")
    for text, ids in zip(reference["texts"], reference["smollm2"], strict=True):
        assert tokenizer.encode(text).tolist() == ids, text
        assert tokenizer.decode(ids) == text


def test_source_precision_scores_like_the_dequantised_weights(
    smollm2: Path, smollm2_int4: Path, smollm2_gguf: Path, tmp_path: Path
) -> None:
    export_model(smollm2_gguf, tmp_path / "fp32", precision="fp32")
    names = ["README.md", "docs/structure.md", "edgespec/decoding/scheduler.py", "edgespec/decoding/sampling.py"]
    texts = [(ROOT / name).read_text()[:1900] for name in names]

    def nll(folder: Path) -> float:
        """Nats per token over some 2,000 tokens; 900 alone scatter by 0.004 between kernels."""
        with edgespec.load(folder, drafter="none", deterministic=False) as engine:
            scores = [score(engine, text) for text in texts]
        assert sum(tokens for tokens, _ in scores) > 1600
        return float(np.mean([value for _, value in scores]))

    exact = nll(tmp_path / "fp32")
    assert nll(smollm2) == pytest.approx(exact, abs=0.01)
    assert nll(smollm2_int4) == pytest.approx(exact, abs=0.01), "a 4-bit source is kept by int4"


def test_cached_equals_uncached_to_the_bit(smollm2: Path) -> None:
    manifest = read_manifest(smollm2)
    cached, fresh = (OnnxDecoder(smollm2, manifest, find_device("cpu"), deterministic=True) for _ in range(2))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, manifest.vocab_size, 150).astype(np.int32)
    for width in [1, 2, 3, 8, 9, 17, 64, 129, 255, 257, 1, 4]:
        more = rng.integers(0, manifest.vocab_size, width).astype(np.int32)
        tokens = np.concatenate([tokens[: rng.integers(1, len(tokens) + 1)], more])
        num_last = min(width, 8)
        fresh._held = np.zeros(0, np.int32)
        assert np.array_equal(cached.logits(tokens, num_last), fresh.logits(tokens, num_last)), width


def test_name_of_the_catalogue_answers_offline_once_fetched(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    (tmp_path / "downloads").mkdir()
    shutil.copy(smollm2_gguf, tmp_path / "downloads")
    arguments = [
        "chat",
        "smollm2-135m",
        "--offline",
        "--prompt",
        "Name a colour of the sky.",
        "--max-tokens",
        "20",
    ]
    assert main(arguments) == 0
    assert len(capsys.readouterr().out.split()) > 3
    assert (tmp_path / "models" / "smollm2-135m" / "edgespec.json").exists()


def test_a_pass_is_ended_from_another_thread_and_its_cache_serves_on(smollm2: Path) -> None:
    decoder = OnnxDecoder(smollm2, read_manifest(smollm2), find_device("auto"))
    text = np.arange(1000, 1600, dtype=np.int32)
    before = decoder.logits(text[:40], 2).copy()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            decoder.logits(text, 1)
        except EdgeSpecError as error:
            errors.append(error)

    thread = Thread(target=run)
    thread.start()
    while thread.is_alive() and not errors:
        decoder.interrupt()
        thread.join(0.01)
    assert errors, "the pass came to its end"
    assert np.array_equal(decoder.logits(text[:40], 2), before)
    again = OnnxDecoder(smollm2, read_manifest(smollm2), find_device("auto"))
    again.logits(text[:40], 2)
    assert np.array_equal(decoder.logits(text, 3), again.logits(text, 3))


_INTERRUPTED = """
import signal
import sys
from time import monotonic
from edgespec import load

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job
with load(sys.argv[1], drafter="none", deterministic=True) as engine:
    try:
        print("reading", flush=True)
        engine.generate("Tell me of ships, and of the sea. " * 700, max_tokens=1)
    except KeyboardInterrupt:
        print(monotonic(), engine.target.num_fed, flush=True)
    print(engine.generate("Name a colour.", max_tokens=8).token_ids)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends Ctrl-C to one process, which Windows cannot")
def test_ctrl_c_ends_the_reading_of_a_long_prompt(smollm2: Path) -> None:
    with edgespec.load(smollm2, drafter="none", deterministic=True) as engine:
        wanted = engine.generate("Name a colour.", max_tokens=8).token_ids
    command = [sys.executable, "-c", _INTERRUPTED, str(smollm2)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "reading\n"
            time.sleep(1.0)  # of 7 s and more
            sent_s = time.monotonic()
            os.kill(child.pid, signal.SIGINT)
            ended_s, num_fed = child.stdout.readline().split()
            assert float(ended_s) - sent_s < 60, "3 ms on two cores with ten others at work"
            assert int(num_fed) < 7000, "the whole prompt was read"
            assert child.stdout.read() == f"{wanted}\n"
        finally:
            child.kill()


def test_threads_have_the_text_that_each_would_have_alone(smollm2: Path, smollm2_int8: Path) -> None:
    prompts = ["Name a colour.", "Count to ten.", "Say hello in French and in German."]
    with edgespec.load(smollm2, drafter=str(smollm2_int8), draft_length=3, deterministic=True) as engine:
        alone = [engine.plain().generate(prompt, max_tokens=32).token_ids for prompt in prompts]
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(engine.generate, prompt, max_tokens=32) for prompt in prompts]
            assert [answer.result().token_ids for answer in asked] == alone


def test_answers_match_their_schemas_with_any_drafter(smollm2: Path) -> None:
    schema = {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "year": {"type": "integer", "minimum": 1900, "maximum": 2030},
            "genres": {
                "type": "array",
                "items": {"enum": ["drama", "comedy", "crime"]},
                "minItems": 1,
                "maxItems": 3,
            },
            "released": {"type": "string", "format": "date"},
        },
        "required": ["title", "year", "genres", "released"],
        "additionalProperties": False,
    }
    options = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    prompt = "Describe a film as JSON."
    with edgespec.load(smollm2, deterministic=True) as engine:
        for max_tokens in (40, 100):
            plain = engine.plain().generate(prompt, max_tokens=max_tokens, **options)
            drafted = engine.generate(prompt, max_tokens=max_tokens, **options)
            assert drafted.token_ids == plain.token_ids
            assert "grammar" in drafted.origins
            jsonschema.validate(json.loads(plain.text), schema)
            assert plain.finish_reason == "stop"
