"""Another runtime behind a pipe, for peers.py: a JSON line in, a JSON line out.

The first line says what to load and how; each further line holds a prompt's tokens. What the runtime prints goes
to stderr. It runs in an environment that may lack edgespec, and imports nothing of it. All times are those of a
reader who gets each token as it is made.
"""

import json
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple, Protocol

# Threads of the runtime that answered before spin for a while and take a core from this one.
_PAUSE_S = 0.1
_NUM_DRAFT = 5


class Setup(NamedTuple):
    """draft_path: The file of a drafter model, for the way draft-model."""

    path: str
    way: str
    num_threads: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    draft_path: str | None = None


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


def timed(answer: Sequence[int] | str, num_tokens: int, begun_s: float, times_s: Sequence[float]) -> Decoded:
    """An answer whose pieces came at these times."""
    if not times_s:
        return Decoded(answer, 0, 0.0, 0.0)
    return Decoded(answer, num_tokens - 1, times_s[-1] - times_s[0], times_s[0] - begun_s)


class LlamaCpp:
    """xllamacpp: its server without the network, one slot, read as a stream."""

    def __init__(self, setup: Setup) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = setup.path
        params.n_ctx, params.n_parallel, params.n_gpu_layers = setup.context_length, 1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = setup.num_threads
        params.cache_ram_mib, params.verbosity = 0, 0
        if setup.way != "plain":
            kind = "DRAFT_SIMPLE" if setup.way == "draft-model" else setup.way.replace("-", "_").upper()
            types = xllamacpp.common_speculative_type
            params.speculative.types = [getattr(types, f"COMMON_SPECULATIVE_TYPE_{kind}")]
        if setup.way == "draft-model":
            draft = params.speculative.draft
            draft.mparams.path, draft.n_gpu_layers = setup.draft_path, 0
            draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = setup.num_threads
        self._server = xllamacpp.Server(params)

    def decode(self, tokens: Sequence[int], max_tokens: int) -> Decoded:
        texts: list[str] = []
        times_s: list[float] = []
        num_tokens = 0
        errors: list[str] = []

        def read(chunk: dict[str, Any]) -> bool:
            nonlocal num_tokens
            times_s.append(perf_counter())
            if "choices" not in chunk:
                errors.append(str(chunk.get("error", chunk)))
                return True
            texts.append(chunk["choices"][0]["text"])
            num_tokens = chunk.get("usage", {}).get("completion_tokens", num_tokens)
            return False

        begun_s = perf_counter()
        self._server.handle_completions(
            {
                "prompt": list(tokens),
                "max_tokens": max_tokens,
                "temperature": 0.0,
                "cache_prompt": False,
                "stream": True,
            },
            read,
        )
        if errors:
            raise RuntimeError(errors[0])
        return timed("".join(texts), num_tokens, begun_s, times_s)


class GenAI:
    """onnxruntime-genai, a token at a time, or with drafts of earlier n-grams."""

    def __init__(self, setup: Setup) -> None:
        import onnxruntime_genai

        self._genai, self._way = onnxruntime_genai, setup.way
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
        if self._way == "ngram":
            params.set_speculative_options(ngram_size=3, max_draft_tokens=_NUM_DRAFT)
        begun_s = perf_counter()
        times_s: list[float] = []
        generator = self._genai.Generator(self._model, params)
        generator.append_tokens(list(tokens))
        while not generator.is_done():
            generator.generate_next_token()
            times_s.append(perf_counter())
        made = [int(token) for token in generator.get_sequence(0)[len(tokens) :]]
        return timed(made, len(made), begun_s, times_s)


class OpenVino:
    """openvino-genai, from the GGUF file or from a folder of its own; a drafter model is a folder of its own."""

    def __init__(self, setup: Setup) -> None:
        import openvino_genai

        self._genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = setup.context_length
        more: dict[str, Any] = {"prompt_lookup": True} if setup.way == "prompt-lookup" else {}
        if setup.way == "draft-model":
            more = {"draft_model": openvino_genai.draft_model(setup.draft_path, "CPU")}
        self._way = setup.way
        self._eos = set(setup.eos_token_ids)
        self._pipeline = openvino_genai.LLMPipeline(
            setup.path, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=setup.num_threads, **more
        )

    def decode(self, tokens: Sequence[int], max_tokens: int) -> Decoded:
        import numpy as np
        import openvino

        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.stop_token_ids = max_tokens, False, self._eos
        if self._way != "plain":
            config.num_assistant_tokens = _NUM_DRAFT
        if self._way == "prompt-lookup":
            config.max_ngram_size = 3
        ids = np.array([tokens], np.int64)
        inputs = self._genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        times_s: list[float] = []
        running = self._genai.StreamingStatus.RUNNING

        class Reader(self._genai.StreamerBase):  # type: ignore[name-defined, misc]
            def write(self, token: object) -> Any:
                times_s.append(perf_counter())
                return running

            def end(self) -> None: ...

        begun_s = perf_counter()
        made = self._pipeline.generate(inputs, config, Reader())
        return timed(made.tokens[0], len(made.tokens[0]), begun_s, times_s)


class DejaVuu:
    """dejavuu on a folder of peer_folder.py; the way is its method, and plain its baseline."""

    def __init__(self, setup: Setup) -> None:
        from dejavuu.decoders.text import Model

        self._model = Model(Path(setup.path), threads=setup.num_threads)
        self._way, self._eos = setup.way, setup.eos_token_ids[0]

    def decode(self, tokens: Sequence[int], max_tokens: int) -> Decoded:
        from dejavuu.core.engine import generate
        from dejavuu.drafters import make_drafter

        times_s: list[float] = []
        drafter = None if self._way == "plain" else make_drafter(self._way.replace("-", "_"))
        begun_s = perf_counter()
        made = generate(
            self._model,
            list(tokens),
            max_tokens,
            drafter,
            eos=self._eos,
            on_emit=lambda token, is_accepted: times_s.append(perf_counter()),
        )
        return timed(made.tokens, len(made.tokens), begun_s, times_s)


RUNTIMES: dict[str, type[LlamaCpp] | type[GenAI] | type[OpenVino] | type[DejaVuu]] = {
    "xllamacpp": LlamaCpp,
    "onnxruntime-genai": GenAI,
    "openvino-genai": OpenVino,
    "dejavuu": DejaVuu,
}


def peak_rss_bytes() -> int:
    """The most memory that this process has had resident so far; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


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
                    reply: dict[str, Any] = {"version": metadata.version(name)}
                else:
                    sleep(_PAUSE_S)
                    reply = runtime.decode(question["tokens"], question["max_tokens"])._asdict()
            except Exception as error:  # a runtime can raise anything
                reply = {"error": " ".join((str(error).strip() or type(error).__name__).split())[:300]}
            print(json.dumps({**reply, "peak_rss_bytes": peak_rss_bytes()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
