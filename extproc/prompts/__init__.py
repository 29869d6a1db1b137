"""From a request to its prompts' token ids: tokenizers, chat templates, a pod's own rendering, chunks of text."""
