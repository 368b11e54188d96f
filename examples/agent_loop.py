"""Let a model work with a tool until it answers, with a running `jaxserve serve`. Needs `pip install openai`.

The bundled model cannot decide for itself, so that the first turn demands a call (`tool_choice`) and the last one a
text. A model that knows tools needs neither: leave `tool_choice` out and stop at the first answer without calls.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from openai import OpenAI

FUNCTIONS = {"area": "the area of a rectangle", "circumference": "the length of its four sides"}
MEASURE = {
    "type": "function",
    "function": {
        "name": "measure",
        "description": "Measure a rectangle.",
        "strict": True,  # arguments follow the schema in any case
        "parameters": {
            "type": "object",
            "properties": {
                "what": {"enum": list(FUNCTIONS)},
                "width": {"type": "integer", "minimum": 1, "maximum": 100},
                "height": {"type": "integer", "minimum": 1, "maximum": 100},
            },
            "required": ["what", "width", "height"],
            "additionalProperties": False,
        },
    },
}


def measure(arguments: Mapping[str, Any]) -> int:
    """Return the area or the circumference of a rectangle."""
    width, height = arguments["width"], arguments["height"]
    return width * height if arguments["what"] == "area" else 2 * (width + height)


def main() -> None:
    """Ask, run the calls that the model makes, and return their results to it."""
    client = OpenAI(
        base_url=os.environ.get("JAXSERVE_URL", "http://127.0.0.1:8000") + "/v1",
        api_key=os.environ.get("JAXSERVE_API_KEY", "none"),
    )
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "How large is a garden of 4 by 3 metres?"}]
    for tool_choice in ("required", "none"):
        completion = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=[MEASURE],
            tool_choice=tool_choice,
            parallel_tool_calls=False,
            max_tokens=100,
            temperature=0,
        )
        answer = completion.choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls or ():
            result = measure(json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    print(messages[-1]["content"])


if __name__ == "__main__":
    main()
