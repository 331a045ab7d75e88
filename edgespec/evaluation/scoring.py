"""How well a model predicts a text."""

from edgespec.decoding.likelihood import negative_log_likelihood
from edgespec.engine.engine import Engine
from edgespec.errors import ContextOverflow, UsageError

_CHUNK_TOKENS = 256


def score(engine: Engine, text: str) -> tuple[int, float]:
    """Number of tokens and their mean negative log-likelihood in nats, the first token left out.

    Raises:
        UsageError: The text has fewer than two tokens.
        ContextOverflow: The text has more tokens than the context length.
    """
    tokens = engine.tokenizer.encode(text)
    if len(tokens) < 2:
        raise UsageError(f"the text has {len(tokens)} tokens; scoring needs at least 2")
    if len(tokens) > engine.context_length:
        raise ContextOverflow(len(tokens), engine.context_length, engine.manifest.context_length)
    total = 0.0
    for start in range(0, len(tokens) - 1, _CHUNK_TOKENS):
        stop = min(start + _CHUNK_TOKENS, len(tokens) - 1)
        logits = engine.target.logits(tokens[:stop], stop - start)
        total += float(negative_log_likelihood(logits, tokens[start + 1 : stop + 1]).sum())
    return len(tokens), total / (len(tokens) - 1)
