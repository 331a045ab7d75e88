import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import peer_runtimes
import peers
import peers_worker
import pytest
from peer_folder import write_folder
from peer_process import WorkerProcess
from peer_runtimes import RUNTIMES, Runtime, choose, find_source

from edgespec import SamplingParams, load
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.evaluation.benchmark import measure
from edgespec.evaluation.peer import PeerReply
from edgespec.evaluation.prompts import BenchPrompt
from edgespec.evaluation.table import table
from edgespec.manifest import read_manifest
from edgespec.system.system_info import system_info
from edgespec.text.chat_template import Message

pytestmark = pytest.mark.slow  # a module of many models or processes

ABSENT = Runtime("not-there", "edgespec_has_no_such_module", "a file", ("plain",))
PRESENT = ABSENT._replace(name="there", module="json")


class Echo:
    """A peer that gives one text, and fails at its answer number fails_at."""

    name, way, version, file, peak_rss_bytes = "echo", "plain", "1", "m.gguf", 7

    def __init__(self, text: str, fails_at: int | None = None) -> None:
        self.text, self.fails_at = text, fails_at
        self.asked: list[tuple[list[int], int]] = []

    def answer(self, messages: Sequence[Message], tokens: Sequence[int], max_tokens: int) -> PeerReply:
        if len(self.asked) == self.fails_at:
            raise EdgeSpecError("it broke")
        self.asked.append((list(tokens), max_tokens))
        return PeerReply(self.text, 4, 2.0, 0.5, ())


def measured(model: Path, peer: Echo) -> dict[str, Any]:
    prompts = [BenchPrompt("a", ("the in the in", "second")), BenchPrompt("b", ("an on an on",))]
    with load(model) as engine:
        tokens = [int(token) for token in engine.encode("an on an on")]
        document = measure(engine, prompts, max_tokens=9, sampling=SamplingParams(), rounds=1, peers=[peer])
    assert (tokens, 9) in peer.asked or peer.fails_at is not None
    return dict(document)


def test_peer_answers_the_same_prompts_and_its_warm_up_is_not_counted(tiny_model: Path) -> None:
    peer = Echo("no such text")
    (row,) = measured(tiny_model, peer)["peers"]
    assert len(peer.asked) == 4
    assert (row["answers"], row["same_answers"]) == (3, 0)
    assert row["categories"] == pytest.approx({"a": 2.0, "b": 2.0})
    assert (row["time_to_first_token_s"], row["peak_rss_bytes"], row["failure"]) == (0.5, 7, None)


def test_ratio_of_a_peer_is_to_our_plain_decoding(tiny_model: Path) -> None:
    document = measured(tiny_model, Echo(""))
    plain = [row["plain_tokens_per_second"] for row in document["categories"].values()]
    (row,) = document["peers"]
    assert row["mean_ratio"] == pytest.approx(2.0 / (plain[0] * plain[1]) ** 0.5)
    low, high = row["mean_ratio_interval"]
    assert low < row["mean_ratio"] < high


def test_peer_that_fails_is_left_out_and_reported(tiny_model: Path) -> None:
    peer = Echo("", fails_at=2)
    document = measured(tiny_model, peer)
    (row,) = document["peers"]
    assert (row["answers"], row["failure"], len(row["categories"])) == (1, "it broke", 1)
    assert "it broke" in table(document)  # type: ignore[arg-type]


def setup(text_of: Callable[[Sequence[int]], str] = str) -> dict[str, Any]:
    return {"num_threads": 1, "context_length": 600, "eos": [0], "text_of": text_of}


def find_nothing(runtime: Runtime) -> None:
    return None


@pytest.fixture
def runtimes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_runtimes, "RUNTIMES", {"not-there": ABSENT, "there": PRESENT})


@pytest.mark.usefixtures("runtimes")
def test_runtimes_that_are_unknown_absent_or_have_nothing_to_load_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no runtime 'vllm'"):
        choose(["vllm"], find_nothing, print)
    with pytest.raises(UsageError, match="pip install not-there"):
        choose(["not-there"], find_nothing, print)
    with pytest.raises(UsageError, match="--against there=PATH"):
        choose(["there"], find_nothing, print)
    with pytest.raises(UsageError, match="does not exist"):
        choose([f"there={tmp_path / 'none'}"], find_nothing, print)
    with pytest.raises(UsageError, match="no runtime 'vllm'"):
        choose([], find_nothing, print, {"vllm": sys.executable})
    assert choose([f"there={tmp_path}"], find_nothing, print) == [(PRESENT, tmp_path)]


@pytest.mark.usefixtures("runtimes")
def test_without_names_all_that_are_installed_are_taken_and_the_others_are_reported(tmp_path: Path) -> None:
    reported: list[str] = []
    assert choose([], lambda runtime: tmp_path, reported.append) == [(PRESENT, tmp_path)]
    assert len(reported) == 1
    assert reported[0].startswith(
        "not-there is not installed; to compare with it: pip install not-there, or --python"
    )
    assert choose([], find_nothing, reported.append) == []
    assert "--against there=PATH" in reported[-1]


