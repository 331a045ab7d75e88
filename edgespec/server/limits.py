"""What one client may ask of the server, so that it stays responsive for the others."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of requests, connections and waiting."""

    body_bytes: int = 16 << 20
    headers_bytes: int = 16 << 10
    num_connections: int = 512
    num_answers: int = 64  # that are made or wait; more are refused
    tokenize_length: int = 1 << 20  # characters of a text that is made to tokens for its own sake
    num_tokens: int | None = None  # of an answer, beside what its context has room for
    num_choices: int = 16  # answers to one request
    num_inputs: int = 2048  # texts of one request for vectors
    num_stops: int = 16
    stop_length: int = 1000  # characters
    num_biases: int = 1024
    num_top_logprobs: int = 20
    headers_s: float = 15.0  # to send the head of a request
    body_s: float = 30.0  # to send its body
    reader_s: float = 60.0  # to read what waits for it
    keep_alive_s: float = 10.0  # between two events of a stream
    drain_s: float = 10.0  # for answers to end by themselves when the server shuts down
