"""Drawing tokens: the operations, and what a device keeps for them."""