def test_runtime_may_be_in_another_environment(tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert PRESENT.is_installed_in(str(link))
    assert not ABSENT.is_installed_in(str(link))


def test_worker_runs_where_edgespec_is_not_installed() -> None:
    code = (
        "import sys; sys.modules['edgespec'] = None; import peers_worker; print(peers_worker.peak_rss_bytes() > 0)"
    )
    folder = Path(peers_worker.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_folder_for_other_runtimes_gives_the_logits_of_all_tokens(tiny_model: Path, tmp_path: Path) -> None:
    write_folder(tiny_model, tmp_path / "peer")
    manifest = read_manifest(tiny_model)
    session = onnxruntime.InferenceSession(tmp_path / "peer" / "model.onnx", providers=["CPUExecutionProvider"])
    tokens = np.array([[5, 6, 7, 5]], np.int64)
    cache = manifest.kv_cache
    empty = np.zeros((1, cache.num_kv_heads, 0, cache.head_dim), np.float32)
    past = {each.name: empty for each in session.get_inputs() if each.name.startswith("past_key_values")}
    (logits,) = session.run(["logits"], {"input_ids": tokens, "attention_mask": np.ones_like(tokens), **past})
    with load(tiny_model, drafter="none") as engine:
        wanted = engine.target.logits(tokens[0].astype(np.int32), 4)
        np.testing.assert_allclose(logits[0], wanted, atol=1e-4)
    with pytest.raises(UsageError, match="exists"):
        write_folder(tiny_model, tmp_path / "peer")


def test_comparison_without_any_runtime_is_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peer_runtimes, "RUNTIMES", {"not-there": ABSENT})
    assert peers.main([str(tiny_model), "--max-tokens", "2"]) == 2
    assert "no runtime to compare with" in capsys.readouterr().err
    assert peers.main([str(tiny_model), "--temperature", "1"]) == 2


def test_comparison_is_printed_with_its_peers(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "open_peers", lambda options, engine: nullcontext([Echo("")]))
    assert peers.main([str(tiny_model), "--max-tokens", "4", "--per-category", "1", "--rounds", "1"]) == 0
    printed = capsys.readouterr()
    assert "echo 1 (plain): " in printed.out
    assert "round 1 of 1" in printed.err


def test_only_the_very_file_of_the_export_is_taken(tiny_model: Path, tmp_path: Path) -> None:
    manifest = read_manifest(tiny_model)
    (tmp_path / manifest.source.name).write_bytes(b"something else")
    assert find_source(RUNTIMES["xllamacpp"], "name", tiny_model, tmp_path, manifest) is None
    assert find_source(RUNTIMES["onnxruntime-genai"], "name", tiny_model, tmp_path, manifest) is None


def test_worker_says_why_it_cannot_load(tmp_path: Path) -> None:
    with pytest.raises(EdgeSpecError, match="not-there: 'not-there'"):
        WorkerProcess("not-there", "plain", tmp_path, **setup())


@pytest.mark.peers
@pytest.mark.skipif(
    not RUNTIMES["onnxruntime-genai"].is_installed_in(sys.executable), reason="needs pip install onnxruntime-genai"
)
@pytest.mark.parametrize("way", ["plain", "ngram"])
def test_onnxruntime_genai_gives_the_text_of_plain_decoding_of_its_folder(tmp_path: Path, way: str) -> None:
    folder = Path(shutil.copytree(Path(__file__).parents[1] / "support" / "data" / "genai", tmp_path / "genai"))
    with load(folder, drafter="none") as engine:
        tokens = [int(token) for token in engine.encode("the in the in")]
        plain = engine.generate("the in the in", max_tokens=12)
        peer = WorkerProcess("onnxruntime-genai", way, folder, **setup(engine.tokenizer.decode))
        try:
            answer = peer.answer([], tokens, 12)
        finally:
            peer.close()
    assert answer.text.strip() == plain.text.strip()
    assert answer.num_decoded == len(plain.token_ids) - 1


def test_worker_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(EdgeSpecError, match="not-there ended"):
        WorkerProcess("not-there", "plain", tmp_path, **setup())


def test_worker_keeps_what_a_runtime_prints_off_its_answers() -> None:
    code = (
        "import os, peers_worker as w\n"
        "class Noisy:\n"
        "    def __init__(self, setup): os.write(1, b'noise')\n"
        "    def decode(self, tokens, max_tokens):\n"
        "        print('more')\n"
        "        return w.Decoded('t', len(tokens), 1.0, max_tokens)\n"
        "w.RUNTIMES['numpy'] = Noisy\n"
        "w.main()\n"
    )
    opening = {"runtime": "numpy", "path": "p", "way": "plain", "num_threads": 1, "context_length": 8}
    lines = [{**opening, "eos_token_ids": [0]}, {"tokens": [1, 2, 3], "max_tokens": 5}]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(peers.__file__).parent,
        input="\n".join(map(json.dumps, lines)) + "\n", capture_output=True, text=True, check=True,
    )  # fmt: skip
    opened, answer = map(json.loads, io.StringIO(done.stdout))
    assert opened["version"] == system_info()["numpy"]
    assert (answer["num_decoded"], answer["first_s"], answer["peak_rss_bytes"] > 0) == (3, 5, True)
