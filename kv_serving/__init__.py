"""What a person or a client talks to: the command line and the HTTP server."""
