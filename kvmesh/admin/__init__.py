"""Access to admin pages: tokens, certificates, the gate of both servers, and clients' credentials."""
