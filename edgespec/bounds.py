"""Numbers of a manifest, within bounds that no real model reaches.

A file that was edited by hand or by an attacker may state larger ones, and memory would be reserved for these
before the graph is seen to have fewer.
"""

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=1, le=1 << 24)]
Size = Annotated[int, Meta(ge=1, le=1 << 12)]  # heads, and numbers in a head of attention
Layers = Annotated[int, Meta(ge=0, le=1 << 12)]
Width = Annotated[int, Meta(ge=1, le=1 << 16)]  # numbers in a hidden state
Index = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
Penalty = Annotated[float, Meta(ge=0.01, le=100)]  # by which logits are divided
