"""POST /v1/embeddings: vectors of texts, one after the other."""

from base64 import b64encode
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from edgespec import ContextOverflow, Engine, TokenIds, UsageError, parse_ids, require_embedding_model
from edgespec.server.answers import Services
from edgespec.server.client import run_for_client, run_until_closing
from edgespec.server.errors import ApiError, explain, wrong
from edgespec.server.model_host import in_daemon
from edgespec.server.protocol import EmbeddingsRequest, Text, texts_of
from edgespec.server.request_log import RequestRecord, record_of
from edgespec.system.cancel import Cancel
from edgespec.system.threads import in_thread


async def embeddings(services: Services, request: Request) -> Response:
    asked = await services.bodies.read(EmbeddingsRequest, request)
    texts = texts_of("input", asked.input)
    if len(texts) > services.limits.num_inputs:
        raise wrong("input", f"has {len(texts)} texts; wanted at most {services.limits.num_inputs}")
    if asked.encoding_format not in (None, "float", "base64"):
        raise wrong("encoding_format", f"is '{asked.encoding_format}'; wanted float or base64")

    async def lend() -> Response:
        name = await services.name_for(request, asked.model)
        if (manifest := await in_thread(services.names.manifest, name)) is not None:
            require_embedding_model(manifest)  # before it is loaded
        with services.admission.place(1):
            async with services.host.lease(name) as lease:
                document = await _document(
                    services, lease.model.engine, name, asked, texts, record_of(request.scope)
                )
        # Not in the event loop: it may have millions of numbers.
        body = await in_thread(msgspec.json.encode, document)
        return Response(body, media_type="application/json")

    return await run_for_client(request.receive, run_until_closing(services.drain.is_closing, lend()))


async def _document(
    services: Services,
    engine: Engine,
    name: str,
    asked: EmbeddingsRequest,
    texts: list[Text],
    record: RequestRecord,
) -> dict[str, Any]:
    embedder = engine.embedder
    inputs = await services.admission.wait_for(in_daemon(lambda: [_encode(engine, text) for text in texts]))
    if asked.dimensions is not None and not 1 <= asked.dimensions <= embedder.size:
        raise wrong("dimensions", f"is {asked.dimensions}; wanted 1 to {embedder.size} for {name}")
    record.prompt_tokens = num_tokens = sum(map(len, inputs))
    vectors = [await _vector(engine, tokens, asked.dimensions) for tokens in inputs]
    data = [
        {"object": "embedding", "index": i, "embedding": _written(vector, asked.encoding_format)}
        for i, vector in enumerate(vectors)
    ]
    services.metrics.count_tokens(name, num_tokens, 0)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": name, "usage": usage}


def _encode(engine: Engine, text: Text) -> TokenIds:
    """The tokens of a text. Raises ApiError: 400, it does not fit, or has tokens that the model lacks."""
    try:
        if isinstance(text, str):
            return engine.embedder.encode(text)
        return engine.embedder.complete(parse_ids(text, engine.manifest.vocab_size, "input"))
    except (ContextOverflow, UsageError) as error:
        told = explain(error)
        raise ApiError(told.status, str(told), param="input", code=told.code) from None


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
    """A vector as JSON has it."""
    if encoding == "base64":
        return b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.astype(np.float64).tolist()
    return numbers
