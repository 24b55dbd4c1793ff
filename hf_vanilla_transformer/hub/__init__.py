"""Model cards, what they say, and uploads to the Hub."""
