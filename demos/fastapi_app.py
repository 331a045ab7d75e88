"""Answers over HTTP as they are written, in an app of your own.

    pip install fastapi uvicorn
    python demos/fastapi_app.py
    curl -N 127.0.0.1:8000/answers --json '{"messages": [{"role": "user", "content": "Name three rivers."}]}'

The answer comes as server-sent events. When the client goes away, also before the first word, the answer ends.
Clients send their whole conversation each time, and the model reads only what it has not read before.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Literal

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field

from edgespec import AnswerStream, ContextOverflow, EdgeSpecError, Engine, UsageError, load


class Turn(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str


class Question(BaseModel):
    messages: Annotated[list[Turn], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=1000)] = 200


def make_app(engine: Engine) -> FastAPI:
    @asynccontextmanager
    async def closing(app: FastAPI) -> AsyncIterator[None]:
        with engine:  # the end of the server cancels the answers that are still being made
            yield

    app = FastAPI(lifespan=closing)

    @app.exception_handler(EdgeSpecError)
    async def refuse(request: Request, error: EdgeSpecError) -> JSONResponse:
        status = 413 if isinstance(error, ContextOverflow) else 400 if isinstance(error, UsageError) else 503
        return JSONResponse({"error": str(error)}, status)

    @app.post("/answers")
    async def answers(question: Question) -> StreamingResponse:
        messages = [turn.model_dump() for turn in question.messages]
        # Making tokens of a long text takes a moment, in which other requests are served.
        answer = await asyncio.to_thread(engine.stream, messages, max_tokens=question.max_tokens, timeout_s=120)
        return StreamingResponse(events(answer), media_type="text/event-stream")

    return app


async def events(answer: AnswerStream) -> AsyncIterator[str]:
    """An event for each piece of text, and one for the end or what has gone wrong."""
    try:
        async with answer:  # which ends it when the client has gone
            async for chunk in answer:
                yield event(text=chunk.text, finish_reason=chunk.finish_reason)
    except EdgeSpecError as error:
        yield event(error=str(error))


def event(**values: str | None) -> str:
    return f"data: {json.dumps(values)}\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer over HTTP.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    app = make_app(load(options.model))
    uvicorn.run(app, host="127.0.0.1", port=options.port, timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
