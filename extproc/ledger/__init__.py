"""The facts of requests and their listeners: counters, history, access log, audit chain, traces."""
