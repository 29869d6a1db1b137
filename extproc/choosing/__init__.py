"""Which endpoint serves a request: candidates, filters, scorers, the decision. Pure."""
