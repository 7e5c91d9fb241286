"""What a user can say: the server's settings, their flags, and what one request may ask for."""
