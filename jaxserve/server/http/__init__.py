"""The transport: connections, what happens to a request before its route, and how bytes are sent."""
