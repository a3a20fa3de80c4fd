"""How processes talk to each other: the wire format, the handshake, the server's admission and the client."""
