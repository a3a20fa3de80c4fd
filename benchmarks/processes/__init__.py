"""How jobs of several processes scale, and how they meet."""
