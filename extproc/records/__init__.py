"""What is written of requests: access log, audit chain, traces."""
