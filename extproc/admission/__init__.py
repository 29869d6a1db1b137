"""Between a request and its endpoint: its class, the room at endpoints, the queue, and what load takes from it."""
