"""Choosing and preparing lower precisions by what they lose on calibration text: AWQ, GPTQ, sensitivity."""
