"""What the routes accept: types only. Ranges are checked by `SamplingParams` and `engine.limits`."""
