"""Requests made to stop a server with a real model: /health and the stream of another client go on."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import httpx2
import pytest
import tiny
from reference_weights import draw

from edgespec.export.convert import export_model

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me a long story."}], "max_tokens": 5}
LONGEST_S = 1.0  # on a machine that does nothing else
PRIVATE = "".join(map(chr, [*range(0xE000, 0xF8FF), *range(0xF0000, 0xFFFFD)]))
GROUPS = Path("/sys/fs/cgroup")


@contextmanager
def served_model(model: Path, *before: str) -> Iterator[httpx2.Client]:
    """A client of a server in a process of its own, which runs by the command before."""
    command = [*before, sys.executable, "-m", "edgespec", "serve", str(model), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"].removesuffix("/v1")
            with httpx2.Client(base_url=url, timeout=600) as client:
                yield client
            assert process.poll() is None, "the server lives"
        finally:
            process.terminate()


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for its load, and for a control group")


@pytest.fixture(scope="module")
def client(smollm2: Path) -> Iterator[httpx2.Client]:
    with served_model(smollm2) as found:
        assert found.post(CHAT, json=HI).status_code == 200
        yield found


def longest_s(client: httpx2.Client, is_over: Event, wait: Callable[[httpx2.Client], Iterator[object]]) -> float:
    """The longest time between two things that are waited for, again and again until something is over."""
    found, last_s = 0.0, monotonic()
    with httpx2.Client(base_url=client.base_url, timeout=60) as own:
        while not is_over.is_set():
            for _ in wait(own):
                found, last_s = max(found, monotonic() - last_s), monotonic()
                if is_over.is_set():
                    break
    return found


def health(client: httpx2.Client) -> Iterator[object]:
    Event().wait(0.02)
    yield client.get("/health").raise_for_status()


def stream(client: httpx2.Client) -> Iterator[object]:
    with client.stream("POST", CHAT, json={**HI, "max_tokens": 200, "stream": True}) as answer:
        yield from answer.iter_lines()


def messages(*contents: str) -> dict[str, Any]:
    return {**HI, "messages": [{"role": "user", "content": content} for content in contents]}


def formatted(stated: dict[str, Any]) -> dict[str, Any]:
    return {**HI, "response_format": stated}


def multiple(of: int) -> dict[str, Any]:
    schema = {"type": "integer", "multipleOf": of}
    return formatted({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def padded(ignored: str) -> bytes:
    return f'{json.dumps(HI)[:-1]}, "ignored": {ignored}}}'.encode()


# Made when they are asked: their texts are some 50 MB, and each process that tests reads this file.
REQUESTS: dict[str, tuple[str, Callable[[], Any], int]] = {
    "private-use characters": (CHAT, lambda: messages(PRIVATE), 400),
    "private-use characters to tokens": ("/tokenize", lambda: {"messages": messages(PRIVATE)["messages"]}, 400),
    "brackets": (CHAT, lambda: formatted({"type": "regex", "regex": "[" * 24_000}), 400),
    "a quote": (CHAT, lambda: formatted({"type": "grammar", "grammar": 'start: "' + '\\"' * 16_000}), 400),
    "a large multiple": (CHAT, lambda: multiple(99_999_989), 400),
    "a multiple": (CHAT, lambda: multiple(49_999), 200),
    "100 long messages": (CHAT, lambda: messages(*["a" * 131_000] * 100), 400),
    "10,000 messages": (CHAT, lambda: messages(*["a"] * 10_000), 400),
    "a text to tokens": ("/tokenize", lambda: {"content": "a " * 524_288}, 200),
    "pieces": ("/tokenize", lambda: {"content": "a " * 262_144, "with_pieces": True}, 200),
    "a long text to tokens": ("/tokenize", lambda: {"messages": messages("a " * 7_500_000)["messages"]}, 413),
    "tokens to text": ("/detokenize", lambda: {"tokens": [*range(40_000)] * 20}, 200),
    "empty lists": (CHAT, lambda: padded("[" + "[]," * 5_000_000 + "1]"), 413),
    "names": (CHAT, lambda: padded("{" + ",".join(f'"k{i}":1' for i in range(1_200_000)) + "}"), 413),
    "numbers": (CHAT, lambda: padded("[" + "1," * 7_900_000 + "1]"), 413),
    "names that are read": (CHAT, lambda: padded("{" + ",".join(f'"k{i}":1' for i in range(290_000)) + "}"), 200),
}


@pytest.mark.model
@pytest.mark.parametrize("name", REQUESTS)
def test_health_and_streams_go_on_beside_a_request(client: httpx2.Client, name: str) -> None:
    path, make, status = REQUESTS[name]
    document, is_over = make(), Event()
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    with ThreadPoolExecutor(2) as clients:
        watches = [clients.submit(longest_s, client, is_over, wait) for wait in (health, stream)]
        try:
            answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
        finally:
            is_over.set()
    assert answer.status_code == status
    allowed_s = LONGEST_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert [watch.result() < allowed_s for watch in watches] == [True, True], [each.result() for each in watches]


def make_group(limit_bytes: int) -> Path:
    """A control group of a memory limit, of the first or the second version; skips where none can be made."""
    is_first = (GROUPS / "memory").is_dir()
    group = (GROUPS / "memory" if is_first else GROUPS) / f"edgespec-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    return group


@pytest.fixture
def real_cache(tmp_path: Path) -> Path:
    """A model with the KV cache of the real one, which reads a prompt in a quarter of the time."""
    layers, hidden, inner, heads, head_dim = 30, tiny.HIDDEN, tiny.INNER, 3, 64
    shapes = {"model.embed_tokens.weight": [tiny.VOCAB, hidden], "model.norm.weight": [hidden]}
    for number in range(layers):
        layer = f"model.layers.{number}."
        shapes |= {f"{layer}{name}_layernorm.weight": [hidden] for name in ("input", "post_attention")}
        shapes |= {f"{layer}self_attn.{part}_proj.weight": [heads * head_dim, hidden] for part in "qkv"}
        shapes |= {f"{layer}self_attn.o_proj.weight": [hidden, heads * head_dim]}
        shapes |= {f"{layer}mlp.{part}_proj.weight": [inner, hidden] for part in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": [hidden, inner]}
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": 8192,
        "rms_norm_eps": tiny.EPS,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    }
    tiny.write_huggingface(tmp_path / "source", draw("llama", shapes), config=config)
    export_model(tmp_path / "source", tmp_path / "model", precision="fp32")
    return tmp_path / "model"


@pytest.mark.slow
def test_long_requests_at_once_within_a_memory_limit_leave_the_server_alive(real_cache: Path) -> None:
    """What does not fit beside the others is refused, and answered afterwards."""
    group = make_group(570 * 10**6)
    prompts = [f"{number} " * 1050 for number in range(3)]  # longer than is foreseen; two of them fit
    within = ["bash", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "bash"]
    try:
        with served_model(real_cache, *within) as client, ThreadPoolExecutor(len(prompts)) as clients:

            def ask(prompt: str) -> httpx2.Response:
                return client.post(CHAT, json=messages(prompt))

            first = [*clients.map(ask, prompts)]
            codes = {answer.json().get("error", {}).get("code") for answer in first if answer.status_code != 200}
            assert {answer.status_code for answer in first} == {200, 503}
            assert codes == {"out_of_memory"}
            refused = [prompt for prompt, answer in zip(prompts, first, strict=True) if answer.status_code == 503]
            assert [ask(prompt).status_code for prompt in refused] == [200] * len(refused)
    finally:
        group.rmdir()
