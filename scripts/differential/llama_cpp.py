"""llama.cpp as a peer: its server, by the package xllamacpp, in a process of its own.

python -m differential.llama_cpp FILE.gguf     prints its URL, and ends with its stdin
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import numpy.typing as npt

_TIMEOUT_S = 60


class NoPeer(Exception):
    """Another program is not there, or does not read a model."""


class LlamaCpp:
    """A GGUF file, opened by llama.cpp."""

    def __init__(self, path: Path) -> None:
        """Raises NoPeer."""
        if find_spec("xllamacpp") is None:
            raise NoPeer("the package xllamacpp, which has llama.cpp, is not installed")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "differential.llama_cpp", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # else it starts a debugger
        )
        assert self._process.stdout is not None
        self._url = self._process.stdout.readline().strip()
        if not self._url:
            _, said = self._process.communicate()
            raise NoPeer(f"llama.cpp does not read it ({_last_words(said)})")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, path: str, **body: Any) -> Any:
        request = Request(self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a raw text, special ones among them."""
        tokens: list[int] = self._ask("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]
        return tokens

    def log_probs(self, tokens: Sequence[int], vocab_size: int) -> npt.NDArray[np.float32]:
        """The log-probability of each token behind a text, [vocab_size]; NaN where the server states none."""
        # A letter is drawn, as the server says nothing of a token that ends the answer or cuts a character.
        asked = {"n_predict": 1, "n_probs": vocab_size, "logit_bias": [["a", 1000]], "cache_prompt": False}
        answer = self._ask("/completion", prompt=list(tokens), **asked)
        found = np.full(vocab_size, np.nan, np.float32)
        for entry in answer["completion_probabilities"][0]["top_logprobs"]:
            found[entry["id"]] = entry["logprob"]
        return found


def _last_words(said: str) -> str:
    lines = [line for line in said.splitlines() if "error" in line.lower() or "assert" in line.lower()]
    return (lines or said.splitlines() or ["it ended"])[0].strip().rpartition("error loading model: ")[2]


def _serve(path: str) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = path, 256, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type(0)  # floats, not half floats
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.hostnames, params.port, params.verbosity = ["127.0.0.1"], 0, 1
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _serve(sys.argv[1])
