"""`jaxserve sim plan --calibrate`: hardware fitted to one measured run of a server, with the errors that remain."""
