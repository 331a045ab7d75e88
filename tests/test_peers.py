import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from edgespec import SamplingParams, load
from edgespec.benchmark import PeerAnswer, measure
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.host import host, peak_rss_bytes
from edgespec.manifest import read_manifest
from edgespec.peers import KINDS, Against, Kind, WorkerPeer, choose, loadable
from edgespec.prompts import BenchPrompt, own_prompts
from edgespec.report import table

pytestmark = pytest.mark.slow  # a module of many models or processes

ABSENT = Kind("not-there", "edgespec_has_no_such_module", "a file", ("plain",))


class Echo:
    """A peer that says what it is told to, and fails at its answer number fails_at."""

    name, way, version = "echo", "plain", "1"

    def __init__(self, text: str, fails_at: int | None = None) -> None:
        self.text, self.fails_at = text, fails_at
        self.asked: list[tuple[list[int], int]] = []

    def answer(self, tokens: Sequence[int], max_tokens: int) -> PeerAnswer:
        if len(self.asked) == self.fails_at:
            raise EdgeSpecError("it broke")
        self.asked.append((list(tokens), max_tokens))
        return PeerAnswer(self.text, 4, 2.0, 0.5)

    def peak_rss_bytes(self) -> int:
        return 7


def setup(text_of: Callable[[Sequence[int]], str] = str) -> dict[str, Any]:
    return {"num_threads": 1, "context_length": 600, "eos": [0], "text_of": text_of}


def run(model: Path, peer: Echo) -> dict[str, Any]:
    prompts = [BenchPrompt("a", ("the in the in", "second")), BenchPrompt("b", ("an on an on",))]
    with load(model) as engine:
        tokens = [int(token) for token in engine.encode("an on an on")]
        document = measure(engine, prompts, max_tokens=9, sampling=SamplingParams(), peers=[peer])
    assert peer.asked[-1] == (tokens, 9) or peer.fails_at is not None
    return document


def test_peer_answers_the_same_prompts_and_its_warm_up_is_not_counted(tiny_model: Path) -> None:
    peer = Echo("no such text")
    (row,) = run(tiny_model, peer)["peers"]
    assert len(peer.asked) == 4
    assert (row["answers"], row["same_answers"], row["categories"]) == (3, 0, {"a": 2.0, "b": 2.0})
    assert (row["time_to_first_token_s"], row["peak_rss_bytes"], row["failure"]) == (0.5, 7, None)


def test_ratio_of_a_peer_is_to_our_plain_decoding(tiny_model: Path) -> None:
    document = run(tiny_model, Echo(""))
    plain = [row["plain_tokens_per_second"] for row in document["categories"].values()]
    assert document["peers"][0]["mean_ratio"] == pytest.approx(sum(2.0 / each for each in plain) / 2)


def test_peer_that_fails_is_left_out_and_said(tiny_model: Path) -> None:
    peer = Echo("", fails_at=2)
    document = run(tiny_model, peer)
    (row,) = document["peers"]
    assert (row["answers"], row["failure"], list(row["categories"])) == (1, "it broke", ["a"])
    assert "it broke" in table({**document, "absent": []})


def test_unknown_absent_and_empty_handed_runtimes_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def nothing(kind: Kind) -> None:
        return None

    with pytest.raises(UsageError, match="no runtime 'vllm'"):
        choose(["vllm"], nothing, print)
    monkeypatch.setitem(KINDS, "not-there", ABSENT)
    with pytest.raises(UsageError, match="pip install not-there"):
        choose(["not-there"], nothing, print)
    monkeypatch.setitem(KINDS, "there", ABSENT._replace(name="there", module="json"))
    with pytest.raises(UsageError, match="--against there=PATH"):
        choose(["there"], nothing, print)
    with pytest.raises(UsageError, match="does not exist"):
        choose([f"there={tmp_path / 'none'}"], nothing, print)


def test_all_takes_what_is_here_and_names_how_to_get_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = ABSENT._replace(name="there", module="json")
    for name in list(KINDS):
        monkeypatch.delitem(KINDS, name)
    monkeypatch.setitem(KINDS, "not-there", ABSENT)
    monkeypatch.setitem(KINDS, "there", there)
    said: list[str] = []
    chosen, absent = choose(["all"], lambda kind: tmp_path, said.append)
    assert (chosen, absent) == ([Against(there, tmp_path)], [ABSENT])
    assert said == ["not-there is not here; to compare with it: pip install not-there"]
    assert choose(["all", f"there={tmp_path}"], lambda kind: None, said.append) == (chosen, absent)


def test_only_the_very_file_of_the_export_is_taken(tiny_model: Path, tmp_path: Path) -> None:
    manifest = read_manifest(tiny_model)
    (tmp_path / manifest.source.name).write_bytes(b"something else")
    assert loadable(KINDS["xllamacpp"], "name", tiny_model, tmp_path, manifest) is None
    assert loadable(KINDS["onnxruntime-genai"], "name", tiny_model, tmp_path, manifest) is None


def test_worker_says_why_it_cannot_load(tmp_path: Path) -> None:
    with pytest.raises(EdgeSpecError, match="not-there: 'not-there'"):
        WorkerPeer(Against(ABSENT, tmp_path), "plain", **setup())


@pytest.mark.peers
@pytest.mark.skipif(
    not KINDS["onnxruntime-genai"].is_installed, reason="wants onnxruntime-genai, installed by hand"
)
def test_onnxruntime_genai_gives_the_text_of_plain_decoding_of_its_folder(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(Path(__file__).parent / "data" / "genai", tmp_path / "genai"))
    with load(folder, drafter="none") as engine:
        tokens = [int(token) for token in engine.encode("the in the in")]
        plain = engine.generate("the in the in", max_tokens=12)
        peer = WorkerPeer(Against(KINDS["onnxruntime-genai"], folder), "plain", **setup(engine.tokenizer.decode))
        try:
            answer = peer.answer(tokens, 12)
        finally:
            peer.close()
    assert answer.text.strip() == plain.text.strip()
    assert answer.num_decoded == len(plain.token_ids) - 1


def test_worker_that_dies_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(EdgeSpecError, match="not-there ended"):
        WorkerPeer(Against(ABSENT, tmp_path), "plain", **setup())


def test_worker_keeps_what_a_runtime_prints_off_its_answers() -> None:
    code = (
        "import os, edgespec.peers_worker as w\n"
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
        [sys.executable, "-c", code],
        input="\n".join(map(json.dumps, lines)) + "\n", capture_output=True, text=True, check=True,
    )  # fmt: skip
    opened, answer = map(json.loads, io.StringIO(done.stdout))
    assert opened["version"] == host()["numpy"]
    assert (answer["num_decoded"], answer["first_s"], answer["peak_rss_bytes"] > 0) == (3, 5, True)


def test_peak_of_memory_is_of_this_process() -> None:
    assert 10 << 20 < peak_rss_bytes() < 64 << 30


def test_own_prompts_are_two_of_each_kind() -> None:
    categories = [prompt.category for prompt in own_prompts()]
    assert {categories.count(name) for name in categories} == {2}
    assert own_prompts(1) == own_prompts()[::2]
