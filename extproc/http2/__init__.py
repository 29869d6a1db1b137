"""An HTTP/2 and gRPC server of our own; it knows nothing of the rest."""
