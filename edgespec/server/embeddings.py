"""POST /v1/embeddings: vectors of texts, one after the other."""

from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from edgespec import ContextOverflow, Engine, TokenIds, UsageError, parse_ids, require_embedding_model
from edgespec.server.answers import Services
from edgespec.server.errors import ApiError, explain, wrong
from edgespec.server.model_host import DEFAULT_S, Lease, in_daemon
from edgespec.server.protocol import EmbeddingsRequest, Text, texts_of
from edgespec.server.request_log import record_of
from edgespec.system.cancel import Cancel
from edgespec.system.threads import in_thread

_SEND_TEXTS = "; send texts, if another tokenizer made the ids (LangChain: check_embedding_ctx_length=False)"


class TextVectors(NamedTuple):
    """The vectors of texts by a model, the tokens of these, and when the model was there, by monotonic()."""

    model: str
    vectors: list[npt.NDArray[np.float32]]
    num_tokens: int
    leased_s: float


async def embeddings(services: Services, request: Request) -> Response:
    asked = await services.bodies.read(EmbeddingsRequest, request)
    if asked.encoding_format not in (None, "float", "base64"):
        raise wrong("encoding_format", f"is '{asked.encoding_format}'; wanted float or base64")

    def document(found: TextVectors) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": i, "embedding": _written(vector, asked.encoding_format)}
            for i, vector in enumerate(found.vectors)
        ]
        usage = {"prompt_tokens": found.num_tokens, "total_tokens": found.num_tokens}
        return {"object": "list", "data": data, "model": found.model, "usage": usage}

    return await respond_with_vectors(services, request, asked, texts_of("input", asked.input), document)


async def respond_with_vectors(
    services: Services,
    request: Request,
    asked: EmbeddingsRequest,
    texts: Sequence[Text],
    write: Callable[[TextVectors], dict[str, Any]],
    keep_alive_s: float | None = DEFAULT_S,
    *,
    cuts: bool = False,
) -> Response:
    """Make the vectors that a request asks for; without texts its model is only loaded.

    Args:
        write: Makes the document of the response; called in a thread.
        keep_alive_s: How long the model stays loaded, as Lease.keep takes it.
        cuts: Texts that do not fit are cut.

    Raises ApiError: 400, a text does not fit, or the request asks for what cannot be.
    """
    if len(texts) > services.limits.num_inputs:
        raise wrong("input", f"has {len(texts)} texts; wanted at most {services.limits.num_inputs}")

    async def lend() -> Response:
        name = await services.name_for(request, asked.model)
        if (manifest := await in_thread(services.names.manifest, name)) is not None:
            require_embedding_model(manifest)  # before it is loaded
        with services.admission.place(1):
            async with services.lease(name) as lease:
                lease.keep(keep_alive_s)
                encode = partial(_encode, lease.model.engine, cuts=cuts)
                found = await _vectors(services, lease, asked, [partial(encode, text) for text in texts])
        record_of(request.scope).prompt_tokens = found.num_tokens
        # Not in the event loop: it may have millions of numbers.
        body = await in_thread(lambda: msgspec.json.encode(write(found)))
        return Response(body, media_type="application/json")

    return await services.run(request, lend())


async def _vectors(
    services: Services, lease: Lease, asked: EmbeddingsRequest, encoders: list[Callable[[], TokenIds]]
) -> TextVectors:
    engine, name, leased_s = lease.model.engine, lease.shown_name, monotonic()
    size = engine.embedder.size
    inputs = await services.admission.wait_for(in_daemon(lambda: [encode() for encode in encoders]))
    if asked.dimensions is not None and not 1 <= asked.dimensions <= size:
        raise wrong("dimensions", f"is {asked.dimensions}; wanted 1 to {size} for {name}")
    vectors = [await _vector(engine, tokens, asked.dimensions) for tokens in inputs]
    num_tokens = sum(map(len, inputs))
    services.metrics.count_tokens(name, num_tokens, 0)
    return TextVectors(name, vectors, num_tokens, leased_s)


def _encode(engine: Engine, text: Text, *, cuts: bool) -> TokenIds:
    """The tokens of a text. Raises ApiError: 400, it does not fit, or has tokens that the model lacks."""
    try:
        if isinstance(text, str):
            return engine.embedder.encode(text, cuts=cuts)
        return engine.embedder.complete(parse_ids(text, engine.manifest.vocab_size, "input"))
    except (ContextOverflow, UsageError) as error:
        told = explain(error)
        hint = "" if isinstance(text, str) or told.code else _SEND_TEXTS
        raise ApiError(told.status, f"{told}{hint}", param="input", code=told.code) from None


async def _vector(engine: Engine, tokens: TokenIds, size: int | None) -> npt.NDArray[np.float32]:
    """The vector, or its first numbers, whose pass ends if nobody waits for it any more.

    In a thread of its own: it may wait long for those of other requests, and asyncio's threads are few.
    """
    cancel = Cancel()
    try:
        return await in_daemon(lambda: engine.embedder.vector(tokens, cancel, size))
    finally:
        cancel.set()


def _written(vector: npt.NDArray[np.float32], encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.astype(np.float64).tolist()
    return numbers
