"""The HTTP server: any OpenAI client, many agents at once, everything observable."""
