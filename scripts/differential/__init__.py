"""edgespec beside transformers, tokenizers and llama.cpp, over generated models: `make differential`."""
