"""The addresses of ollama's API beside answers: models, those that are loaded, vectors, and what is refused."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import asdict
from time import monotonic, time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from edgespec import Inventory, Preset, __version__
from edgespec.server.answers import Services
from edgespec.server.embeddings import TextVectors, respond_with_vectors
from edgespec.server.errors import ApiError, wrong
from edgespec.server.model_host import HostedModel
from edgespec.server.model_names import LATEST, ServedModel
from edgespec.server.ollama_answers import nanoseconds, timestamp
from edgespec.server.ollama_protocol import OllamaEmbed, OllamaName, keep_alive_s
from edgespec.server.pages import show_page
from edgespec.server.protocol import EmbeddingsRequest, texts_of
from edgespec.server.sse import LINES, line
from edgespec.system.threads import in_thread

_OLLAMA_VERSION = "0.13.4"  # whose API this is, the first with /v1/responses; some clients refuse older ones
# In names, as of SmolLM2-135M-Instruct.Q4_1.gguf: the number of weights, and how they are stored.
_SIZE = re.compile(r"(?<![a-z\d.])(\d+(?:\.\d+)?[bm])(?![a-z\d])", re.IGNORECASE)
_BLOCKS = re.compile(r"(?<![a-z\d])(i?q\d(?:_[\da-z]+)*|bf16|f16|f32|mxfp4)(?![a-z\d])", re.IGNORECASE)
_NEVER = "9999-12-31T23:59:59.000000Z"


async def root(services: Services, request: Request, *, has_page: bool) -> Response:
    """The chat page for browsers; for others what clients of ollama look for."""
    if has_page and "text/html" in request.headers.get("accept", ""):
        return show_page()
    return PlainTextResponse("Ollama is running")


async def version(services: Services, request: Request) -> Response:
    return JSONResponse({"version": _OLLAMA_VERSION, "edgespec": __version__})


async def tags(services: Services, request: Request) -> Response:
    models = await in_thread(lambda: [_entry(model) for model in services.names.models()])
    return JSONResponse({"models": models})


async def ps(services: Services, request: Request) -> Response:
    known = {model.name: model for model in await in_thread(lambda: list(services.names.models()))}
    hosted = services.host.hosted
    names = [name for name in hosted if name in known]
    inventory = Inventory(services.names.home)
    sizes = await in_thread(lambda: [inventory.describe(str(known[name].folder)).memory_bytes for name in names])
    models = [_loaded(known[name], hosted[name], size or 0) for name, size in zip(names, sizes, strict=True)]
    return JSONResponse({"models": models})


async def show(services: Services, request: Request) -> Response:
    asked = await services.bodies.read(OllamaName, request)
    name = await services.name_for(request, asked.model or asked.name)
    for model in await in_thread(lambda: list(services.names.models())):
        if model.name == name:
            hosted = await in_thread(services.hosted, name)
            context = hosted.engine.context_length if hosted else model.context_length
            return JSONResponse(await in_thread(_description, model, context))
    raise ApiError(404, f"{name} is not prepared yet; send it a request first", param="model")


async def pull(services: Services, request: Request) -> Response:
    """Nothing is downloaded for a request; a model that is here already needs it no more."""
    asked = await services.bodies.read(OllamaName, request)
    await services.name_for(request, asked.model or asked.name)
    done = {"status": "success"}
    return JSONResponse(done) if asked.stream is False else Response(line(done), media_type=LINES.content_type)


async def refuse_change(services: Services, request: Request) -> Response:
    raise ApiError(
        403,
        "requests cannot change the models of this server; use edgespec models (pull, rename, remove) and "
        "edgespec export",
    )


async def embed(services: Services, request: Request) -> Response:
    asked, begun_s = await services.bodies.read(OllamaEmbed, request), monotonic()

    def document(found: TextVectors) -> dict[str, Any]:
        return {
            "model": asked.model or found.model,
            "embeddings": [vector.tolist() for vector in found.vectors],
            "total_duration": nanoseconds(monotonic() - begun_s),
            "load_duration": nanoseconds(found.leased_s - begun_s),
            "prompt_eval_count": found.num_tokens,
        }

    return await _respond_with_vectors(services, request, asked, "input", document)


async def embeddings(services: Services, request: Request) -> Response:
    """The older form of embed: one text."""
    asked = await services.bodies.read(OllamaEmbed, request)

    def document(found: TextVectors) -> dict[str, Any]:
        return {"embedding": found.vectors[0].tolist() if found.vectors else []}

    return await _respond_with_vectors(services, request, asked, "prompt", document)


async def _respond_with_vectors(
    services: Services,
    request: Request,
    asked: OllamaEmbed,
    field: str,
    write: Callable[[TextVectors], dict[str, Any]],
) -> Response:
    if (stated := getattr(asked, field)) is None:
        raise wrong(field, "is missing; give a text, or an empty one to load the model")
    texts = texts_of(field, stated) if stated else []
    wanted = EmbeddingsRequest(model=asked.model, input=texts, dimensions=asked.dimensions)
    cuts, keep = asked.truncate is not False, keep_alive_s(asked.keep_alive)
    return await respond_with_vectors(services, request, wanted, texts, write, keep, cuts=cuts)


def _entry(model: ServedModel) -> dict[str, Any]:
    name, manifest = model.name + LATEST, model.manifest
    weights = manifest.files.get(manifest.weights)
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(model.created),
        "size": sum(record.bytes for record in manifest.files.values()),
        "digest": weights.sha256 if weights else manifest.vocab_sha256,
        "details": model_details(model),
    }


def _loaded(model: ServedModel, hosted: HostedModel, memory_bytes: int) -> dict[str, Any]:
    """A model that is loaded, in a list; expires_at is when it is closed if nobody uses it from now on."""
    engine, entry = hosted.engine, _entry(model)
    del entry["modified_at"]
    left_s = (
        hosted.expiry.when() - asyncio.get_running_loop().time()
        if hosted.expiry and not hosted.leases
        else hosted.idle_s
    )
    return entry | {
        "expires_at": _NEVER if left_s is None else timestamp(time() + left_s),
        "size": memory_bytes,
        "size_vram": 0 if engine.device_names[0] == "cpu" else memory_bytes,
        "device": engine.device_names[0],
        "context_length": engine.context_length,
    }


def _description(model: ServedModel, context_length: int) -> dict[str, Any]:
    manifest, preset = model.manifest, model.preset
    template = model.chat_template()
    family = manifest.architecture
    suggested = asdict(manifest.sampling) if manifest.sampling else {}
    stated = preset or Preset(name=model.name, model=model.name)
    return {
        "modelfile": stated.modelfile(),
        "system": stated.system or "",
        "license": manifest.source.license or "",
        "parameters": "".join(
            f"{line}\n"
            for line in stated.parameters({name.replace("_", "-"): value for name, value in suggested.items()})
        ),
        "template": template,
        "details": model_details(model),
        "model_info": {
            "general.architecture": family,
            "general.basename": model.name,
            f"{family}.context_length": context_length,
        },
        "capabilities": model.capabilities(template),
        "modified_at": timestamp(model.created),
    }


def model_details(model: ServedModel) -> dict[str, Any]:
    """The kind of a model, as far as it is known before it is loaded."""
    manifest, source = model.manifest, model.manifest.source
    names = (source.name, source.repository or "", model.name)
    blocks = _BLOCKS.search(source.name) if manifest.precision == "source" else None
    return {
        "parent_model": model.preset.model if model.preset else "",
        "format": "onnx",
        "family": manifest.architecture,
        "families": [manifest.architecture],
        "parameter_size": next((found[1].upper() for each in names if (found := _SIZE.search(each))), ""),
        "quantization_level": blocks[1].upper() if blocks else manifest.precision,
    }
