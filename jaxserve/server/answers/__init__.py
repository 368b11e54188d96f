"""From a parsed body to the engine and back: prompts, generation, and answers of the OpenAI APIs but for responses."""
