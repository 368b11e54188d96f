"""Examples of the official OpenAI client with a running `jaxserve serve`. Needs `pip install openai`."""

import os

from openai import OpenAI


def main() -> None:
    """Complete a text, stream a chat, compare two embeddings, and show an error."""
    client = OpenAI(
        base_url=os.environ.get("JAXSERVE_URL", "http://127.0.0.1:8000") + "/v1",
        api_key=os.environ.get("JAXSERVE_API_KEY", "none"),
    )
    model = client.models.list().data[0].id
    print(f"# {model}")

    completion = client.completions.create(model=model, prompt="def main():", max_tokens=32, temperature=0)
    print(completion.choices[0].text)

    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "def fibonacci(n):"}],
        max_tokens=48,
        seed=1,
        stream=True,
        extra_body={"top_k": 20},  # beyond OpenAI's own parameters
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    embeddings = client.embeddings.create(model=model, input=["import os", "import sys"]).data
    similarity = sum(a * b for a, b in zip(embeddings[0].embedding, embeddings[1].embedding, strict=True))
    print(f"similarity: {similarity:.3f}")

    try:
        client.completions.create(model=model, prompt="x", temperature=-1)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
