"""Which instance gets a request."""

import numpy as np


class LeastLoaded:
    """Requests go to the instance with the fewest prompt tokens outstanding, the first of equals. For one thread."""

    def __init__(self, instances: int):
        self.outstanding = np.zeros(instances, np.int64)  # prompt tokens of requests that were sent and have not ended

    def take(self, prompt_tokens: int) -> int:
        """The instance for a request of so many tokens, which counts from now on. Mutates."""
        instance = int(self.outstanding.argmin())
        self.outstanding[instance] += prompt_tokens
        return instance

    def ended(self, instance: int, prompt_tokens: int) -> None:
        """A request that `take` has sent there is over. Mutates."""
        self.outstanding[instance] -= prompt_tokens
