"""The names of a graph's inputs and outputs, by their roles."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The graph's names for its inputs and outputs; None for one that it does not have.

    %d stands for the layer. Without num_logits_to_keep the graph gives a row of logits for each token. It takes
    an attention bias for each kind of layer that it has, global and local. best is float32 [1, num_rows, 2]: for
    each row of logits the id of the most likely token, the lowest of equal ones, and the sum of the row, which is
    finite where all of its logits are.
    """

    input_ids: str = "input_ids"
    attention_mask: str | None = "attention_mask"
    position_ids: str | None = None
    num_logits_to_keep: str | None = "num_logits_to_keep"
    attention_bias: str | None = None
    local_attention_bias: str | None = None
    past_key: str = "past_key_values.%d.key"
    past_value: str = "past_key_values.%d.value"
    logits: str = "logits"
    best: str | None = None
    present_key: str = "present.%d.key"
    present_value: str = "present.%d.value"

    @property
    def is_plain(self) -> bool:
        """Whether all names are the ones that edgespec's own exports have."""
        own = {role: name or role for role, name in asdict(Signature()).items()}
        return all(name in (None, own[role]) for role, name in asdict(self).items())

    def roles(self, num_layers: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Role and name of each input, and of each output; past and present have a name for each layer."""
        inputs: list[tuple[str, str]] = []
        outputs: list[tuple[str, str]] = []
        for role, name in asdict(self).items():
            layers = range(num_layers if role.startswith(("past", "present")) else 1)
            if name is not None:
                is_output = role in ("logits", "best", "present_key", "present_value")
                (outputs if is_output else inputs).extend((role, name.replace("%d", str(at))) for at in layers)
        return inputs, outputs

    def caches(self, num_layers: int) -> list[tuple[str, str]]:
        """Names of past and present that belong together: keys, then values, layer by layer."""
        return [
            (past.replace("%d", str(layer)), present.replace("%d", str(layer)))
            for layer in range(num_layers)
            for past, present in ((self.past_key, self.present_key), (self.past_value, self.present_value))
        ]
