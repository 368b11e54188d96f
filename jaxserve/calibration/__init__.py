"""Chooses and prepares lower precisions by their loss on calibration text: AWQ, GPTQ and sensitivity profiles."""
