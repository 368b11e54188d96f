"""What requests ask: functions from a vocabulary, a number and a random generator to samples."""
