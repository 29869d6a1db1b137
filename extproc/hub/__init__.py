"""Tokenizer files of models from a Hugging Face hub: chosen, fetched, checked, and kept in folders."""
