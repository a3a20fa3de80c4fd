"""Connections between processes: the wire format, the handshake, the admission by the server, and the client."""
