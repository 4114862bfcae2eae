"""The HTTP server: an asyncio front over an engine that steps in a thread of its own."""
