"""Bodies of the APIs that vLLM serves -> facts; and edits of a body that leave the rest byte for byte."""
