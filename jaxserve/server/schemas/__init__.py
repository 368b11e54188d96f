"""Request bodies as pydantic models, which check types. `SamplingParams` and `engine.limits` check ranges."""
