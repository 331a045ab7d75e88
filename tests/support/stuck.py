"""An engine on any decoder, and a decoder that works for ever."""

from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import tiny
from double import Double
from lent import LentProcess
from table_decoder import TableDecoder

from edgespec import Engine
from edgespec.decoding.decoder import Decoder
from edgespec.engine.generation import LoadedModel
from edgespec.engine.target_caches import TargetCaches
from edgespec.manifest import read_manifest
from edgespec.text.prompt_encoder import PromptEncoder
from edgespec.text.tokenizer import Tokenizer
from edgespec.types import Logits, TokenIds


@dataclass
class StuckDecoder(Double):
    """A pass ends when it is interrupted, and not before."""

    vocab_size: int = tiny.VOCAB
    context_length: int = 200
    num_fed: int = 0
    has_begun: Event = field(default_factory=Event)
    is_interrupted: Event = field(default_factory=Event)

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        self.has_begun.set()
        assert self.is_interrupted.wait(120)
        raise RuntimeError("interrupted")

    def interrupt(self) -> None:
        self.is_interrupted.set()


class StuckLater(StuckDecoder):
    """A few passes end by themselves."""

    num_left = 3

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        self.num_left -= 1
        table = TableDecoder(tiny.VOCAB, seed=3)
        return table.logits(tokens, num_last) if self.num_left >= 0 else super().logits(tokens, num_last)


def engine_of(folder: Path, decoder: Decoder, template: str | None = None) -> Engine:
    """With the tokenizer of a model folder, plain and by default without a chat template."""
    manifest = read_manifest(folder)
    encoder = PromptEncoder(manifest, Tokenizer(folder / "tokenizer.json"), template, LentProcess())
    return Engine(LoadedModel(manifest=manifest, encoder=encoder), TargetCaches(decoder))
