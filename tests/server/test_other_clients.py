"""The server asked by LiteLLM, LangChain and LlamaIndex: plain, streaming and from asyncio."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Served, home_with, serving, table_engine

from edgespec.server.model_names import ModelNames

pytestmark = pytest.mark.clients
MODEL, KEY, WORDS, LENGTH = "tiny", "key", "in the an", 9


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    names = ModelNames(home_with(tmp_path_factory.mktemp("home"), tiny=tiny_model))
    with serving(names, lambda name: table_engine(tiny_model), key=KEY) as found:
        yield found


@pytest.fixture(scope="module")
def wanted(served: Served) -> str:
    """The answer as the server gives it to anybody."""
    fields = {"model": MODEL, "messages": [{"role": "user", "content": WORDS}], "max_tokens": LENGTH}
    answer = served.post("/v1/chat/completions", fields, headers={"Authorization": f"Bearer {KEY}"}).json()
    return str(answer["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def litellm() -> Any:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network for prices
    return pytest.importorskip("litellm", reason="needs the package litellm: make test-serve")


@pytest.mark.filterwarnings("ignore")
def test_litellm(litellm: Any, served: Served, wanted: str) -> None:
    asked = {
        "model": f"openai/{MODEL}", "api_base": served.url, "api_key": KEY, "max_tokens": LENGTH,
        "messages": [{"role": "user", "content": WORDS}],
    }  # fmt: skip
    whole = litellm.completion(**asked)
    assert whole.choices[0].message.content == wanted
    assert whole.usage.completion_tokens == LENGTH
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == wanted
    assert [each.usage.completion_tokens for each in chunks if getattr(each, "usage", None)][-1] == LENGTH

    async def ask_twice() -> list[str]:
        stream = await litellm.acompletion(**asked, stream=True)
        text = "".join([each.choices[0].delta.content or "" async for each in stream])
        answer = await litellm.acompletion(**asked)
        return [text, answer.choices[0].message.content]

    assert asyncio.run(ask_twice()) == [wanted, wanted]
    text = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt=WORDS, api_base=served.url, api_key=KEY, max_tokens=4
    )
    assert text.usage.completion_tokens == 4
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked, "model": "openai/no-such", "num_retries": 0})


@pytest.mark.filterwarnings("ignore")
def test_langchain(served: Served, wanted: str) -> None:
    openai = pytest.importorskip("langchain_openai", reason="needs the package langchain_openai: make test-serve")
    model = openai.ChatOpenAI(
        base_url=served.url, api_key=KEY, model=MODEL, max_tokens=LENGTH, temperature=0, stream_usage=True
    )
    whole = model.invoke(WORDS)
    assert whole.content == wanted
    assert whole.usage_metadata["output_tokens"] == LENGTH
    chunks = list(model.stream(WORDS))
    assert "".join(each.content for each in chunks) == wanted
    assert sum(each.usage_metadata["output_tokens"] for each in chunks if each.usage_metadata) == LENGTH

    async def ask_at_once() -> list[str]:
        answers = await model.abatch([WORDS, WORDS])
        streamed = "".join([each.content async for each in model.astream(WORDS)])
        return [*(each.content for each in answers), streamed]

    assert asyncio.run(ask_at_once()) == [wanted] * 3
    value_of = pytest.importorskip("langchain_core.prompt_values").StringPromptValue
    prompts = [value_of(text=text) for text in ("in", "re re re re re re re re")]  # the second is drafted for
    assert model.generate_prompt(prompts).llm_output["token_usage"]["completion_tokens"] == 2 * LENGTH
    stopped = model.bind(stop=[wanted[3:5]]).invoke(WORDS).content
    assert stopped == wanted[: wanted.index(wanted[3:5])]


@pytest.mark.filterwarnings("ignore")
def test_llamaindex(served: Served, wanted: str) -> None:
    reason = "needs the package llama_index: make test-serve"
    like = pytest.importorskip("llama_index.llms.openai_like", reason=reason)
    llms = pytest.importorskip("llama_index.core.llms", reason=reason)
    model = like.OpenAILike(
        model=MODEL, api_base=served.url, api_key=KEY, is_chat_model=True, max_tokens=LENGTH, temperature=0,
        context_window=700,
    )  # fmt: skip
    messages = [llms.ChatMessage(role="user", content=WORDS)]
    assert model.chat(messages).message.content == wanted
    assert "".join(each.delta or "" for each in model.stream_chat(messages)) == wanted

    async def ask_twice() -> list[str]:
        whole = await model.achat(messages)
        streamed = "".join([each.delta or "" async for each in await model.astream_chat(messages)])
        return [whole.message.content, streamed]

    assert asyncio.run(ask_twice()) == [wanted, wanted]
    plain = like.OpenAILike(
        model=MODEL, api_base=served.url, api_key=KEY, is_chat_model=False, max_tokens=4, temperature=0,
        context_window=700,
    )  # fmt: skip
    assert plain.complete(WORDS).raw.usage.completion_tokens == 4
