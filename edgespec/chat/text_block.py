"""Messages of several lines between three double quotes, which begin with them and end at the next ones."""

_QUOTES = '"""'


def is_open_block(text: str) -> bool:
    """Whether a text that is typed begins a block and has not ended it, so that Enter makes a new line."""
    text = text.lstrip()
    return text.startswith(_QUOTES) and _QUOTES not in text[len(_QUOTES) :]


def block_text(text: str) -> str | None:
    """What stands between the quotes; None for a text that is no block, such as code that has more behind them."""
    text = text.strip()
    inner = text[len(_QUOTES) : -len(_QUOTES)]
    is_block = text.startswith(_QUOTES) and text.endswith(_QUOTES) and len(text) >= 2 * len(_QUOTES)
    return inner.strip("\n") if is_block and _QUOTES not in inner else None
