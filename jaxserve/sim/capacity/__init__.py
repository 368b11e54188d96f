"""`jaxserve sim plan`: how many of which devices serve a load within objectives, the cheapest first."""
