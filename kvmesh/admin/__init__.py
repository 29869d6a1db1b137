"""Who may see admin pages: tokens, certificates, the gate of both servers, and what a client shows."""
