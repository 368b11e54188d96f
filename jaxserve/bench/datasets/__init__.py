"""Datasets: functions that make samples from a vocabulary, a number of requests and a random generator."""
