"""A server of OpenAI's, Anthropic's and vLLM's protocols in front of a generation engine, which
keeps the tokens of every conversation, so that any program that has a `base_url` can be trained."""
