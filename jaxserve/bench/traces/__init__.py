"""Request traces, recorded from services or generated: when requests arrived and how long they were."""
