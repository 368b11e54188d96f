"""Routing of requests to instances."""

import numpy as np


class LeastLoaded:
    """A router that picks the instance with the fewest outstanding prompt tokens, or the first of several.

    One thread at a time may use it.
    """

    def __init__(self, instances: int):
        self.outstanding = np.zeros(instances, np.int64)  # prompt tokens of unfinished requests, by instance

    def take(self, prompt_tokens: int) -> int:
        """Return the instance for a request, and count its prompt tokens there until `ended`."""
        instance = int(self.outstanding.argmin())
        self.outstanding[instance] += prompt_tokens
        return instance

    def ended(self, instance: int, prompt_tokens: int) -> None:
        """Stop counting a request that `take` sent to the instance."""
        self.outstanding[instance] -= prompt_tokens
