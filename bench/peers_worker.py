"""Another runtime behind a pipe, for peers.py: a JSON line in, a JSON line out.

The first line says what to load and how; each further line holds a prompt's tokens. What the runtime prints goes
to stderr.
"""

import json
import os
import sys
from collections.abc import Sequence
from time import perf_counter, sleep
from typing import Any, NamedTuple, Protocol

from edgespec.system.system_info import installed_version, peak_rss_bytes

# Threads of the runtime that answered before spin for a while and take a core from this one.
_PAUSE_S = 0.1


class Setup(NamedTuple):
    path: str
    way: str
    num_threads: int
    context_length: int
    eos_token_ids: tuple[int, ...]


class Decoded(NamedTuple):
    """An answer as tokens, or as text from a runtime that gives no tokens.

    num_decoded and decode_s leave out the first token, which took first_s.
    """

    answer: Sequence[int] | str
    num_decoded: int
    decode_s: float
    first_s: float


class Runtime(Protocol):
    def decode(self, tokens: Sequence[int], max_tokens: int) -> Decoded: ...


class LlamaCpp:
    """xllamacpp: its server without the network, one slot. The times are its own."""

    def __init__(self, setup: Setup) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = setup.path
        params.n_ctx, params.n_parallel, params.n_gpu_layers = setup.context_length, 1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = setup.num_threads
        params.cache_ram_mib, params.verbosity = 0, 0
        if setup.way == "ngram-cache":
            params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_CACHE]
        self._server = xllamacpp.Server(params)

    def decode(self, tokens: Sequence[int], max_tokens: int) -> Decoded:
        question = {"prompt": list(tokens), "max_tokens": max_tokens, "temperature": 0.0, "cache_prompt": False}
        reply = self._server.handle_completions(question)
        timings = reply["timings"]
        # Its time leaves out the first token and its count does not.
        return Decoded(
            reply["choices"][0]["text"],
            timings["predicted_n"] - 1,
            timings["predicted_ms"] / 1e3,
            timings["prompt_ms"] / 1e3,
        )


class GenAI:
    """onnxruntime-genai, a token at a time."""

    def __init__(self, setup: Setup) -> None:
        import onnxruntime_genai

        self._genai = onnxruntime_genai
        config = onnxruntime_genai.Config(setup.path)
        config.overlay(
            json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": setup.num_threads}}}})
        )
        self._model = onnxruntime_genai.Model(config)
        self._context_length = setup.context_length

    def decode(self, tokens: Sequence[int], max_tokens: int) -> Decoded:
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(
            do_sample=False, max_length=min(len(tokens) + max_tokens, self._context_length), batch_size=1
        )
        begun = perf_counter()
        generator = self._genai.Generator(self._model, params)
        generator.append_tokens(list(tokens))
        generator.generate_next_token()
        first = perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        ended = perf_counter()
        made = [int(token) for token in generator.get_sequence(0)[len(tokens) :]]
        return Decoded(made, len(made) - 1, ended - first, first - begun)


class OpenVino:
    """openvino-genai, from the same GGUF file. The times are its own."""

    def __init__(self, setup: Setup) -> None:
        import openvino_genai

        self._genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = setup.context_length
        more = {"prompt_lookup": True} if setup.way == "prompt-lookup" else {}
        self._is_lookup = bool(more)
        self._eos = set(setup.eos_token_ids)
        self._pipeline = openvino_genai.LLMPipeline(
            setup.path, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=setup.num_threads, **more
        )

    def decode(self, tokens: Sequence[int], max_tokens: int) -> Decoded:
        import numpy as np
        import openvino

        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.stop_token_ids = max_tokens, False, self._eos
        if self._is_lookup:
            config.num_assistant_tokens, config.max_ngram_size = 5, 3
        ids = np.array([tokens], np.int64)
        inputs = self._genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        made = self._pipeline.generate(inputs, config)
        figures = made.perf_metrics
        first_s = figures.get_ttft().mean / 1e3
        return Decoded(
            made.tokens[0],
            len(made.tokens[0]) - 1,
            figures.get_generate_duration().mean / 1e3 - first_s,
            first_s,
        )


RUNTIMES: dict[str, type[LlamaCpp] | type[GenAI] | type[OpenVino]] = {
    "xllamacpp": LlamaCpp,
    "onnxruntime-genai": GenAI,
    "openvino-genai": OpenVino,
}


def main() -> None:
    """Serve until stdin ends."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        runtime: Runtime | None = None
        for line in sys.stdin:
            question = json.loads(line)
            try:
                if runtime is None:
                    name = question.pop("runtime")
                    runtime = RUNTIMES[name](Setup(**question))
                    reply: dict[str, Any] = {"version": installed_version(name)}
                else:
                    sleep(_PAUSE_S)
                    reply = runtime.decode(question["tokens"], question["max_tokens"])._asdict()
            except Exception as error:  # a runtime can raise anything
                reply = {"error": (str(error).strip() or type(error).__name__).splitlines()[0]}
            print(json.dumps({**reply, "peak_rss_bytes": peak_rss_bytes()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
