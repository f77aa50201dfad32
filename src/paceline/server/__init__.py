"""The server: any OpenAI client, many agents at once."""
