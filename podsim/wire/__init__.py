"""What a simulated pod says and understands: OpenAI JSON, KV events, metrics text, chat templates. No I/O."""
