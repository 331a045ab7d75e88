"""An engine without weights that answers by rule: it writes what a function makes of its prompt."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from double import Double
from lent import LentProcess
from table_decoder import TableDecoder
from tokenizers import Tokenizer as Library

from edgespec import Engine
from edgespec.engine.generation import LoadedModel
from edgespec.engine.target_caches import TargetCaches
from edgespec.manifest import read_manifest
from edgespec.simulation.synthetic import HeldTokens
from edgespec.text.prompt_encoder import PromptEncoder
from edgespec.text.tokenizer import Tokenizer
from edgespec.types import Logits, TokenIds

# In the manner of templates that take tools, with the tags of Hermes.
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<tool_call> calls one<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# In the manner of those that open the reasoning.
THINKING_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)


@dataclass
class ScriptedDecoder(Double):
    """Writes what answer makes of the text of the prompt, then the end token."""

    tokenizer: Tokenizer
    answer: Callable[[str], str]
    end_token: int = 2
    context_length: int = 4000
    header: str = "<|im_start|>assistant\n"  # of an answer
    _held: HeldTokens = field(default_factory=HeldTokens)

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer.pieces)

    @property
    def num_fed(self) -> int:
        return self._held.num_fed

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        self._held.feed(tokens, num_last, self.context_length)
        start = self._last_start(tokens)
        prompt, begun = tokens[:start], tokens[start:].tolist()
        text = self.tokenizer.decode(prompt, self.tokenizer.special_tokens.values())
        script = [*self.tokenizer.encode(self.answer(text), special=True).tolist(), self.end_token]
        rows = np.zeros((num_last, self.vocab_size), np.float32)
        for row in range(num_last):
            done = begun[: len(begun) - (num_last - 1 - row)]
            is_right = done == script[: len(done)] and len(done) < len(script)
            rows[row, script[len(done)] if is_right else self.end_token] = 10.0
        return rows

    def _last_start(self, tokens: TokenIds) -> int:
        """Where the last answer begins."""
        header = self.tokenizer.encode(self.header, special=True)
        ends = np.flatnonzero(tokens == header[-1]) + 1
        return int(next(end for end in ends[::-1] if np.array_equal(tokens[end - len(header) : end], header)))


def scripted_engine(
    model: Path,
    folder: Path,
    answer: Callable[[str], str],
    template: str | None = TOOL_TEMPLATE,
    special: tuple[str, ...] = (),
    *,
    seed: int | None = None,
    header: str = ScriptedDecoder.header,
    architecture: str = "llama",
) -> Engine:
    """An engine with the tokenizer of a model folder, and further special tokens.

    Args:
        folder: Takes the tokenizer.
        seed: Write what a table of this seed says, and not the answer.
    """
    library = Library.from_file(str(model / "tokenizer.json"))
    library.add_special_tokens(list(special))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(library.to_str())))
    tokenizer = Tokenizer(folder / "tokenizer.json")
    decoder: Any = ScriptedDecoder(tokenizer, answer, header=header)
    if seed is not None:
        decoder = TableDecoder(decoder.vocab_size, seed=seed, context_length=decoder.context_length)
    manifest = replace(
        read_manifest(model),
        architecture=architecture,
        vocab_size=decoder.vocab_size,
        context_length=decoder.context_length,
    )
    return Engine(
        LoadedModel(manifest=manifest, encoder=PromptEncoder(manifest, tokenizer, template, LentProcess())),
        TargetCaches(decoder),
    )
