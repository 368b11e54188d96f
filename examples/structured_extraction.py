"""Extract facts as JSON that always follows a schema, with a running `jaxserve serve`. Needs `pip install openai`.

The bundled model knows some Python and nothing else, so that the values are its imagination. What the schema promises
holds with any model: names, types, bounds, and nothing besides.
"""

import os

from openai import OpenAI
from pydantic import BaseModel, Field

TEXT = "def area(width: float, height: float) -> float: ..."


class Parameter(BaseModel):
    """A parameter of a function."""

    name: str = Field(max_length=16)
    type: str = Field(max_length=16)


class Function(BaseModel):
    """A function, as it is to be extracted."""

    name: str = Field(max_length=16)
    parameters: list[Parameter] = Field(max_length=3)
    is_public: bool


def main() -> None:
    """Extract a `Function` twice: as a whole, and while its text is generated."""
    client = OpenAI(
        base_url=os.environ.get("JAXSERVE_URL", "http://127.0.0.1:8000") + "/v1",
        api_key=os.environ.get("JAXSERVE_API_KEY", "none"),
    )
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": f"Describe this function as JSON: {TEXT}"}]
    asked = {"model": model, "messages": messages, "max_tokens": 400, "response_format": Function}

    completion = client.chat.completions.parse(**asked, seed=1)
    print(completion.choices[0].message.parsed)

    with client.chat.completions.stream(**asked, seed=2) as stream:
        for event in stream:
            if event.type == "content.delta":
                print(event.delta, end="", flush=True)
        function = stream.get_final_completion().choices[0].message.parsed
    assert function is not None
    print(f"\n{function.name!r} has {len(function.parameters)} parameters")


if __name__ == "__main__":
    main()
