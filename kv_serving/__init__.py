"""What a person or a client talks to: the command line now, the HTTP server later."""
