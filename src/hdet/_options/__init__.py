"""A run's options: small objects that check themselves. They import nothing of what they configure."""
