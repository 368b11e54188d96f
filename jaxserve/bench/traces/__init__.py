"""Request traces: when requests came and how long they were, from real services or made to resemble them."""
