"""What users of other programs type behind /set and /show, and where it lies here."""

SET_ELSEWHERE = {
    "system": "/system TEXT sets the system message",
    "format": "edgespec chat --schema FILE --prompt TEXT answers with JSON",
    "parameter": "leave that word out: /set NAME VALUE",
    "num_ctx": "edgespec chat --context TOKENS bounds the context",
    "num_predict": "/set max_tokens N bounds an answer",
    "verbose": "/stats on shows figures below answers",
    "quiet": "/stats off hides the figures below answers",
    "think": "/think on lets the model reason first",
    "nothink": "/think off has the model answer at once",
    "nohistory": "edgespec chat --no-history saves nothing",
}
SHOW_ELSEWHERE = {
    "info": "/model shows what is known of the model",
    "parameters": "/set shows all settings",
    "system": "/system shows the system message",
}
